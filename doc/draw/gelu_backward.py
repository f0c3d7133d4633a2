"""The rungs of GELU's backward pass: which (N, 4C) matrices its kernels read and write, and how a warp touches them."""

from doc.draw.figure import Figure
from doc.draw.rung import account, boxed, column_of_tile, heading, matrix

TOPIC, TOP, LOWER, SIZE = "gelu_backward", 96, 240, 96
COLUMNS = 330, 610  # of the account


def begun(kernel: str, height: float) -> Figure:
    figure = Figure(880, height, f"What moves in {kernel} of the ladder of GELU's backward pass")
    heading(figure, TOPIC, kernel)
    return figure


def right(figure: Figure, x: float, y: float, to: float = 0) -> None:
    figure.line(x, y, to or x + 26, y, arrow=True)


def sums_kernel(figure: Figure, x: float) -> None:
    """The kernel that reads dinp again, for the bias."""
    matrix(figure, x, TOP, "kernel 2: dinp", whole=True)
    figure.line(x + SIZE / 2, TOP + SIZE + 4, x + SIZE / 2, TOP + SIZE + 30, arrow=True)
    figure.rect(x, TOP + SIZE + 34, SIZE, 10, "c")
    figure.text(x, TOP + SIZE + 62, "dbias", 14)


def inputs(figure: Figure, words: str) -> None:
    """A row of dout and inp, in registers."""
    matrix(figure, 20, TOP, "dout", row=5)
    matrix(figure, 128, TOP, "inp", row=5)
    right(figure, 232, TOP + SIZE / 2)
    boxed(figure, 264, TOP, words, "d", 120, SIZE)
    right(figure, 390, TOP + SIZE / 2)


def scattered() -> str:
    figure = begun("scattered_kernel", 400)
    inputs(figure, "a number a lane:\ntanh u,\ngelu'(x), gelu(x)")
    matrix(figure, 424, TOP, "dinp", row=5)
    matrix(figure, 540, TOP, "out_T", column=5)
    sums_kernel(figure, 710)
    account(
        figure, 20, 306, 38,
        "Five passes: two read, two written, one read again. A warp stores to 32 sectors of out_T: 1024 bytes for "
        "128.",
        "A number of each matrix. Nothing is kept for the sums.",
        "Each store to out_T, for 32 sectors; and kernel 2, for all of kernel 1.", COLUMNS,
    )  # fmt: skip
    return figure.svg()


def a_kernel_for_each() -> str:
    figure = begun("derivative_kernel", 350)
    scale, size, middle = 4, 64, TOP + 54

    def kernel(x: float, name: str, *reads: str) -> float:
        figure.text(x, TOP - 10, name, 13)
        for read in reads:
            matrix(figure, x, TOP + 22, read, row=5, scale=scale)
            x += size + 10
        right(figure, x - 6, middle, x + 18)
        return x + 24

    x = kernel(20, "1: the derivative", "dout", "inp")
    matrix(figure, x, TOP + 22, "dinp", row=5, scale=scale)
    x = kernel(x + 90, "2: the output", "inp")
    matrix(figure, x, TOP + 22, "out", row=5, scale=scale)
    x = kernel(x + 90, "3: transposed through a tile", "out")
    column_of_tile(figure, x, TOP + 22, "tile", 5, scale)
    right(figure, x + size + 4, middle, x + size + 28)
    matrix(figure, x + size + 34, TOP + 22, "out_T", row=5, scale=scale)
    x += size + 124
    figure.text(x, TOP - 10, "4: sums", 13)
    matrix(figure, x, TOP + 22, "dinp", row=5, scale=scale)
    figure.line(x + size / 2, TOP + 90, x + size / 2, TOP + 108, arrow=True)
    figure.rect(x, TOP + 112, size, 8, "c")
    figure.text(x, TOP + 136, "dbias", 14)
    account(
        figure, 20, 270, 38,
        "Eight passes: three, two, two and one. Each access is of whole sectors: four for 32 numbers.",
        "Nothing from one kernel to the next: each number goes to memory and back.",
        "Each kernel, for the whole of the one before it.", COLUMNS,
    )  # fmt: skip
    return figure.svg()


def by_tiles(kernel: str, words: str, again: bool, moves: str, stays: str, waits: str) -> str:
    """One of the last three rungs: it writes dinp along the rows and the output through a tile. again: another kernel
    reads dinp for the sums. Else each block adds up its own columns."""
    figure = begun(kernel, 476)
    inputs(figure, words)
    matrix(figure, 424, TOP, "dinp", row=5)
    figure.line(366, TOP + SIZE + 4, 366, LOWER + 48)
    right(figure, 366, LOWER + 48, 416)
    matrix(figure, 424, LOWER, "tile", row=5)
    column_of_tile(figure, 540, LOWER, "after a barrier", 5)
    right(figure, 640, LOWER + 48)
    matrix(figure, 674, LOWER, "out_T", row=5)
    if again:
        sums_kernel(figure, 778)
    else:
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
    account(figure, 20, 376, 38, moves, stays, waits, COLUMNS)
    return figure.svg()


def one_pass() -> str:
    return by_tiles(
        "tile_kernel", "one exponential:\ngelu'(x), gelu(x)", True,
        "Five passes, all of whole sectors: two read, two written, and dinp once more.",
        "x and its exponential, until gelu'(x) and gelu(x) are both there.",
        "A barrier for each tile; and kernel 2, for all of kernel 1.",
    )  # fmt: skip


def sums_on_the_way() -> str:
    return by_tiles(
        "sums_kernel", "one exponential:\ngelu'(x), gelu(x)", False,
        "Four passes: two read, two written. Of the sums only one row a chunk moves.",
        "The sum of a thread's numbers of dinp, from the first tile of the chunk on.",
        "Two barriers a tile, and few bytes in flight: 4 bytes a lane and load.",
    )  # fmt: skip


def four_columns() -> str:
    return by_tiles(
        "gelu_backward of", "four columns:\n16 bytes of dout\nand 16 of inp", False,
        "Four passes, as before. A lane loads 16 bytes, half a warp 256 in a row. A tile is 64 x 64.",
        "Four numbers of each matrix and four sums, one for each column.",
        "The same barriers, but four times as many bytes are in flight behind them.",
    )  # fmt: skip


PICTURES = {
    "gelu_backward_scattered": scattered, "gelu_backward_kernels": a_kernel_for_each, "gelu_backward_tile": one_pass,
    "gelu_backward_sums": sums_on_the_way, "gelu_backward_wide": four_columns,
}  # fmt: skip
