"""Which elements of a block the lanes of a warp make, before and after they are arranged in warp tiles."""

from doc.draw.figure import Figure
from doc.draw.rung import rung_figure

SIDE, SCALE, TOP = 128, 3, 66


def block(figure: Figure, x: int, title: str, rows: int, columns: int, pieces: list[tuple], says: list[str]) -> None:
    """A block's elements: the warp's part, and in it the 4 x 4 pieces of its first lanes."""
    figure.text(x, TOP + 10, title, 14, bold=True)
    figure.rect(x, TOP + 22, SIDE * SCALE, SIDE * SCALE, "f")
    figure.rect(x, TOP + 22, columns * SCALE, rows * SCALE, "a")
    for lane, row, column in pieces:
        left, top = x + column * SCALE, TOP + 22 + row * SCALE
        figure.rect(left, top, 4 * SCALE, 4 * SCALE, "e" if lane == 1 else "c", "paper")
    figure.lines(x, TOP + 44 + SIDE * SCALE, 20, says)


def draw() -> str:
    shows = "The lanes of a warp on the block's 128 x 128 elements"
    figure = rung_figure("matmul", "warp_tiles_kernel", 860, 580, shows)
    strip = [(lane, 4 * i, 8 * lane + 4 * j) for lane in range(4) for i in range(2) for j in range(2)]
    tile = [(lane, 32 * i, 4 * lane + 16 * j) for lane in range(4) for i in range(2) for j in range(2)]
    block(figure, 20, "Vectorised: a warp has 16 x 128", 16, 128, strip,
          ["lanes 0 to 3 have squares of 8 x 8 (lane 1 red)",
           "a step of k needs 16 numbers of a, 128 of b",
           "columns of lanes are 8 apart: 0 and 4 meet in a bank"])  # fmt: skip
    block(figure, 450, "Warp tiles: a warp has 64 x 32", 64, 32, tile,
          ["lanes 0 to 3 have four squares of 4 x 4 each", "a step of k needs 64 numbers of a, 32 of b",
           "columns of lanes are 4 apart: no two meet",
           "64 sums per lane stay in registers, as before"])  # fmt: skip
    return figure.svg()
