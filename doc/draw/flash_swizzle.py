"""The swizzle of the ladder: where eight rows of a tile have their chunks, and which lanes meet in which banks."""

from doc.draw.figure import Figure

SIDE, TOP = 46, 30


def grid(figure: Figure, x: int, title: str, swizzled: bool, says: str) -> None:
    """Eight rows of a tile, eight chunks of 16 bytes each, which together are all 32 banks."""
    figure.text(x, TOP, title, 14, bold=True)
    for place in range(8):
        figure.text(x + place * SIDE + SIDE / 2, TOP + 24, f"{4 * place}-{4 * place + 3}", 11, "middle", "faint")
    for row in range(8):
        for place in range(8):
            chunk = place ^ row if swizzled else place
            left, top = x + place * SIDE, TOP + 32 + row * SIDE
            figure.box(left, top, SIDE, SIDE, "b" if chunk == 0 else "f", str(chunk), 14, 28, edge="paper")
    figure.text(x, TOP + 424, says, 14)


def draw() -> str:
    shows = "A tile's chunks in their places, and swizzled"
    figure = Figure(830, 472, shows)
    grid(figure, 20, "Rows as they are, in banks 0-31", False, "eight rows in the same four banks: eight passes")
    grid(figure, 440, "Chunk c of row r where c xor r would be", True, "eight rows in eight fours of banks: one pass")
    return figure.svg()
