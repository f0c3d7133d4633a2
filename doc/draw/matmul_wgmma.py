"""How operands reach the tensor cores: in our last rung of the product through registers, in cuBLAS's by wgmma."""

from doc.draw.figure import Figure
from doc.draw.rung import DEVICE, NAMES, REGISTERS, SHARED, Levels, account, measured

LAST, TF32, FP32 = "two_stages_kernel", "cuBLAS in TF32", "cuBLAS in fp32"
LEVELS = (*NAMES[:2], "registers and tensor core")


def draw() -> str:
    figure = Figure(880, 452, "Operands on their way to the tensor cores: our last rung, and cuBLAS")
    figure.text(20, 24, TF32, 16, bold=True)
    figure.text(20, 46, measured("matmul", TF32, LAST), 14)
    for x, name in (20, "our last rung: mma"), (310, "cuBLAS: wgmma"):
        figure.text(x, 82, name, 14, bold=x > 20)
        levels = Levels(figure, x, 94, 270, LEVELS)
        levels.box(DEVICE, 12, "a, b", "a", 66)
        levels.move(45, DEVICE, SHARED, "tiles")
        levels.box(SHARED, 12, "a, b", "a", 66)
        if x == 20:
            levels.move(45, SHARED, REGISTERS, "24 loads per lane")
            levels.box(REGISTERS, 12, "fragments", "a", 84)
            levels.box(REGISTERS, 112, "mma", "d", 56)
        else:
            levels.move(45, SHARED, REGISTERS, "none by a warp")
            levels.box(REGISTERS, 12, "wgmma", "d", 156)
        levels.box(REGISTERS, 186, "sums", "c", 70)
    account(
        figure, 610, 110, 34,
        "cuBLAS in TF32: wgmma reads both operands in shared memory by itself, for four warps at a time.",
        "Only the sums. Registers that held fragments are free for more sums.",
        "No warp waits for its loads, and the warps need not wait for the product.",
    )  # fmt: skip
    figure.text(20, 446, f"Without tensor cores, cuBLAS in fp32: {measured('matmul', FP32, 'warp_tiles_kernel')}", 13)
    return figure.svg()
