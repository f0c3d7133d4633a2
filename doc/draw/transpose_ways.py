"""The rungs of the transposition: rows to columns, columns to rows, and through three tiles."""

from doc.draw.figure import Figure
from doc.draw.rung import account, cells, column_of_tile, heading, legend, matrix

TOPIC, TOP = "transpose", 92


def begun(kernel: str, height: float) -> Figure:
    figure = Figure(880, height, f"What a warp moves in {kernel} of the transposition's ladder")
    heading(figure, TOPIC, kernel)
    return figure


def scattered(kernel: str, by_rows: bool, **says: str) -> str:
    """A warp that reads or writes along the rows, and does the other down a column."""
    figure = begun(kernel, 320)
    line, across = {"row": 5}, {"column": 5}
    matrix(figure, 20, TOP, "inp", **(line if by_rows else across), scale=10)
    figure.line(190, TOP + 80, 230, TOP + 80, arrow=True)
    matrix(figure, 240, TOP, "out", **(across if by_rows else line), scale=10)
    legend(figure, 20, 290, ("e", "a warp's 32 numbers"), ("b", "moved too"))
    account(figure, 450, TOP + 12, 54, **says)
    return figure.svg()


def rows_in() -> str:
    return scattered(
        "rows_in_kernel", True,
        moves="A warp reads 32 neighbours from 4 sectors, and writes each to a row of its own: 32 sectors for 32 "
        "numbers.",
        stays="One number a lane, from its load to its store.",
        waits="Memory: L1 does not collect what eight warps write to a sector, so each piece goes to L2 by itself.",
    )  # fmt: skip


def rows_out() -> str:
    return scattered(
        "rows_out_kernel", False,
        moves="A warp reads 32 numbers from 32 sectors, and writes 32 neighbours to 4 sectors.",
        stays="One number a lane, from its load to its store.",
        waits="The 32 sectors of a load. But L1 keeps them, and the block's other seven warps find their numbers "
        "there.",
    )  # fmt: skip


def tile() -> str:
    figure = begun("tile_kernel", 320)
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
            "One number a lane, twice for a short time.",
            "The 32 numbers of a column lie in one bank, so a load from the tile takes 32 passes. "
            "And all threads wait at the barrier.")  # fmt: skip
    return figure.svg()


def padded() -> str:
    """Eight rows and eight banks stand for 32 of each."""
    figure = begun("padded_tile_kernel", 410)
    size = 30
    for x, name, turn in (20, "the rung before: rows of 32", 0), (290, "this rung: rows of 33", 1):
        figure.text(x, TOP - 8, name, 14, bold=turn == 1)
        marks = {(row, turn * row): "e" for row in range(8)}
        words = {(row, (column + turn * row) % 8): str(column) for row in range(8) for column in range(8)}
        cells(figure, x, TOP, 8, 8, size, marks, words)
        figure.text(x, TOP + 8 * size + 20, "bank 0, 1, 2, … from left to right", 12)
    figure.text(20, TOP + 8 * size + 50, "Eight rows and eight banks stand for 32. A field shows the column that", 13)
    figure.text(20, TOP + 8 * size + 69, "lies there; red: column 0, which a warp reads.", 13)
    account(figure, 560, TOP, 40, "The same bytes. Each row of the tile has one word more, which nobody uses.",
            "As before.", "A column lies in all 32 banks: one pass where there were 32.")  # fmt: skip
    return figure.svg()


def by_sixteen_bytes() -> str:
    """Half as many lanes as there are stand in a row of the picture, each with the bytes that it moves."""
    figure = begun("transpose of", 330)
    size, lanes = 15, 16
    figure.text(20, TOP - 8, "the rung before: 4 bytes a lane", 14)
    cells(figure, 20, TOP, 1, 2 * lanes, size, {(0, lane): "ea"[lane % 2] for lane in range(32)})
    figure.text(20, TOP + 36, "a warp: 128 neighbouring bytes of one row", 13)
    figure.text(20, TOP + 78, "this rung: 16 bytes a lane", 14, bold=True)
    for row in range(2):
        for lane in range(lanes):
            figure.rect(20 + 30 * lane, TOP + 86 + 22 * row, 30, 18, "ea"[lane % 2], "paper")
    figure.text(20, TOP + 148, "a warp: 256 neighbouring bytes of each of two rows", 13)
    figure.text(20, TOP + 190, "Each field is one lane's. The tile has 64 rows of 65 words.", 13)
    account(figure, 540, TOP, 42, "A quarter as many loads and stores of device memory, each four times as wide.",
            "Four numbers a lane for each access.",
            "More bytes are in flight while a warp waits. Lanes x and x + 8 meet in a bank "
            "of the tile: two passes, which cost less than they gain.")  # fmt: skip
    return figure.svg()


PICTURES = {
    "transpose_rows_in": rows_in, "transpose_rows_out": rows_out, "transpose_tile": tile, "transpose_padded": padded,
    "transpose_wide": by_sixteen_bytes,
}  # fmt: skip
