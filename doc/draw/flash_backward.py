"""Flash attention's backward pass: what moves for each tile, and what stays, in a block of queries, in a block of keys,
and in one pass with atomics."""

from doc.draw.figure import Figure
from doc.draw.rung import DEVICE, REGISTERS, SHARED, Levels

TOP, WIDTH, APART = 44, 282, 299


def begun(figure: Figure, i: int, title: str, others: str, *says: str) -> Levels:
    """A panel with the rows of the other side, which come by tiles."""
    x = 10 + APART * i
    figure.text(x, 26, title, 15, bold=True)
    for line, words in enumerate(says):
        figure.text(x, TOP + 346 + 19 * line, words, 13)
    levels = Levels(figure, x, TOP, WIDTH)
    for level in DEVICE, SHARED, REGISTERS:
        levels.box(level, 8, others, "a", 60)
    levels.move(38, DEVICE, SHARED)
    levels.move(38, SHARED, REGISTERS)
    return levels


def draw() -> str:
    figure = Figure(890, 448, "What moves and what stays in flash attention backward")
    for i, title, others, own, sums in (
        (0, "Queries: three products", "k, v", "q, dout", "dq"),
        (1, "Keys: four products", "q, dout", "k, v", "dk, dv"),
    ):
        levels = begun(
            figure, i, title, others, f"Each tile of {others} adds to {sums}.", "Each sum has one owner: the block.",
            "The order of a sum is fixed.",
        )  # fmt: skip
        levels.box(REGISTERS, 76, own, "d", 64)
        levels.box(REGISTERS, 148, "p, ds", "e", 56)
        levels.box(REGISTERS, 212, sums, "c", 62)
    levels = begun(
        figure, 2, "Atomics: five products", "q, dout", "ds goes through shared memory, and is",
        "summed over keys. Each block adds its", "part of dq to device memory, in any order.",
    )  # fmt: skip
    levels.box(DEVICE, 76, "dq", "c", 72)
    levels.box(SHARED, 156, "ds", "e", 52)
    levels.box(REGISTERS, 76, "part of dq", "c", 72)
    levels.box(REGISTERS, 156, "p, ds", "e", 52)
    levels.box(REGISTERS, 216, "k, v,\ndk, dv", "d", 60)
    levels.move(112, REGISTERS, DEVICE)
    levels.move(168, REGISTERS, SHARED)
    levels.move(196, SHARED, REGISTERS)
    return figure.svg()
