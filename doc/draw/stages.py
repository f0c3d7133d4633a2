"""Copies and work of a block in time: one after the other, and in two stages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from doc.draw.figure import Figure

COPY, WORK, X, HEIGHT = 76, 116, 120, 34


def draw() -> str:
    figure = Figure(880, 300, "Copies and work one after the other, and in two stages")
    figure.text(20, 24, "One stage: all wait for the copy, then compute, then the tile is overwritten", 15, bold=True)
    figure.text(20, 60, "copies", 14)
    figure.text(20, 100, "products", 14)
    x = X
    for i in range(4):
        figure.rect(x, 38, COPY, HEIGHT, "a", "paper")
        figure.text(x + COPY / 2, 60, f"tile {i}", 13, "middle")
        figure.rect(x + COPY, 78, WORK - 16, HEIGHT, "c", "paper")
        figure.text(x + COPY + (WORK - 16) / 2, 100, f"tile {i}", 13, "middle")
        x += COPY + WORK - 16
    figure.text(20, 164, "Two stages: tile i + 1 is on its way while the block works on tile i", 15, bold=True)
    figure.text(20, 200, "copies", 14)
    figure.text(20, 240, "products", 14)
    for i in range(5):
        at = X if i == 0 else X + COPY + (i - 1) * (WORK - 16)
        figure.rect(at, 178, COPY, HEIGHT, "ab"[i % 2], "paper")
        figure.text(at + COPY / 2, 200, f"tile {i}", 13, "middle")
        if i < 4:
            at = X + COPY + i * (WORK - 16)
            figure.rect(at, 218, WORK - 16, HEIGHT, "c", "paper")
            figure.text(at + (WORK - 16) / 2, 240, f"tile {i}", 13, "middle")
            figure.line(at, 176, at, 256, "faint", dashed=True)
    figure.text(20, 282, "Dashed: wait for one's own copies, then the barrier. Blue and orange: the two stages.", 14)
    return figure.svg()
