"""A transposition through a tile: rows into shared memory, columns out of it."""

from doc.draw.rung import account, column_of_tile, matrix, rung_figure

TOP = 92


def draw() -> str:
    shows = "What a warp moves when a tile is transposed in shared memory"
    figure = rung_figure("transpose", "tile_kernel", 880, 320, shows)
    matrix(figure, 20, TOP, "inp", row=5)
    figure.line(122, TOP + 48, 146, TOP + 48, arrow=True)
    matrix(figure, 152, TOP, "tile", row=5)
    figure.text(20, TOP + 126, "A warp puts a row of inp into a row of the tile.", 13)
    figure.text(20, TOP + 145, "The block waits at a barrier. Then a warp takes a", 13)
    figure.text(20, TOP + 164, "column of the tile, and it is a row of out.", 13)
    column_of_tile(figure, 272, TOP, "the same tile", 5)
    figure.line(374, TOP + 48, 398, TOP + 48, arrow=True)
    matrix(figure, 404, TOP, "out", row=5)
    account(figure, 530, TOP, 43, "4 sectors read, 4 sectors written; in between the number goes through shared "
    "memory.",
            "One number per lane, twice for a short time.",
            "The 32 numbers of a column lie in one bank, so a load from the tile takes 32 passes. "
            "And all threads wait at the barrier.")  # fmt: skip
    return figure.svg()
