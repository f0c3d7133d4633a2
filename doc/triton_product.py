"""The product of doc/ladder/matmul_hopper.cu in Triton, beside PyTorch's, which is cuBLAS's. It needs PyTorch for CUDA,
which brings Triton, and a GPU of compute capability 9.0.

    python doc/triton_product.py               # M = N = K = 8192
    python doc/triton_product.py 4096 3072 768
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device  # noqa: F401  before what imports packages: it says if this Python is too old

try:
    import torch
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    sys.exit(f"error: {error}: this needs PyTorch for CUDA with Triton 3.4 or later (pip install torch)")

ROWS, COLUMNS, DEPTH, GROUP = 128, 256, 64, 8  # of a tile; GROUP rows of tiles come before the next
STAGES, WARPS = 3, 8


@triton.jit
def product_kernel(
    c, a, b, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    """c (M, N) = a (M, K) b (K, N). They are tensor descriptors: Triton makes tensor maps of these, loads tiles by the
    TMA into a ring of stages, and multiplies by wgmma."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = min(GROUP, down - first)
        row = (first + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, DEPTH):
            sums = tl.dot(a.load([row, k]), b.load([k, column]), sums)
        c.store([row, column], sums.to(tl.bfloat16))


def product(a: "torch.Tensor", b: "torch.Tensor") -> "torch.Tensor":
    """c (M, N) = a (M, K) b (K, N), in bf16, on the device of a and b."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=torch.bfloat16, device=a.device)
    blocks = torch.cuda.get_device_properties(a.device).multi_processor_count
    boxes = (c, [ROWS, COLUMNS]), (a, [ROWS, DEPTH]), (b, [DEPTH, COLUMNS])
    maps = [TensorDescriptor.from_tensor(array, box) for array, box in boxes]
    product_kernel[(blocks,)](*maps, M, N, K, ROWS, COLUMNS, DEPTH, GROUP, num_stages=STAGES, num_warps=WARPS)
    return c


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("this needs a GPU of compute capability 9.0: an H100 or H200")
    M, N, K = map(int, sys.argv[1:]) if len(sys.argv) == 4 else (8192, 8192, 8192)
    a, b = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(K, N, device="cuda").bfloat16()
    want = (a @ b).float()
    error = float((product(a, b).float() - want).norm() / want.norm())
    if not error < 4e-3:
        sys.exit(f"Triton's product differs from cuBLAS's by {error:.2g} of itself")
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}, M={M}, N={N}, K={K}")
    for name, work in ("Triton", lambda: product(a, b)), ("cuBLAS", lambda: a @ b):
        seconds = triton.testing.do_bench_cudagraph(work, rep=200, return_mode="median") * 1e-3
        print(f"{name}: {seconds * 1e6:,.0f} us, {2e-12 * M * N * K / seconds:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
