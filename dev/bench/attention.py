"""Times flash attention on the GPU: python dev/bench attention [--precision bf16] [-b 4] [-t 1024] [-n 12] [-s 64]

Prints microseconds and TFLOP/s of forward and backward for one layer with n heads of size s, everything included. Where
PyTorch has CUDA, also those of its attention in bf16: FlashAttention-2 and cuDNN.
FLOPs are counted as is usual for causal attention: half of the (T, T) scores, 2 products forward and 5 backward.
"""

import warnings
from collections.abc import Callable
from functools import partial

import device
from dev.bench.step import TorchEvent
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
    print(f"{device.name}: B {B}, T {T}, {NH} heads of {HS}")
    for name, times in (
        (f"ours, {args.precision}", our_us(B, T, NH, HS)),
        *((backend, pytorch_us(backend, B, T, NH, HS)) for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION")),
    ):
        if times:
            flops = 2 * B * T * T / 2 * NH * HS
            ways = zip(("forward", "backward"), times, (2, 5), strict=True)
            each = (f"{way} {us:8.1f} us {products * flops / us * 1e-6:6.1f} TFLOP/s" for way, us, products in ways)
            print(f"{name:16}  {'   '.join(each)}   both {sum(times):8.1f} us", flush=True)


def our_us(B: int, T: int, NH: int, HS: int) -> tuple[float, float]:
    """Microseconds of a layer's forward and backward."""
    rng, shape = np.random.default_rng(0), (B, T, NH, HS)

    def normal(shape: tuple[int, ...]):
        return device.asarray(device.to_floatX(rng.standard_normal(shape, dtype=np.float32)))

    def zeros(shape: tuple[int, ...]):
        return device.zeros(shape, device.floatX)

    layers = [
        (zeros(shape), device.zeros((B, NH, T)), normal((B, T, 3 * NH, HS)), normal(shape), zeros((B, T, 3 * NH, HS)))
        for _ in range(LAYERS)
    ]

    def forward() -> None:
        for out, lse, qkv, _, _ in layers:
            flash_attention_forward(out, lse, qkv, B, T, NH, NH, HS)

    def backward() -> None:
        for out, lse, qkv, dout, dqkv in layers:
            flash_attention_backward(dqkv, dout, out, lse, qkv, B, T, NH, NH, HS)

    return median_us(device.record(forward), device.event), median_us(device.record(backward), device.event)


def pytorch_us(backend: str, B: int, T: int, NH: int, HS: int) -> tuple[float, float] | None:
    """The same of scaled_dot_product_attention in bf16 with one of its backends; None where there is no PyTorch with
    CUDA, or the backend does not take the shape."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    warnings.simplefilter("ignore")  # autograd's thread looks for CUDA's context, and makes one
    event, stream = partial(TorchEvent, torch), torch.cuda.Stream()

    def normal():
        return torch.randn(B, T, NH, HS, dtype=torch.bfloat16, device="cuda").transpose(1, 2).requires_grad_()

    layers = [tuple(normal() for _ in range(4)) for _ in range(LAYERS)]

    def forward() -> list:
        return [torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v, _ in layers]

    def graph(work):
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            work()
        return captured.replay

    with torch.cuda.stream(stream), sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            with torch.no_grad():
                us_forward = median_us(graph(forward), event)
            outs = forward()

            def backward() -> None:
                for out, (q, k, v, dout) in zip(outs, layers, strict=True):
                    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            return us_forward, median_us(graph(backward), event)
        except RuntimeError as error:
            print(f"{backend}: {str(error).splitlines()[0]}")
            return None


def median_us(replay: Callable[[], None], event: Callable) -> float:
    """The median microseconds of a layer, when a graph that has all LAYERS is replayed, after warming up. event() marks
    a place in the device's work, as device.event does."""
    for _ in range(5):
        replay()
    times = []
    for _ in range(RUNS):
        begin = event()
        replay()
        times.append(event().since(begin))
    return 1000 * float(np.median(times)) / LAYERS
