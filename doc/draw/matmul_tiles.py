"""A block of the tiled product walks along K, a pair of tiles at a time."""

from doc.draw.rung import Operands, rung_figure

SIDE, SCALE = 4, 13  # of a tile, which stands for 32; pixels
M, N, K = 3 * SIDE, 4 * SIDE, 4 * SIDE


def draw() -> str:
    figure = rung_figure("matmul", "shared_kernel", 880, 480, "Tiles of a and b in shared memory, walking along K")
    operands = Operands(figure, 34, 66, M, N, K, SCALE)
    row, column = SIDE, 2 * SIDE
    for i in range(K // SIDE):
        for name, at in (("a", (row, i * SIDE)), ("b", (i * SIDE, column))):
            operands.mark(name, *at, SIDE, SIDE, "a" if i == 1 else "paper", "ink")
            x, y = operands.place(name, at[0], at[1])
            figure.text(x + 8, y + 16, str(i), 14, "middle")
    operands.mark("c", row, column, SIDE, SIDE, "c", "ink")
    operands.mark("c", row + 1, column + 2, 1, 1, "e")
    operands.mark("a", row + 1, SIDE, 1, SIDE, "e")
    operands.mark("b", SIDE, column + 2, SIDE, 1, "e")
    figure.lines(operands.width + 64, 130, 22, (
        "A block makes 32 x 32 elements of c (green).", "Step 1: its threads copy tile 1 of a and of b",
        "from device memory into shared memory (blue).", "Then each thread takes a row of the one and a",
        "column of the other (red) for its element.", "Then come the tiles of step 2.", "",
        "Each number of a tile is read once from device", "memory and 32 times from shared memory.",
        "A thread keeps one sum in a register.", "All 1024 threads wait at two barriers per step.",
    ))  # fmt: skip
    return figure.svg()
