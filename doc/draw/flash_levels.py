"""Where the numbers of flash attention stand in the first four rungs of its ladder, and what moves for each tile."""

from doc.draw.figure import Figure
from doc.draw.rung import DEVICE, REGISTERS, SHARED, Levels, account, heading

TOPIC = "flash_attention"


def begun(kernel: str) -> tuple[Figure, Levels]:
    """A rung's picture with what all four have: keys and values that come from device memory, sums in registers."""
    figure = Figure(880, 420, f"What moves and what stays in {kernel} of flash attention's ladder")
    heading(figure, TOPIC, kernel)
    levels = Levels(figure, 20, 66, 460)
    levels.box(DEVICE, 14, "k, v", "a", 70)
    levels.box(REGISTERS, 14, "k, v", "a", 70)
    levels.box(REGISTERS, 362, "sums", "c", 84)
    return figure, levels


def scalar() -> str:
    figure, levels = begun("scalar_kernel")
    levels.move(48, DEVICE, REGISTERS, "one number for all 32 lanes")
    levels.box(REGISTERS, 130, "q, 64 numbers", "b", 116)
    levels.box(REGISTERS, 270, "score, p", "e", 74)
    account(figure, 510, 90, 42,
            "Every number of every key and value, one load at a time, to each warp.",
            "A thread has one query (64 numbers) and its sum of values (64 numbers).",
            "Each multiplication waits for a load: a number that is loaded serves a lane once.")  # fmt: skip
    return figure.svg()


def tiled() -> str:
    figure, levels = begun("tiled_kernel")
    levels.move(48, DEVICE, SHARED, "32 keys and 32 values, copied by 64 threads")
    levels.box(SHARED, 14, "k, v", "a", 70)
    levels.move(48, SHARED, REGISTERS, "16 bytes: four numbers a load")
    levels.box(REGISTERS, 130, "q, 64 numbers", "b", 116)
    levels.box(REGISTERS, 264, "8 scores", "e", 84)
    account(figure, 510, 90, 42,
            "A tile moves once from device memory for 64 queries. From shared memory a load brings four numbers.",
            "As before; and the scores of eight keys, so that sums are rescaled once for eight.",
            "All 64 threads wait at a barrier for the tile. A load serves four multiplications.")  # fmt: skip
    return figure.svg()


def through_shared_memory() -> str:
    figure, levels = begun("mma_kernel")
    levels.move(48, DEVICE, SHARED, "32 keys and 32 values")
    levels.box(SHARED, 14, "k, v", "a", 70)
    levels.box(SHARED, 120, "q", "b", 60)
    levels.box(SHARED, 216, "scores", "e", 116)
    levels.move(48, SHARED, REGISTERS)
    levels.box(REGISTERS, 120, "q", "b", 60)
    levels.move(150, SHARED, REGISTERS)
    levels.box(REGISTERS, 216, "scores, p", "e", 116)
    for at, start, end in ((230, REGISTERS, SHARED), (258, SHARED, REGISTERS), (286, REGISTERS, SHARED),
                           (314, SHARED, REGISTERS)):  # fmt: skip
        levels.move(at, start, end)
    account(figure, 510, 90, 42,
            "Scores go to shared memory as mma leaves them, come back a row to two lanes, go "
            "there as p, and come back as operand A. q is loaded again for each tile.",
            "The sums of a warp's 16 queries.",
            "Eight rows of q or k begin in one bank, so a load takes up to eight passes. And a warp waits for its "
            "own scores, twice.")
    return figure.svg()  # fmt: skip


def in_registers() -> str:
    figure, levels = begun("registers_kernel")
    levels.move(48, DEVICE, SHARED, "32 keys and 32 values")
    levels.box(SHARED, 14, "k, v", "a", 70)
    levels.move(48, SHARED, REGISTERS, "4 bytes a load, in up to eight passes")
    levels.box(REGISTERS, 120, "q", "b", 60)
    levels.box(REGISTERS, 216, "scores = p", "e", 116)
    account(figure, 510, 90, 42,
            "Only keys and values. The result of the first product is the operand of the second, with keys in "
            "another order.",
            "q, scores, p and the sums of a warp's 16 queries.",
            "Eight rows of a tile begin in one bank, so a load takes up to eight passes.")  # fmt: skip
    return figure.svg()


PICTURES = {
    "flash_scalar": scalar, "flash_tiled": tiled, "flash_through_shared": through_shared_memory,
    "flash_in_registers": in_registers,
}  # fmt: skip
