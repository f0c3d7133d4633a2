"""Three ways for a warp to transpose: rows to columns, columns to rows, and through a tile."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from doc.draw.figure import Figure

SIDE, SCALE = 16, 9  # of what is shown of a matrix, where 16 stands for 32; pixels
STRIP = 4            # that a sector covers


def matrix(figure: Figure, x: int, y: int, title: str, row: int | None, column: int | None) -> None:
    """A matrix with the numbers of a warp, a row or a column, and the sectors that they lie in."""
    size = SIDE * SCALE
    figure.text(x, y - 8, title, 14)
    figure.rect(x, y, size, size, "f")
    if column is not None:
        figure.rect(x + column // STRIP * STRIP * SCALE, y, STRIP * SCALE, size, "b")
        figure.rect(x + column * SCALE, y, SCALE, size, "e")
    if row is not None:
        figure.rect(x, y + row * SCALE, size, SCALE, "e")


def draw() -> str:
    figure = Figure(880, 480, "Three ways to transpose")
    top = 66
    for i, (title, row, column) in enumerate((("Reads along the rows", 5, None), ("Writes along the rows", None, 5))):
        x = 20 + 440 * i
        figure.text(x, 24, title, 16, bold=True)
        matrix(figure, x, top, "inp", row, column)
        figure.line(x + 156, top + 72, x + 206, top + 72, arrow=True)
        matrix(figure, x + 216, top, "out", column, row)
        says = ("4 sectors read, 32 written", "32 sectors read, 4 written")[i]
        figure.text(x, top + 168, says, 14)
    y = 310
    figure.text(20, y - 40, "A tile in shared memory", 16, bold=True)
    for x, title, row, column in ((20, "inp", 5, None), (260, "tile: written by rows", 5, None),
                                  (460, "and read by columns", None, 5), (700, "out", 5, None)):  # fmt: skip
        matrix(figure, x, y, title, row, None)
        if column is not None:
            figure.rect(x + column * SCALE, y, SCALE, SIDE * SCALE, "e")
    figure.line(170, y + 72, 250, y + 72, arrow=True)
    figure.line(610, y + 72, 690, y + 72, arrow=True)
    figure.text(20, y + 166, "4 sectors read, 4 written; the column is a question of banks", 14)
    figure.rect(560, 258, 14, 14, "e")
    figure.text(580, 270, "a warp's 32 numbers", 14)
    figure.rect(750, 258, 14, 14, "b")
    figure.text(770, 270, "moved too", 14)
    return figure.svg()
