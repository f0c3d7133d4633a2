"""Flash attention: what moves for each tile, and what stays, in three rungs of forward's ladder; and in backward in a
block of queries, in a block of keys, and in one pass with atomics."""

from doc.draw.figure import Figure
from doc.draw.rung import DEVICE, REGISTERS, SHARED, Levels

TOP, WIDTH, APART = 44, 282, 299


def begun(figure: Figure, i: int, title: str, others: str, wide: int, at: int, *says: str) -> Levels:
    """A panel with what comes by tiles: a box that is so wide, and its arrows `at` pixels from the left."""
    x = 10 + APART * i
    figure.text(x, 26, title, 15, bold=True)
    figure.lines(x, TOP + 346, 19, says, 13)
    levels = Levels(figure, x, TOP, WIDTH)
    for level in DEVICE, SHARED, REGISTERS:
        levels.box(level, 8, others, "a", wide)
    levels.move(at, DEVICE, SHARED)
    levels.move(at, SHARED, REGISTERS)
    return levels


def forward() -> str:
    figure = Figure(890, 448, "What moves and what stays in three rungs of flash attention forward")

    def panel(i: int, title: str, *says: str) -> Levels:
        levels = begun(figure, i, title, "k, v", 54, 34, *says)
        levels.box(REGISTERS, 70, "q", "b", 44)
        levels.box(REGISTERS, 216, "sums", "c", 58)
        return levels

    levels = panel(0, "Tiles in shared memory", "A thread has a query, its sum and the",
                   "scores of 8 keys. A load brings four", "numbers, for four multiplications.")  # fmt: skip
    levels.box(REGISTERS, 122, "8 scores", "e", 86)
    levels = panel(1, "Scores through shared memory", "A warp has 16 queries. Scores go to",
                   "shared memory, come back by rows, go", "there as p, and come back again.")  # fmt: skip
    levels.box(SHARED, 70, "q", "b", 44)
    levels.move(92, SHARED, REGISTERS)
    levels.box(SHARED, 122, "scores, p", "e", 86)
    levels.box(REGISTERS, 122, "scores, p", "e", 86)
    for at in 132, 176:
        levels.move(at, REGISTERS, SHARED)
        levels.move(at + 22, SHARED, REGISTERS)
    levels = panel(2, "Scores stay in registers", "The result of the first product is operand",
                   "of the second. Only keys and values move.")  # fmt: skip
    levels.box(REGISTERS, 122, "scores = p", "e", 86)
    return figure.svg()


def backward() -> str:
    figure = Figure(890, 448, "What moves and what stays in flash attention backward")
    for i, title, others, own, sums in (
        (0, "Queries: three products", "k, v", "q, dout", "dq"),
        (1, "Keys: four products", "q, dout", "k, v", "dk, dv"),
    ):
        levels = begun(figure, i, title, others, 60, 38, f"Each tile of {others} adds to {sums}.",
                       "Each sum has one owner: the block.", "The order of a sum is fixed.")  # fmt: skip
        levels.box(REGISTERS, 76, own, "d", 64)
        levels.box(REGISTERS, 148, "p, ds", "e", 56)
        levels.box(REGISTERS, 212, sums, "c", 62)
    levels = begun(figure, 2, "Atomics: five products", "q, dout", 60, 38, "ds goes through shared memory, and is",
                   "summed over keys. Each block adds its", "part of dq to device memory, in any order.")  # fmt: skip
    levels.box(DEVICE, 76, "dq", "c", 72)
    levels.box(SHARED, 156, "ds", "e", 52)
    levels.box(REGISTERS, 76, "part of dq", "c", 72)
    levels.box(REGISTERS, 156, "p, ds", "e", 52)
    levels.box(REGISTERS, 216, "k, v,\ndk, dv", "d", 60)
    levels.move(112, REGISTERS, DEVICE)
    levels.move(168, REGISTERS, SHARED)
    levels.move(196, SHARED, REGISTERS)
    return figure.svg()


PICTURES = {"flash_forward": forward, "flash_backward": backward}
