"""Times flash attention on the GPU: python dev/bench attention [--precision bf16] [-b 4] [-t 1024] [-n 12] [-s 64]

Prints microseconds and TFLOP/s of forward and backward for one layer with n heads of size s, everything included. Where
PyTorch has CUDA, also those of its attention in bf16: FlashAttention-2 and cuDNN.
FLOPs are counted as is usual for causal attention: half of the (T, T) scores, 2 products forward and 5 backward.
"""

import statistics
import warnings
from functools import partial

import device
from kernels.flash_attention import flash_attention_backward, flash_attention_forward
from llmc.run.arguments import Parser, positive

import numpy as np

RUNS = 50  # we report their median
LAYERS = 3  # sets of arrays, used in turn: a training step does not find a layer's arrays in the cache either


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", type=positive, default=4, metavar="B", help="batch size (4)")
    parser.add_argument("-t", type=positive, default=1024, metavar="T", help="sequence length (1024)")
    parser.add_argument("-n", type=positive, default=12, metavar="NH", help="heads (12)")
    parser.add_argument("-s", type=positive, default=64, metavar="HS", help="head size, 64 or 128 (64)")
    parser.add_argument("--precision", choices=("tf32", "bf16"), default="tf32", help="of our products (tf32)")
    args = parser.parse_args(arguments)
    B, T, NH, HS = args.b, args.t, args.n, args.s
    device.use("cuda")
    device.use_precision(args.precision)
    layers = [arrays(B, T, NH, HS, seed) for seed in range(LAYERS)]

    def forward() -> None:
        for a in layers:
            flash_attention_forward(a["out"], a["lse"], a["qkv"], B, T, NH, NH, HS)

    def backward() -> None:
        for a in layers:
            flash_attention_backward(a["dqkv"], a["dout"], a["out"], a["lse"], a["qkv"], B, T, NH, NH, HS)

    def report(name: str, us_forward: float, us_backward: float) -> None:
        times = ("forward", us_forward, 2), ("backward", us_backward, 5)
        flops = 2 * B * T * T / 2 * NH * HS
        each = (f"{way} {us:8.1f} us {products * flops / us * 1e-6:6.1f} TFLOP/s" for way, us, products in times)
        print(f"{name:16}  {'   '.join(each)}   both {us_forward + us_backward:8.1f} us")

    print(f"{device.name}: B {B}, T {T}, {NH} heads of {HS}")
    from cupy.cuda import Event, get_elapsed_time

    report(
        f"ours, {args.precision}",
        *(median_us(device.record(work), RUNS, Event, get_elapsed_time) / LAYERS for work in (forward, backward)),
    )
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        times = pytorch_us(backend, B, T, NH, HS)
        if times:
            report(backend, *times)


def arrays(B: int, T: int, NH: int, HS: int, seed: int) -> dict:
    """One layer's arrays, with normal random numbers for its inputs."""
    rng = np.random.default_rng(seed)
    qkv, out = (B, T, 3 * NH, HS), (B, T, NH, HS)
    shapes = {"qkv": qkv, "dqkv": qkv, "out": out, "dout": out, "lse": (B, NH, T)}
    types = {"lse": np.float32}
    layer = {name: device.zeros(shape, types.get(name, device.floatX)) for name, shape in shapes.items()}
    for name in ("qkv", "dout"):
        device.copy_in(layer[name], device.to_floatX(rng.standard_normal(shapes[name], dtype=np.float32)))
        device.synchronize()
    return layer


def pytorch_us(backend: str, B: int, T: int, NH: int, HS: int) -> tuple[float, float] | None:
    """Times of forward and backward of scaled_dot_product_attention in bf16 with one of its backends; None where there
    is no PyTorch with CUDA, or the backend does not take the shape."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    warnings.simplefilter("ignore")  # autograd's thread looks for CUDA's context, and makes one
    event, elapsed_ms = partial(torch.cuda.Event, enable_timing=True), torch.cuda.Event.elapsed_time

    def normal():
        return torch.randn(B, T, NH, HS, dtype=torch.bfloat16, device="cuda").transpose(1, 2).requires_grad_()

    layers = [tuple(normal() for _ in range(4)) for _ in range(LAYERS)]

    def forward() -> list:
        return [
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v, _ in layers
        ]

    def graph(work):
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            work()
        return captured.replay

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            with torch.no_grad():
                us_forward = median_us(graph(forward), RUNS, event, elapsed_ms)
            outs = forward()

            def backward() -> None:
                for out, (q, k, v, dout) in zip(outs, layers, strict=True):
                    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            return us_forward / LAYERS, median_us(graph(backward), RUNS, event, elapsed_ms) / LAYERS
        except RuntimeError as error:
            print(f"{backend}: {str(error).splitlines()[0]}")
            return None


def median_us(replay, runs: int, event, elapsed_ms) -> float:
    """Median time of a replayed graph between two events on the GPU, after warming up."""
    for _ in range(5):
        replay()
    times = []
    for _ in range(runs):
        start, stop = event(), event()
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(elapsed_ms(start, stop) * 1e3)
    return statistics.median(times)

