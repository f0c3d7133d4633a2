"""A warp's tile as results of mma: which fragments of a and b one step of 8 along K needs."""

from doc.draw.rung import Operands, rung_figure

M, N, K, SCALE = 64, 32, 8, 6
ROW, COLUMN = 16, 8  # where the result that is picked out begins


def draw() -> str:
    shows = "4 x 4 results of mma from four fragments of a and four of b"
    figure = rung_figure("matmul", "mma_kernel", 880, 520, shows)
    operands = Operands(figure, 34, 66, M, N, K, SCALE)
    for row in range(0, M, 16):
        operands.mark("a", row, 0, 16, K, "a", "paper")
        for column in range(0, N, 8):
            operands.mark("c", row, column, 16, 8, "c", "paper")
    for column in range(0, N, 8):
        operands.mark("b", 0, column, K, 8, "b", "paper")
    for name, row, column, rows, columns in (("a", ROW, 0, 16, K), ("b", 0, COLUMN, K, 8), ("c", ROW, COLUMN, 16, 8)):
        operands.mark(name, row, column, rows, columns, "e", "ink")
    figure.lines(operands.width + 74, 130, 22, (
        "A warp has 64 x 32 elements of c: 4 x 4 results of mma.", "For 8 numbers of K it loads four fragments of a",
        "(16 x 8, blue) and four of b (8 x 8, orange).", "Each pair of them is one instruction (red):",
        "16 x 8 x 8 = 1024 multiplications.", "", "Without tensor cores the same 8 numbers of K take the warp",
        "64 x 32 x 8 / 32 = 512 instructions. Now they take 16.", "Loads: 24 numbers per lane for 16 instructions,",
        "since a lane holds 4 of each fragment of a and 2 of b.",
        "In registers a lane keeps 64 sums. All wait for the", "next tiles while nobody multiplies.",
    ))  # fmt: skip
    return figure.svg()
