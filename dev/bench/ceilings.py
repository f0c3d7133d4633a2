"""What the machine can do, measured, and what a training step must do, counted from the model's tables: together a
limit that no step can be faster than."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import device
from llmc.model.activations import training_tables
from llmc.model.model import Model
from llmc.model.tensors import Config, num_parameters, padded, shape_of, type_of, without

import numpy as np


def seconds(work: Callable[[], None], calls: int = 10, rounds: int = 5, record: bool = True) -> float:
    """What `work` takes on the device, called over and over: the best of some rounds of `calls`. On CUDA it is
    recorded, so that the host's time is not in it, unless `record` is False."""

    def repeat() -> None:
        for _ in range(calls):
            work()

    recorded = device.record(repeat) if record else repeat
    for _ in range(2 if device.kind == "cuda" else 1):
        recorded()
    device.synchronize()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        recorded()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return min(times) / calls


def random_array(length: int):
    """Random factors of a product, the same million over and over: the host takes seconds to draw a billion."""
    values = np.random.default_rng(1).standard_normal(1 << 20, dtype=np.float32)
    values = values.astype(np.float16) if device.precision == "fp16" else device.to_floatX(values)
    return device.asarray(np.resize(values, length))


def product_seconds(m: int, n: int, k: int, dtype: np.dtype | None = None) -> float:
    """A product of (m, k) and (k, n) on random numbers, of the type `floatX` or fp16, to numbers of this type (floatX);
    on a GPU in the fastest of the four layouts that it might take, on the CPU they make little difference."""
    a, b, c = random_array(m * k), random_array(k * n), device.empty((m * n,), dtype or device.floatX)
    scales = {}
    if device.precision == "fp16":
        scales = dict.fromkeys(("scale_a", "scale_b"), device.asarray(np.ones(2, np.float32)))
    if device.kind == "cpu":
        return seconds(lambda: device.gemm(c, a, b, m, n, k, False, True, **scales), calls=1, rounds=3)
    calls = max(1, min(20, round(4e11 / (2 * m * n * k))))
    return min(
        seconds(lambda: device.gemm(c, a, b, m, n, k, trans_a, trans_b, **scales), calls, 3)  # noqa: B023
        for trans_a in (False, True) for trans_b in (False, True)
    )  # fmt: skip


@dataclass(frozen=True)
class Ceilings:
    """Of the precision in use. product: FLOP/s of a large square matrix product; copy: bytes/s, read and written, of a
    large copy."""

    product: float
    copy: float
    description: str


def measure_copy() -> float:
    """Bytes/s, read and written, of a large copy."""
    megabytes = 1024 if device.kind == "cuda" else 256
    free, _ = device.memory()
    size = min(megabytes << 20, free // 8) // 4
    src, dst = device.zeros((size,)), device.zeros((size,))
    if device.kind == "cuda":
        # Not recorded: in a graph, a copy is left to the copy engines, which are slower than the multiprocessors.
        return 2 * src.nbytes / seconds(lambda: dst.data.copy_from_device_async(src.data, src.nbytes), record=False)
    parts = [slice(i * size // 8, (i + 1) * size // 8) for i in range(8)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return 2 * src.nbytes / seconds(
            lambda: list(pool.map(lambda part: np.copyto(dst[part], src[part]), parts)), calls=1
        )  # fmt: skip


def measure_ceilings() -> Ceilings:
    n = 8192 if device.kind == "cuda" else 2048
    free, _ = device.memory()
    while 3 * 4 * n * n > free // 2:
        n //= 2
    product, copy = 2 * n**3 / product_seconds(n, n, n), measure_copy()
    kind = "bf16" if device.floatX == device.BF16 else device.precision.replace("tf", "TF")
    description = (
        f"ceilings: {kind} matrix product {n}^3 {product / 1e12:.4g} TFLOP/s, copy {copy / 1e9:.0f} GB/s (read + write)"
    )
    return Ceilings(product, copy, description)


def limits(
    kind: type[Model], config: Config, B: int, T: int, ceilings: Ceilings, batches: int = 1
) -> dict[str, float]:
    """What no training step of so many batches can be faster than, whatever its kernels: parts with their milliseconds.

    Linear layers are each layer's matrices and the classifier. What is kept are the activations of each layer, the rows
    that begin with L, in the tables for flash attention: no (T, T) matrix has to be kept."""
    N, X, sizes = B * T, device.floatX, config.sizes() | {"B": B, "T": T}
    products = 0.0
    for symbols in [symbols for _, symbols in config.parameters() if len(symbols) == 3] + [("Vp", "C")]:
        *count, outputs, inputs = shape_of(symbols, sizes)
        shapes = (N, outputs, inputs), (N, inputs, outputs), (outputs, inputs, N, np.dtype(np.float32))
        products += math.prod(count) * sum(product_seconds(*shape) for shape in shapes)  # out, dinp, dweight
    # A causal matrix is half a matrix: forward takes 2 products of it, backward 5.
    attention = 7.0 * config.num_layers * B * T * T * config.num_heads * config.head_size
    # Reads and writes parameters (in bf16 as two halves), m and v, and reads gradients.
    update = 28 * num_parameters(config)
    rows = [row for row in without(training_tables(kind, "flash")[0], config.absent) if row[1][0].startswith("L")]
    kept = sum(math.prod(shape_of(row[1], sizes)) * type_of(row, X).itemsize for row in rows)
    logits = N * padded(config.vocab_size) * X.itemsize
    parts = {
        "linear products in their own shapes": batches * products,
        "causal attention at the ceiling": batches * attention / ceilings.product,
        "AdamW's bytes at copy speed": update / ceilings.copy,
        # Each is written and read again once, and so is its gradient.
        "kept activations across memory once": batches * 4 * kept / ceilings.copy,
        "logits across memory once": batches * 2 * logits / ceilings.copy,
    }
    return {name: 1000 * part for name, part in parts.items()}
