"""Flash attention forward: what moves for each tile, and what stays, in three rungs of its ladder."""

from doc.draw.figure import Figure
from doc.draw.rung import DEVICE, REGISTERS, SHARED, Levels

TOP, WIDTH, APART = 44, 282, 299


def begun(figure: Figure, i: int, title: str, *says: str) -> Levels:
    """A panel with what all three have: keys and values that come by tiles, q and sums in registers."""
    x = 10 + APART * i
    figure.text(x, 26, title, 15, bold=True)
    for line, words in enumerate(says):
        figure.text(x, TOP + 346 + 19 * line, words, 13)
    levels = Levels(figure, x, TOP, WIDTH)
    for level in DEVICE, SHARED, REGISTERS:
        levels.box(level, 8, "k, v", "a", 54)
    levels.move(34, DEVICE, SHARED)
    levels.move(34, SHARED, REGISTERS)
    levels.box(REGISTERS, 70, "q", "b", 44)
    levels.box(REGISTERS, 216, "sums", "c", 58)
    return levels


def draw() -> str:
    figure = Figure(890, 448, "What moves and what stays in three rungs of flash attention forward")
    levels = begun(
        figure, 0, "Tiles in shared memory", "A thread has a query, its sum and the",
        "scores of 8 keys. A load brings four", "numbers, for four multiplications.",
    )  # fmt: skip
    levels.box(REGISTERS, 122, "8 scores", "e", 86)
    levels = begun(
        figure, 1, "Scores through shared memory", "A warp has 16 queries. Scores go to",
        "shared memory, come back by rows, go", "there as p, and come back again.",
    )  # fmt: skip
    levels.box(SHARED, 70, "q", "b", 44)
    levels.move(92, SHARED, REGISTERS)
    levels.box(SHARED, 122, "scores, p", "e", 86)
    levels.box(REGISTERS, 122, "scores, p", "e", 86)
    for at, down in ((132, False), (154, True), (176, False), (198, True)):
        levels.move(at, *((SHARED, REGISTERS) if down else (REGISTERS, SHARED)))
    levels = begun(
        figure, 2, "Scores stay in registers", "The result of the first product is operand",
        "of the second. Only keys and values move.",
    )  # fmt: skip
    levels.box(REGISTERS, 122, "scores = p", "e", 86)
    return figure.svg()
