"""What a warp touches of a, b and c at one step of k: with its lanes down a column of c, and along a row."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from doc.draw.figure import Figure
from doc.draw.operands import Operands

M, N, K, SCALE, SECTOR = 36, 40, 16, 6, 8


def panel(figure: Figure, x: int, title: str, marks: list[tuple], says: list[str]) -> None:
    """marks: of each matrix the sectors that are moved, and in them the numbers that are used."""
    figure.text(x, 22, title, 16, bold=True)
    operands = Operands(figure, x, 40, M, N, K, SCALE)
    for name, sectors, used in marks:
        operands.mark(name, *sectors, "b")
        operands.mark(name, *used, "e")
    for i, words in enumerate(says):
        figure.text(x, 62 + operands.height + 20 * i, words, 14)


def draw() -> str:
    figure = Figure(860, 470, "A warp of the naive product and one of the coalesced product at one step of k")
    panel(
        figure, 20, "One thread an element",
        [("a", (0, 0, 32, SECTOR), (0, 5, 32, 1)), ("b", (5, 8, 1, SECTOR), (5, 10, 1, 1)),
         ("c", (0, 8, 32, SECTOR), (0, 10, 32, 1))],
        ["a: 32 numbers from 32 sectors", "b: one number for all lanes", "c, at the end: 32 numbers to 32 sectors"],
    )  # fmt: skip
    panel(
        figure, 450, "Coalesced",
        [("a", (3, 0, 1, SECTOR), (3, 5, 1, 1)), ("b", (5, 0, 1, 32), (5, 0, 1, 32)),
         ("c", (3, 0, 1, 32), (3, 0, 1, 32))],
        ["a: one number for all lanes", "b: 32 numbers from 4 sectors", "c, at the end: 32 numbers to 4 sectors"],
    )  # fmt: skip
    figure.rect(680, 10, 16, 16, "e")
    figure.text(702, 23, "used", 14)
    figure.rect(760, 10, 16, 16, "b")
    figure.text(782, 23, "moved too", 14)
    return figure.svg()
