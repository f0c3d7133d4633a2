"""GELU's backward pass in TF32: which (N, 4C) matrices the kernel reads and writes, and how a warp touches them."""

from doc.draw.figure import Figure
from doc.draw.rung import account, boxed, column_of_tile, matrix, rung_figure

TOP, LOWER, SIZE = 96, 240, 96
COLUMNS = 330, 610  # of the account


def right(figure: Figure, x: float, y: float, to: float) -> None:
    figure.line(x, y, to, y, arrow=True)


def draw() -> str:
    """The kernel writes dinp along the rows and the output through a tile. Each block adds up its own columns."""
    figure = rung_figure("gelu_backward", "gelu_backward of", 880, 476, "What moves in GELU's backward pass")
    matrix(figure, 20, TOP, "dout", row=5)
    matrix(figure, 128, TOP, "inp", row=5)
    right(figure, 232, TOP + SIZE / 2, 258)
    boxed(figure, 264, TOP, "four columns:\n16 bytes of dout\nand 16 of inp", "d", 120, SIZE)
    right(figure, 390, TOP + SIZE / 2, 416)
    matrix(figure, 424, TOP, "dinp", row=5)
    figure.line(366, TOP + SIZE + 4, 366, LOWER + 48)
    right(figure, 366, LOWER + 48, 416)
    matrix(figure, 424, LOWER, "tile", row=5)
    column_of_tile(figure, 540, LOWER, "after a barrier", 5)
    right(figure, 640, LOWER + 48, 666)
    matrix(figure, 674, LOWER, "out_T", row=5)
    for x in 68, 176:
        figure.line(x, TOP + 42, x, TOP + 88, arrow=True)
    figure.text(20, TOP + SIZE + 20, "a block walks down its chunk", 13)
    figure.line(296, TOP + SIZE + 4, 296, LOWER + 5, arrow=True)
    boxed(figure, 264, LOWER + 8, "sums", "c", 70, 40)
    figure.line(258, LOWER + 28, 232, LOWER + 28, arrow=True)
    figure.text(128, LOWER - 8, "partials", 14)
    for chunk in range(4):
        figure.rect(128, LOWER + 3 + 14 * chunk, SIZE, 10, "c")
    figure.line(122, LOWER + 28, 96, LOWER + 28, arrow=True)
    figure.text(20, LOWER + 14, "dbias", 14)
    figure.rect(20, LOWER + 23, 68, 10, "c")
    account(
        figure, 20, 376, 38,
        "Four passes: two read, two written. A lane loads 16 bytes, half a warp 256 in a row. A tile is 64 x 64.",
        "Four numbers of each matrix and four sums, one for each column.",
        "Two barriers per tile. Many bytes are in flight after them.", COLUMNS,
    )  # fmt: skip
    return figure.svg()
