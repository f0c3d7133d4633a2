"""A grid of blocks, a block of warps, a warp of lanes, and where each of them lives."""

from doc.draw.figure import Figure
from doc.draw.launches import MULTIPROCESSORS

BLOCKS, WARPS, LANES = 300, 3, 32
CELL = 24


def draw() -> str:
    figure = Figure(880, 424, "Grid, blocks, warps, lanes, and multiprocessors")
    figure.text(16, 24, f"A launch: a grid of {BLOCKS} blocks, of {WARPS * LANES} threads each", 16, bold=True)
    for place, b in enumerate((0, 1, 2, 3, 4, None, BLOCKS - 1)):
        if b is None:
            figure.text(50 + 76 * place, 65, "…", 16, "middle")
            continue
        figure.box(16 + 76 * place, 38, 68, 44, "a" if b == 2 else "f", f"block {b}", 13, 27)
    figure.text(560, 56, "blockIdx.x says which,", 14, colour="faint")
    figure.text(560, 75, f"gridDim.x is {BLOCKS}", 14, colour="faint")
    figure.line(16 + 76 * 2, 82, 16, 128, "rule")
    figure.line(16 + 76 * 2 + 68, 82, 16 + 26 * CELL + 168, 128, "rule")

    figure.rect(16, 128, 26 * CELL + 168, 138, "a")
    figure.text(26, 149, "block 2: its threads share memory and barriers", 14, bold=True)
    figure.text(782, 149, f"blockDim.x is {WARPS * LANES}", 13, "end")
    for w in range(WARPS):
        y = 160 + 34 * w
        figure.text(26, y + 18, f"warp {w}", 13)
        for lane in range(LANES):
            if w < 2 and 3 <= lane < 30:
                continue  # the place of words
            figure.rect(76 + 22 * lane, y, 20, 26, "b" if w == 1 else "paper")
            if lane in (0, 1, 2, 30, 31):
                number = w * LANES + lane
                figure.text(86 + 22 * lane, y + 17, str(number), 11, "middle", bold=w == 1)
    figure.text(86 + 22 * 16, 160 + 18, "… each thread by its threadIdx.x …", 13, "middle")
    figure.text(86 + 22 * 16, 194 + 18, "… 32 lanes run one instruction together …", 13, "middle")

    says = f"The GPU: {MULTIPROCESSORS} multiprocessors (H200), each with blocks of its own, for example these"
    figure.text(16, 302, says, 16, bold=True)
    for place, m in enumerate((0, 1, 2, MULTIPROCESSORS - 1)):
        x = 16 + 204 * place + 26 * (place > 2)
        figure.rect(x, 316, 196, 92, "f")
        figure.text(x + 10, 335, f"multiprocessor {m}", 13, colour="faint")
        for i, b in enumerate(range(m, BLOCKS, MULTIPROCESSORS)):
            figure.rect(x + 8 + 61 * i, 344, 57, 28, "a" if b == 2 else "paper")
            figure.text(x + 36 + 61 * i, 363, f"block {b}", 11, "middle")
        figure.text(x + 10, 396, "registers, shared memory", 12, colour="faint")
    figure.text(16 + 204 * 3 + 8, 366, "…", 16, "middle")
    return figure.svg()
