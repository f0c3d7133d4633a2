"""Flash-decoding: a single query's keys and values, split among blocks, and the second kernel that adds up what they
leave. The splits are of the cache's room, so that some lie after the position."""

from doc.draw.figure import Figure

SPLITS, KEYS, POSITION = 5, 8, 26  # keys of a split, and the new token's position
CELL, H, LEFT = 17, 30, 84
TOP = 96


def draw() -> str:
    figure = Figure(LEFT + SPLITS * KEYS * CELL + 24, 330, "One query, its keys split among blocks")

    def x_of(position: float) -> float:
        return LEFT + position * CELL

    figure.rect(x_of(POSITION), 30, CELL - 2, H, "e")
    figure.text(x_of(POSITION) - 8, 50, "the new query", 15, "end")
    for row, name in enumerate(("keys", "values")):
        y = TOP + row * (H + 6)
        figure.text(LEFT - 12, y + 20, name, 15, "end")
        for s in range(SPLITS * KEYS):
            colour = "f" if s > POSITION else "e" if s == POSITION else "ab"[s // KEYS % 2]
            figure.rect(x_of(s), y, CELL - 2, H, colour)
    bottom = TOP + 2 * H + 6
    for z in range(SPLITS):
        middle, used = x_of((z + 0.5) * KEYS) - 1, z * KEYS <= POSITION
        figure.line(x_of(z * KEYS), bottom + 8, x_of((z + 1) * KEYS) - 2, bottom + 8, "ink" if used else "rule", 2)
        figure.text(middle, bottom + 28, f"block {z}", 14, "middle", "ink" if used else "faint")
        if not used:
            figure.text(middle, bottom + 48, "writes: no keys", 14, "middle", "faint")
            continue
        figure.line(x_of(POSITION) + CELL / 2 - 1, 30 + H, middle, TOP - 4, "faint", 1.5)
        figure.box(middle - 44, bottom + 38, 88, 28, "c", f"m{z}, l{z}, o{z}", 14, 19)
        figure.line(middle, bottom + 66, x_of(2 * KEYS), bottom + 104, "ink", 1.2, arrow=True)
    figure.rect(x_of(2 * KEYS) - 184, bottom + 106, 368, 30, "d")
    figure.text(x_of(2 * KEYS), bottom + 126, "the second kernel adds them up, from left to right", 14, "middle")
    return figure.svg()
