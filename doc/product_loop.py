"""The last two rungs of doc/ladder/matmul_hopper.cu, Triton and cuBLAS by turns, in one loop without pauses:

    python doc/product_loop.py               # M = N = K = 8192
    python doc/product_loop.py 4096 3072 768

It needs a GPU of compute capability 9.0, and PyTorch for CUDA, which brings Triton.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device
from doc.rungs import TOPICS

import cupy
import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS, DEPTH, GROUP = 128, 256, 64, 8  # of a tile; GROUP rows of tiles come before the next
STAGES, WARPS = 3, 8
ROUNDS = 21


@triton.jit
def product_kernel(
    c, a, b, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    """c (M, N) = a (M, K) b (K, N), which are tensor descriptors."""
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


def by_triton(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    boxes = (c, [ROWS, COLUMNS]), (a, [ROWS, DEPTH]), (b, [DEPTH, COLUMNS])
    maps = [TensorDescriptor.from_tensor(array, box) for array, box in boxes]
    product_kernel[(device.multiprocessors,)](
        *maps, *c.shape, a.shape[1], ROWS, COLUMNS, DEPTH, GROUP, num_stages=STAGES, num_warps=WARPS
    )


def main() -> None:
    M, N, K = map(int, sys.argv[1:]) if len(sys.argv) == 4 else (8192, 8192, 8192)
    device.use("cuda")
    device.use_precision("bf16")
    a, b, c = (torch.randn(shape, device="cuda").bfloat16() for shape in ((M, K), (K, N), (M, N)))
    arrays = (cupy.asarray(x.view(torch.int16)).view(device.BF16) for x in (a, b, c))
    sizes = SimpleNamespace(M=M, N=N, K=K, **dict(zip("abc", arrays, strict=True)))
    topic, cu = TOPICS["matmul_hopper"], device.Source(Path(__file__).parent / "ladder" / "matmul_hopper.cu")
    products = {rung.kernel: lambda rung=rung: rung.launch(cu, sizes) for rung in topic.rungs[-3:]}

    gpu, repeats = device.current.device, max(20, 8192**3 // (M * N * K))
    for product in products.values():
        product()
    graphs = {
        name: gpu.capture(lambda product=product: [product() for _ in range(repeats)])
        for name, product in products.items()
    }

    def replayed(graph) -> float:
        begin = gpu.event()
        graph.launch(gpu.main_stream)
        return gpu.event().since(begin)

    by_triton(a, b, c)
    torch.cuda.synchronize()
    triton_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(triton_graph):
        for _ in range(repeats):
            by_triton(a, b, c)

    def replayed_by_torch() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        triton_graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    runs = {name: lambda graph=graph: replayed(graph) for name, graph in graphs.items()} | {"Triton": replayed_by_torch}
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            cupy.cuda.Device().synchronize()
            times[name].append(run())
    print(f"{gpu.name}, Triton {triton.__version__}, M={M}, N={N}, K={K}")
    for name, found in times.items():
        us = 1000 * float(np.median(found[2:])) / repeats
        print(f"{name:20} {us:8.1f} us  {2e-6 * M * N * K / us:6.1f} TFLOP/s")


if __name__ == "__main__":
    main()
