"""What a thread loads at one step of k, and how many multiplications that serves, in three rungs of the product."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from doc.draw.figure import Figure
from doc.draw.operands import Operands

SIDE, SCALE = 12, 17


def draw() -> str:
    figure = Figure(880, 340, "One, eight and sixty-four multiplications for what a thread loads at one step of k")
    panels = (16, "One element", 1, 1), (306, "A column of 8", 8, 1), (596, "8 x 8 elements", 8, 8)
    for x, title, rows, columns in panels:
        figure.text(x, 22, title, 16, bold=True)
        operands = Operands(figure, x + 20, 36, SIDE, SIDE, 1, SCALE)
        for name, height, width in (("a", rows, 1), ("b", 1, columns), ("c", rows, columns)):
            for i in range(height):
                for j in range(width):
                    row, column = (i + 2 if name != "b" else 0), (j + 2 if name != "a" else 0)
                    operands.mark(name, row, column, 1, 1, name, "ink")
        loads, products = rows + columns, rows * columns
        figure.text(x, 308, f"{loads} loads, {products} multiplication{'s' * (products > 1)}:", 14)
        figure.text(x, 328, f"{loads / products:.3g} loads for each", 14)
    return figure.svg()
