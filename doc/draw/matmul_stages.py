"""Copies and work of a block in time: one after the other, and in two stages."""

from doc.draw.rung import rung_figure

COPY, WORK, X, HEIGHT, TOP = 76, 100, 120, 34, 64


def draw() -> str:
    shows = "Copies and work one after the other, and in two stages"
    figure = rung_figure("matmul", "two_stages_kernel", 880, 360, shows)

    def rows(y: float) -> None:
        figure.text(20, y + 22, "copies", 14)
        figure.text(20, y + 62, "products", 14)

    def piece(at: float, y: float, width: float, colour: str, i: int) -> None:
        figure.box(at, y, width, HEIGHT, colour, f"tile {i}", 13, 22, edge="paper")

    figure.text(20, TOP + 20, "One stage: all wait for the copy, then compute, then the tile is overwritten", 14)
    rows(TOP + 34)
    for i in range(4):
        at = X + (COPY + WORK) * i
        piece(at, TOP + 34, COPY, "a", i)
        piece(at + COPY, TOP + 74, WORK, "c", i)
    figure.text(20, TOP + 150, "Two stages: tile i + 1 is on its way while the block works on tile i", 14)
    rows(TOP + 164)
    for i in range(5):
        at = X if i == 0 else X + COPY + (i - 1) * WORK
        piece(at, TOP + 164, COPY, "ab"[i % 2], i)
        if i < 4:
            at = X + COPY + i * WORK
            piece(at, TOP + 204, WORK, "c", i)
            figure.line(at, TOP + 162, at, TOP + 242, "faint", dashed=True)
    figure.text(20, TOP + 268, "Dashed: wait for own copies, then the barrier. Blue and orange: the two stages.", 14)
    figure.text(20, TOP + 288, "A copy passes through no register; the 64 sums stay in theirs.", 14)
    return figure.svg()
