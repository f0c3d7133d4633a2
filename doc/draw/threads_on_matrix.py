"""Which part of a matrix a block, a warp and a thread of five launchers have, at GPT-2's sizes."""

from math import prod

from doc.draw.figure import Figure
from doc.draw.launches import launched
from kernels.gelu import gelu_forward
from kernels.layernorm import layernorm_backward, layernorm_forward
from kernels.matmul import transpose
from kernels.reduce import column_sum, rows_per_chunk

B, T, C = 4, 1024, 768
N, WARP, FOUR = B * T, 32, 4
W, H, LEFT, STEP = 400, 132, 20, 232


def text_of(grid: tuple, block: tuple) -> str:
    return f"grid {' x '.join(map(str, grid))}, block {' x '.join(map(str, block))}"


class Panel:
    """The upper left part of an (N, columns) matrix: `rows` rows and `columns` columns, each to its own scale."""

    def __init__(
        self, figure: Figure, x: float, y: float, title: str, launch: tuple, rows: int, columns: int, says: str
    ):  # fmt: skip
        self.figure, self.x, self.y, self.rows, self.columns = figure, x, y, rows, columns
        figure.text(x, y - 28, title, 15, bold=True)
        figure.text(x, y - 9, text_of(*launch), 13, colour="faint")
        figure.rect(x, y, W, H, "f")
        figure.text(x, y + H + 19, says, 13)

    def mark(self, row: float, column: float, rows: float, columns: float, colour: str) -> None:
        across, down = W / self.columns, H / self.rows
        width, height = max(3.0, columns * across), max(2.0, rows * down)
        self.figure.rect(self.x + column * across, self.y + row * down, width, height, colour)

    def rules(self, rows: int) -> None:
        """A line under every so many rows."""
        for row in range(0, self.rows, rows):
            y = self.y + row * H / self.rows
            self.figure.line(self.x, y, self.x + W, y, "paper")


def draw() -> str:
    right = LEFT + W + 30
    figure = Figure(right + W + 20, 60 + 3 * STEP, "Blocks, warps and threads on the matrices of five launchers")
    for x, (colour, words) in zip(
        (LEFT, 112, 234), (("a", "a block"), ("b", "its first warp"), ("e", "a thread of that")), strict=True
    ):
        figure.rect(x, 8, 18, 18, colour)
        figure.text(x + 24, 22, words, 14)
    figure.text(394, 22, f"N = {N} rows go down (some are shown), columns across", 14, colour="faint")
    y = [96 + i * STEP for i in range(3)]

    columns = 4 * C
    launch = launched(gelu_forward, None, None, None, N, columns)["gelu_forward"]
    threads, rows = prod(launch[1]), N // launch[0][0]
    gelu = Panel(figure, LEFT, y[0], f"gelu_forward, (N, {columns})", launch, 4, columns,
                 f"block: {rows} rows and {FOUR * threads} columns; thread: {rows} rows of {FOUR}")  # fmt: skip
    gelu.mark(0, 0, rows, FOUR * threads, "a")
    gelu.mark(0, 0, rows, FOUR * WARP, "b")
    gelu.mark(0, 0, rows, FOUR, "e")
    gelu.rules(1)

    pair = None, None
    launch = launched(layernorm_forward, None, pair, None, pair, B, T, C)["layernorm_forward"]
    rows = launch[1][1]
    forward = Panel(figure, right, y[0], f"layernorm_forward, (N, {C})", launch, 3 * rows, C,
                    f"block: {rows} rows; warp: a row; thread: every {WARP}nd four of it")  # fmt: skip
    forward.mark(0, 0, rows, C, "a")
    forward.mark(0, 0, 1, C, "b")
    for i in range(0, C, FOUR * WARP):
        forward.mark(0, i, 1, FOUR, "e")
    forward.rules(1)

    launch = launched(layernorm_backward, None, pair, None, None, pair, pair, B, T, C)["layernorm_backward"]
    warps, rows = launch[1][0] // WARP, 24
    for x, phase in ((LEFT, 1), (right, 2)):
        says = "first a warp has a row, a lane every 32nd four" if phase == 1 else (
            f"then a thread has {FOUR} columns of the block's {warps} rows")  # fmt: skip
        panel = Panel(figure, x, y[1], f"layernorm_backward, phase {phase}", launch, rows, C, says)
        panel.mark(0, 0, warps, C, "a")
        if phase == 1:
            panel.mark(0, 0, 1, C, "b")
            for i in range(0, C, FOUR * WARP):
                panel.mark(0, i, 1, FOUR, "e")
        else:
            panel.mark(0, 0, warps, FOUR * WARP, "b")
            panel.mark(0, 0, warps, FOUR, "e")
        panel.rules(1)

    columns = 3 * C
    launch = launched(column_sum, None, None, N, columns)["column_partials"]
    chunk = rows_per_chunk(N, multiple=8)
    says = f"block: {chunk} rows and {FOUR * prod(launch[1])} columns; thread: {chunk} rows of {FOUR}"
    sums = Panel(figure, LEFT, y[2], f"column_sum, first stage, (N, {columns})", launch, 4 * chunk, columns, says)
    sums.mark(0, 0, chunk, FOUR * prod(launch[1]), "a")
    sums.mark(0, 0, chunk, FOUR * WARP, "b")
    sums.mark(0, 0, chunk, FOUR, "e")
    sums.rules(chunk)

    launch = launched(transpose, None, None, N, C)["transpose"]
    side = launch[1][0]
    tiles = Panel(figure, right, y[2], f"transpose, (N, {C})", launch, 128, 256,
                  f"block: 64 x 64; warp: 2 rows, and those {side}, {2 * side}, {3 * side} below")  # fmt: skip
    tiles.mark(0, 0, 64, 64, "a")
    for row in range(0, 64, side):
        tiles.mark(row, 0, 2, 64, "b")
        tiles.mark(row, 0, 1, FOUR, "e")
    return figure.svg()
