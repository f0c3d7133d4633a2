"""Where the numbers of flash attention stand in the first four rungs of its ladder, and what moves for each tile."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from doc.draw.figure import Figure

LEVELS = (("device memory", 62), ("shared memory", 178), ("registers", 294))
W = 205


def box(figure: Figure, x: float, y: float, words: str, colour: str, width: float = 44) -> None:
    figure.rect(x, y, width, 34, colour, "ink")
    figure.text(x + width / 2, y + 22, words, 14, "middle")


def draw() -> str:
    figure = Figure(880, 440, "Where queries, keys, values, scores and sums stand in four rungs")
    titles = ("One thread a query", "Tiles in shared memory", "Tensor cores", "Scores in registers")
    says = (
        ("a load brings a number", "for one multiplication"), ("a load brings four, and", "64 threads share a tile"),
        ("scores go down and up", "for each tile"), ("only keys and values", "move"),
    )  # fmt: skip
    device, shared, registers = (y for _, y in LEVELS)
    for i, (title, words) in enumerate(zip(titles, says, strict=True)):
        x = 20 + i * (W + 8)
        figure.text(x, 24, title, 15, bold=True)
        for name, y in LEVELS:
            figure.rect(x, y - 18, W, 92, "f")
            figure.text(x + W - 6, y - 4, name, 12, "end", "faint")
        box(figure, x + 8, device + 22, "k, v", "a")
        if i > 0:
            figure.line(x + 30, device + 58, x + 30, shared + 20, arrow=True)
            box(figure, x + 8, shared + 22, "k, v", "a")
        figure.line(x + 30, (shared if i > 0 else device) + 58, x + 30, registers + 20, arrow=True)
        box(figure, x + 8, registers + 22, "k, v", "a")
        box(figure, x + 58, (shared if i == 2 else registers) + 22, "q", "b", 30)
        if i == 2:
            figure.line(x + 73, shared + 58, x + 73, registers + 20, arrow=True)
            box(figure, x + 58, registers + 22, "q", "b", 30)
        box(figure, x + 94, registers + 22, "p", "e", 46)
        box(figure, x + 146, registers + 22, "sums", "c", 52)
        if i == 2:
            box(figure, x + 94, shared + 22, "p", "e", 46)
            figure.line(x + 106, registers + 20, x + 106, shared + 60, arrow=True)
            figure.line(x + 128, shared + 58, x + 128, registers + 20, arrow=True)
        for j, line in enumerate(words):
            figure.text(x, 394 + 19 * j, line, 14)
    return figure.svg()
