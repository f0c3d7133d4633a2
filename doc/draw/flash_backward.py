"""The rungs of flash attention's backward pass: what a block of queries or of keys moves, and what it keeps."""

from doc.draw.figure import Figure
from doc.draw.rung import DEVICE, REGISTERS, SHARED, Levels, account, heading

TOPIC, TOP, COLUMNS = "flash_attention_backward", 92, (330, 610)  # of the account
OF_QUERIES = "k, v", "q, dout", "dq", "a block of queries: dq, three products"
OF_KEYS = "q, dout", "k, v", "dk, dv", "a block of keys: dk and dv, four products"


def begun(kernel: str, height: float = 534) -> Figure:
    figure = Figure(880, height, f"What moves and what stays in {kernel}, backward of flash attention")
    heading(figure, TOPIC, kernel)
    return figure


def panel(
    figure: Figure, x: float, kind: tuple[str, ...], brought: str, loaded: str, tiles: int = 1, own: str = "",
    own_in_tile: str = "",
) -> None:  # fmt: skip
    """A block. brought, loaded: how the other side's rows come to shared memory and to registers; tiles: how many of
    them are in shared memory; own: what the registers have of its own rows, and own_in_tile shared memory."""
    others, rows, sums, words = kind
    figure.text(x, TOP - 12, words, 14)
    levels = Levels(figure, x, TOP, 420)
    levels.box(DEVICE, 14, others, "a", 76 + 90 * (tiles == 2))
    levels.box(REGISTERS, 14, others, "a", 76)
    for i in range(tiles):
        words = others if tiles == 1 else ("this tile", "the next")[i]
        levels.box(SHARED, 14 + 90 * i, words, "ab"[i], 76)
    if tiles:
        levels.move(52 + 90 * (tiles - 1), DEVICE, SHARED, brought)
    levels.move(52, SHARED if tiles else DEVICE, REGISTERS, loaded)
    if own_in_tile:
        levels.box(SHARED, 204, own_in_tile, "d", 100)
        levels.move(218, SHARED, REGISTERS)
    levels.box(REGISTERS, 102, own or rows, "d", 124)
    levels.box(REGISTERS, 238, "p, ds", "e", 66)
    levels.box(REGISTERS, 316, sums, "c", 90)


def both(kernel: str, brought: str, loaded: str, moves: str, stays: str, waits: str, tiles: int = 1) -> str:
    """A rung with a block of queries and a block of keys, which get the other side's rows in the same way."""
    figure = begun(kernel)
    for x, kind in (20, OF_QUERIES), (450, OF_KEYS):
        panel(figure, x, kind, brought, loaded, tiles)
    account(figure, 20, TOP + 356, 38, moves, stays, waits, COLUMNS)
    return figure.svg()


def scalar() -> str:
    return both(
        "scalar_kernel", "", "one number for 16 lanes",
        "All rows of the other side, from device memory, for each warp. Both kinds of blocks compute p and ds: 7 "
        "products.",
        "Half of a row of each array and of each sum: two lanes share a row, because a key's 256 numbers are too "
        "many for one.",
        "Each multiplication for a load, and the two lanes for each other's half of a score.",
        tiles=0,
    )  # fmt: skip


def tiled() -> str:
    return both(
        "tiled_kernel", "32 rows, copied by 128 threads", "16 bytes: four numbers a load",
        "A tile once for 64 rows. Then four numbers a load, from shared memory.",
        "As before.", "All 128 threads at a barrier, for the tile, and again before it is overwritten.",
    )  # fmt: skip


def on_tensor_cores() -> str:
    return both(
        "mma_kernel", "32 rows, rounded to TF32 and swizzled", "4 bytes a load, without conflicts",
        "The same tiles. What a load brings is part of an operand, and one mma does 1024 multiplications.",
        "A warp's 16 rows as operands, and their sums. p and ds become operands where they are.",
        "Tensor cores, for their operands: four bytes a load are half of what one mma needs of a tile.",
    )  # fmt: skip


def with_atomics() -> str:
    figure = begun("atomics_kernel", 436)
    figure.text(20, TOP - 12, "only blocks of keys: dk, dv and their part of dq, five products", 14)
    levels = Levels(figure, 20, TOP, 540)
    for level in DEVICE, SHARED, REGISTERS:
        levels.box(level, 14, "q, dout", "a", 70)
    levels.box(DEVICE, 400, "dq, of all", "c", 106)
    levels.box(SHARED, 250, "ds", "e", 110)
    levels.box(SHARED, 376, "k", "d", 60)
    levels.box(REGISTERS, 96, "k, v", "d", 60)
    levels.box(REGISTERS, 168, "dk, dv", "c", 70)
    levels.box(REGISTERS, 250, "p, ds", "e", 70)
    levels.box(REGISTERS, 332, "dq, this part", "c", 174)
    for at, start, end in ((49, DEVICE, SHARED), (49, SHARED, REGISTERS), (276, REGISTERS, SHARED),
                           (346, SHARED, REGISTERS), (406, SHARED, REGISTERS)):  # fmt: skip
        levels.move(at, start, end)
    figure.line(20 + 446, TOP + 269, 20 + 446, TOP + 83, arrow=True)
    figure.text(20 + 440, TOP + 108, "atomicAdd", 12, "end")
    account(
        figure, 580, TOP + 20, 37,
        "ds goes to shared memory and comes back with queries as its rows. Each block adds its part of dq to device "
        "memory, 32 x 64 numbers a tile.",
        "k, v and the sums dk and dv. dq has no owner: its parts come from all blocks.",
        "Warps at a barrier, for ds of the other warps. And additions to the same number wait for one another, in "
        "no fixed order.",
    )  # fmt: skip
    return figure.svg()


def in_two_stages() -> str:
    return both(
        "two_stages_kernel", "cp.async, past the registers", "4 bytes a load",
        "The next tile, while the warps work on this one. Seven products again.",
        "As with tensor cores. Each sum has one owner and a fixed order.",
        "One barrier a tile instead of two. But lanes now round what they load: one addition for each number.",
        tiles=2,
    )  # fmt: skip


def wide() -> str:
    figure = begun("flash_attention_backward of")
    how = "cp.async, past the registers", "16 or 8 bytes a load"
    panel(figure, 20, OF_QUERIES, *how, tiles=2, own="q; part of dout", own_in_tile="own dout")
    panel(figure, 450, OF_KEYS, *how, tiles=2, own="part of k and v", own_in_tile="own k, v")
    account(
        figure, 20, TOP + 356, 38,
        "An eighth of the loads for scores and dp: a load of 16 bytes serves four products of a warp's 32 rows.",
        "All sums, p and ds. Of the warp's own rows only q stays: the others wait in shared memory.",
        "The mask costs time only on the diagonal. The longest blocks start first, so few are late.",
        COLUMNS,
    )  # fmt: skip
    return figure.svg()


PICTURES = {
    "flash_backward_scalar": scalar, "flash_backward_tiled": tiled, "flash_backward_mma": on_tensor_cores,
    "flash_backward_atomics": with_atomics, "flash_backward_stages": in_two_stages, "flash_backward_wide": wide,
}  # fmt: skip
