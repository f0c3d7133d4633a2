"""Products of the MLP with GELU or SwiGLU in their epilogues, in bf16, for GPUs that have wgmma: the launchers of
mlp_hopper.cu. The composites of gelu.py and swiglu.py call them where `takes` says so."""

import device
from device import ceil_div
from kernels.launches import FLOPS, describe
from kernels.reduce import add_partials, partials_of

cu = device.source(__file__, needed=lambda: has_wgmma())

ROWS, COLUMNS, DEPTH = 128, 192, 64  # of a block's tile of the product, and of K in a stage
WARPS = 8  # that compute; each stores 16 or 8 rows at a time
# As in mlp_hopper.cu: stages, a tile's columns of the result, and what a warp's epilogue has: numbers and mbarriers.
KERNELS = {
    "matmul_gelu_forward": (4, COLUMNS, 4 * 16 * 64, 0),
    "matmul_gelu_backward": (4, COLUMNS, 4 * 16 * 64, 3),
    "matmul_swiglu_forward": (5, COLUMNS // 2, 16 * (96 + 8), 0),
    "matmul_swiglu_backward": (4, COLUMNS, 8 * 8 * 64, 3),
}


def has_wgmma() -> bool:
    """Whether the device in use computes in bf16 alone, has Hopper's matrix product, and a compiler that knows it."""
    return device.kind == "cuda" and device.precision == "bf16" and not device.why_not_kernels(cu.path)


def takes(N: int, OC: int, C: int, weight, bias=None) -> bool:
    """Whether these kernels make a product (N,OC) of sums over C. They need tiles for the two halves of each
    multiprocessor, sizes and a weight that the TMA can copy, and a bias that can be read by pairs."""
    enough = ceil_div(N, ROWS) * ceil_div(OC, COLUMNS) >= 2 * device.multiprocessors
    if not enough or OC % 8 or C % 8 or not has_wgmma():
        return False
    return device.address(weight) % 16 == 0 and (bias is None or device.address(bias) % 4 == 0)


def matmul_gelu_forward_wgmma(out, fch, inp, weight, bias, N: int, C: int, OC: int) -> None:
    """out (N,OC) = gelu(fch + bias (OC)), in the tanh form. fch (N,OC) = inp (N,C) @ weight (OC,C)^T."""
    results, halves = (boxes(out, N, OC, 16), boxes(fch, N, OC, 16)), boxes(weight, OC, C, COLUMNS // 2)
    launch("matmul_gelu_forward", (*results, boxes(inp, N, C, ROWS), halves, bias), N, OC, C)


def matmul_gelu_backward_wgmma(
    dfch, dbias, out, dout, weight, fch, bias, N: int, C: int, OC: int
) -> None:  # fmt: skip
    """dfch (N,C) = dgelu * gelu'(fch + bias (C)), where dgelu (N,C) = dout (N,OC) @ weight (OC,C) is rounded, but not
    stored. dbias (C) += the column sums of dfch, before they are rounded. out (N,C) = gelu(fch + bias) once more."""
    rows = rows_of_partials(N)
    partials = partials_of(rows * C)
    arrays = (
        boxes(dfch, N, C, 16), boxes(out, N, C, 16), partials, boxes(dout, N, OC, ROWS), boxes(weight, OC, C, DEPTH),
        boxes(fch, N, C, 16), bias,
    )  # fmt: skip
    launch("matmul_gelu_backward", arrays, N, C, OC)
    add_partials([dbias], partials, rows, C)


def matmul_swiglu_forward_wgmma(out, fch, inp, weight, N: int, C: int, H: int) -> None:
    """out (N,H) = silu(gate) * up. fch (N,2H) = inp (N,C) @ weight (2H,C)^T, in each row up, then gate."""
    up_and_gate = device.tensor_map(weight, (2, H, C), (1, COLUMNS // 2, DEPTH))
    launch("matmul_swiglu_forward", (out, fch, boxes(inp, N, C, ROWS), up_and_gate), N, H, C)


def matmul_swiglu_backward_wgmma(dfch, out, dout, weight, fch, N: int, H: int, C: int) -> None:
    """Sets dfch (N,2H) to the gradient of fch (N,2H), from dswiglu (N,H) = dout (N,C) @ weight (C,H), which is rounded,
    but not stored. Sets out (N,H) to SwiGLU of fch once more. H is a multiple of 64."""
    arrays = (
        boxes(dfch, N, 2 * H, 8), boxes(out, N, H, 8), boxes(dout, N, C, ROWS), boxes(weight, C, H, DEPTH),
        boxes(fch, N, 2 * H, 8),
    )  # fmt: skip
    launch("matmul_swiglu_backward", arrays, N, H, C)


def rows_of_partials(N: int) -> int:
    """How many partial sums a column of N rows has: one for each warp of a tile."""
    return 4 * ceil_div(N, ROWS)


def boxes(array, N: int, C: int, rows: int) -> device.TensorMap:
    """A map of an array (N,C) for copies of 64 columns of `rows` rows at a time, from it or to it."""
    return device.tensor_map(array, (1, N, C), (1, rows, 64))


def launch(name: str, arrays: tuple, M: int, N: int, K: int) -> None:
    """Launches a block for each multiprocessor, which make the tiles of an (M,N) product."""
    stages, columns, buffer, barriers = KERNELS[name]
    shared = stages * (2 * (ROWS + COLUMNS) * DEPTH + 16) + WARPS * (2 * buffer + 8 * barriers) + 16
    blocks = min(device.multiprocessors, ceil_div(M, ROWS) * ceil_div(N, columns))
    cu.launch(f"{name}_wgmma_kernel", (blocks,), (384,), (*arrays, M, N, K), shared_mem=shared)


for launcher, sizes, arrays, needs in (
    (matmul_gelu_forward_wgmma, "N=130 C=72 OC=200", "out fch: N,OC; inp: N,C; weight: OC,C; bias: OC", "OC % 8 == 0"),
    (matmul_gelu_backward_wgmma, "N=130 C=200 OC=72",
     "dfch out fch: N,C; dbias*: C; dout: N,OC; weight: OC,C; bias: C", "OC % 8 == 0"),
    (matmul_swiglu_forward_wgmma, "N=130 C=72 H=104", "out: N,H; fch: N,2*H; inp: N,C; weight: 2*H,C", "H % 8 == 0"),
    (matmul_swiglu_backward_wgmma, "N=130 C=72 H=256", "dfch fch: N,2*H; out: N,H; dout: N,C; weight: C,H",
     "H % 64 == 0"),
):  # fmt: skip
    describe(launcher, sizes, arrays, hard="N=389", needs=f"C % 8 == 0; {needs}", precision="bf16")
FLOPS |= {name: lambda a: 2 * a.M * a.N * a.K for name in ("matmul_gelu_forward", "matmul_gelu_backward")}
FLOPS |= {"matmul_swiglu_forward": lambda a: 4 * a.M * a.H * a.K,
          "matmul_swiglu_backward": lambda a: 2 * a.M * a.H * a.K}
