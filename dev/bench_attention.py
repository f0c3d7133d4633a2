"""Time flash attention on the GPU: python dev/bench_attention.py [-b 4] [-t 1024] [-n 12] [-k 12] [-s 64] [-r 50]

Prints microseconds and TFLOP/s of forward and backward for one layer with n query heads and k heads of keys and values,
of size s, everything included.
FLOPs are counted as is usual for causal attention: half of the (T, T) scores, 2 products forward and 5 backward.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import device  # noqa: E402
from device.errors import UserError  # noqa: E402
from kernels.flash_attention import flash_attention_backward, flash_attention_forward  # noqa: E402
from llmc.arguments import Parser, positive  # noqa: E402
from llmc.program import run_program  # noqa: E402

import numpy as np  # noqa: E402

LAYERS = 3  # sets of arrays, used in turn: a training step does not find a layer's arrays in the cache either


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", type=positive, default=4, metavar="B", help="batch size (4)")
    parser.add_argument("-t", type=positive, default=1024, metavar="T", help="sequence length (1024)")
    parser.add_argument("-n", type=positive, default=12, metavar="NH", help="heads (12)")
    parser.add_argument("-k", type=positive, metavar="NKV", help="heads of keys and values (as many)")
    parser.add_argument("-s", type=positive, default=64, metavar="HS", help="head size, 64 or 128 (64)")
    parser.add_argument("-r", type=positive, default=50, metavar="RUNS", help="measurements; the median counts (50)")
    args = parser.parse_args()
    B, T, NH, NKV, HS = args.b, args.t, args.n, args.k or args.n, args.s
    if NH % NKV:
        raise UserError(f"-k {NKV}: must divide the number of heads, {NH}")
    device.use("cuda")
    layers = [arrays(B, T, NH, NKV, HS, seed) for seed in range(LAYERS)]

    def forward() -> None:
        for a in layers:
            flash_attention_forward(a["out"], a["lse"], a["qkv"], B, T, NH, NKV, HS)

    def backward() -> None:
        for a in layers:
            flash_attention_backward(
                a["dqkv"], a.get("dkv_heads"), a["dsum"], a["dout"], a["out"], a["lse"], a["qkv"], B, T, NH, NKV, HS
            )

    flops = 2 * B * T * T / 2 * NH * HS
    print(f"{device.name}: B {B}, T {T}, {NH} heads ({NKV} of keys) of {HS}")
    for name, work, products in (("forward", forward, 2), ("backward", backward, 5)):
        us = median_us(work, args.r) / LAYERS
        print(f"{name:8}  {us:8.1f} us  {products * flops / us * 1e-6:6.1f} TFLOP/s")


def arrays(B: int, T: int, NH: int, NKV: int, HS: int, seed: int) -> dict:
    """One layer's arrays, with normal random numbers for its inputs."""
    rng = np.random.default_rng(seed)
    qkv, out = (B, T, NH + 2 * NKV, HS), (B, T, NH, HS)
    shapes = {"qkv": qkv, "dqkv": qkv, "out": out, "dout": out, "lse": (B, NH, T), "dsum": (B, NH, T)}
    if NKV < NH:
        shapes["dkv_heads"] = B, T, 2, NH, HS
    layer = {name: device.zeros(shape) for name, shape in shapes.items()}
    for name in ("qkv", "dout"):
        device.copy_in(layer[name], rng.standard_normal(shapes[name], dtype=np.float32))
        device.synchronize()
    return layer


def median_us(work, runs: int) -> float:
    """Median time of `work` between two events on the GPU, replayed as a graph, after warming up."""
    import cupy

    replay = device.record(work)
    for _ in range(5):
        replay()
    times = []
    for _ in range(runs):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    run_program(main)
