"""A tile of flash attention in shared memory, row by row and swizzled, with the lanes of one phase of each read."""

from collections.abc import Callable

from doc.draw.figure import Figure

ROWS, CHUNKS = 8, 8  # eight chunks of 16 bytes are the 32 banks; what comes below and to the right repeats this
W, H, LEFT, GAP = 34, 23, 58, 34
Phase = dict[tuple[int, int], list[int]]


def row_by_row(row: int, chunk: int) -> int:
    return chunk


def swizzled(row: int, chunk: int) -> int:
    """The place of a chunk in its row, as swizzled_chunks of flash_attention.cu has it."""
    return chunk ^ (row & 2) ^ ((row ^ row >> 2) & 1) << 2


def first_phase(lanes: int, wants: Callable) -> Phase:
    """The lanes that are served together, by the row and chunk that they want."""
    wanted: Phase = {}
    for lane in range(lanes):
        wanted.setdefault(wants(lane // 4, lane % 4), []).append(lane)
    return wanted


READS = (
    ("scores, lanes 0 to 7: each wants a chunk, four floats", "a", first_phase(8, lambda g, t: (g, t))),
    ("sums, lanes 0 to 15: each wants half a chunk, two floats", "b", first_phase(16, lambda g, t: (2 * t, g // 2))),
)


def tile(figure: Figure, x0: float, y0: float, place: Callable, phase: Phase, colour: str) -> None:
    words = [0] * CHUNKS  # that each bank is asked for
    for row in range(ROWS):
        for chunk in range(CHUNKS):
            at, lanes = place(row, chunk), phase.get((row, chunk), [])
            words[at] += len(lanes) > 0
            x, y = x0 + at * W, y0 + row * H
            figure.rect(x, y, W, H, colour if lanes else "paper", "rule")
            if lanes:
                figure.text(x + W / 2, y + 16, ", ".join(map(str, lanes)), 11 if len(lanes) > 1 else 12, "middle")
            else:
                figure.text(x + W / 2, y + 16, str(chunk), 11, "middle", "faint")
    for at, count in enumerate(words):
        figure.text(x0 + at * W + W / 2, y0 - 6, str(4 * at), 11, "middle", "faint")
        figure.text(x0 + at * W + W / 2, y0 + ROWS * H + 17, str(count), 13, "middle", bold=count > 1)
    passes = max(words)
    says = f"{passes} passes" if passes > 1 else "1 pass"
    figure.text(x0 + CHUNKS * W / 2, y0 + ROWS * H + 38, says, 15, "middle", bold=passes > 1)


def draw() -> str:
    figure = Figure(LEFT + 2 * CHUNKS * W + GAP + 10, 640, "The swizzle: chunks of a tile, banks, and who wants them")
    for i, (title, colour, phase) in enumerate(READS):
        y = 86 + i * 312
        figure.text(LEFT, y - 62, title, 15, bold=True)
        figure.text(LEFT - 8, y - 6, "bank", 11, "end", "faint")
        figure.text(LEFT - 8, y + ROWS * H + 17, "words", 11, "end", "faint")
        for row in range(ROWS):
            figure.text(LEFT - 8, y + row * H + 16, f"row {row}", 11, "end", "faint")
        for x, place, how in ((LEFT, row_by_row, "row by row"), (LEFT + CHUNKS * W + GAP, swizzled, "swizzled")):
            figure.text(x + CHUNKS * W / 2, y - 28, how, 14, "middle")
            tile(figure, x, y, place, phase, colour)
    return figure.svg()
