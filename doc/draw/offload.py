"""AdamW's state passes through two buffers of the GPU. When each of the three streams works, and what it waits for."""

from doc.draw.figure import Figure

PIECES, COPY, UPDATE = 6, 1.0, 0.16  # a copy's and an update's time
STREAMS = "fetch", "update", "store"
LEFT, SCALE, TOP, ROW, HIGH = 84, 92, 48, 74, 34
Span = tuple[float, float]


def spans() -> dict[str, list[Span]]:
    """When each piece is fetched, updated and stored. A buffer is free when the piece before last is stored."""
    found: dict[str, list[Span]] = {stream: [] for stream in STREAMS}

    def add(stream: str, length: float, *ends: float) -> float:
        start = max([*ends, found[stream][-1][1] if found[stream] else 0.0])
        found[stream].append((start, start + length))
        return start + length

    for i in range(PIECES):
        free = found["store"][i - 2][1] if i > 1 else 0.0
        add("store", COPY, add("update", UPDATE, add("fetch", COPY, free)))
    return found


def draw() -> str:
    at = spans()
    figure = Figure(LEFT + SCALE * at["store"][-1][1] + 20, TOP + 3 * ROW + 44, "Pieces pass through two buffers")
    figure.text(8, 22, "Six pieces, two buffers, three streams; time to the right", 16, bold=True)
    for row, stream in enumerate(STREAMS):
        y = TOP + ROW * row
        figure.text(8, y + 22, stream, 15, bold=True)
        for i, (start, end) in enumerate(at[stream]):
            x = LEFT + SCALE * start
            figure.box(x, y, SCALE * (end - start) - 2, HIGH, "ab"[i % 2], f"{i}", 14, 22)
            if row < 2:  # the next stream waits for this one
                x = LEFT + SCALE * end
                figure.line(x - 3, y + HIGH + 1, x + 2, y + ROW - 2, "ink", 1.2, arrow=True)
            elif i + 2 < PIECES:  # a fetch waits for a store
                x, beside = LEFT + SCALE * end, LEFT + SCALE * end + 34  # beside the box of the update in between
                up = (x, y - 1), (beside, TOP + ROW + HIGH + 14), (beside, TOP + ROW - 14), (x + 8, TOP + HIGH + 3)
                for j in range(3):
                    figure.line(*up[j], *up[j + 1], "faint", 1.2, dashed=True, arrow=j == 2)
    y = TOP + 3 * ROW + 6
    for i, words in enumerate(("in the first buffer", "in the second")):
        figure.key(LEFT + 180 * i, y, "ab"[i], words)
    figure.line(LEFT + 360, y + 7, LEFT + 400, y + 7, "faint", 1.2, dashed=True, arrow=True)
    figure.text(LEFT + 410, y + 12, "waits until the buffer is free", 13)
    return figure.svg()
