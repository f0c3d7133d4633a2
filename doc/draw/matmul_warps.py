"""What a warp touches of a, b and c at one step of k: with its lanes down a column of c, and along a row."""

from doc.draw.rung import Operands, account, legend, rung_figure

M, N, K, SCALE, SECTOR = 36, 40, 16, 6, 8


def panel(kernel: str, marks: list[tuple], **says: str) -> str:
    """marks: of each matrix the sectors that are moved, and in them the numbers that are used."""
    figure = rung_figure("matmul", kernel, 880, 420, f"A warp of {kernel} of the product's ladder at one step of k")
    operands = Operands(figure, 34, 70, M, N, K, SCALE)
    for name, sectors, used in marks:
        operands.mark(name, *sectors, "b")
        operands.mark(name, *used, "e")
    legend(figure, 440, 84, ("e", "used by the warp"), ("b", "moved too"))
    account(figure, 440, 126, 54, **says)
    return figure.svg()


def naive() -> str:
    return panel(
        "naive_kernel",
        [("a", (0, 0, 32, SECTOR), (0, 5, 32, 1)), ("b", (5, 8, 1, SECTOR), (5, 10, 1, 1)),
         ("c", (0, 8, 32, SECTOR), (0, 10, 32, 1))],
        moves="a: 32 numbers from 32 sectors, 1024 bytes. b: one number for all lanes. At the end c: 32 numbers to "
        "32 sectors.",
        stays="One sum per lane.",
        waits="Each multiplication waits for two loads from device memory, or from a cache.",
    )  # fmt: skip


def coalesced() -> str:
    return panel(
        "coalesced_kernel",
        [("a", (3, 0, 1, SECTOR), (3, 5, 1, 1)), ("b", (5, 0, 1, 32), (5, 0, 1, 32)),
         ("c", (3, 0, 1, 32), (3, 0, 1, 32))],
        moves="a: one number for all lanes. b: 32 neighbours from 4 sectors, 128 bytes. At the end c: 32 numbers to "
        "4 sectors.",
        stays="One sum per lane, as before.",
        waits="Each multiplication still waits for two loads. But both together touch 5 sectors, and 33 before.",
    )  # fmt: skip


PICTURES = {"matmul_naive": naive, "matmul_coalesced": coalesced}
