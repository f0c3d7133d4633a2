"""Times a linear layer's products on a GPU in the layouts in which their operands may lie, for page 5.

    python doc/layouts.py

A row is a product op(a) (m, k) @ op(b) (k, n), in TFLOP/s; a letter says how an operand lies: N by its own rows, T
transposed. Below it, the classifier's product with the vocabulary as it is and padded.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from itertools import product

import device
from dev.bench.ceilings import random_array, seconds
from device.errors import UserError
from kernels.matmul import transpose
from llmc.run.arguments import Parser
from llmc.run.program import run_program

N, C = 4096, 768
SHAPES = {
    "out = inp weight^T": (N, 4 * C, C), "dinp = dout weight": (N, C, 4 * C), "dweight = dout^T inp": (4 * C, C, N)
}  # fmt: skip
VOCABULARIES = 50257, 50260, 50272, 50304  # odd, multiples of 4 and of 32, padded to a multiple of 128


def rate(m: int, n: int, k: int, trans_a: bool, trans_b: bool) -> float:
    """TFLOP/s of a product."""
    a, b, c = random_array(m * k), random_array(k * n), device.empty((m * n,))
    calls = max(2, round(1e12 / (2 * m * n * k)))
    return 2e-12 * m * n * k / seconds(lambda: device.gemm(c, a, b, m, n, k, trans_a, trans_b), calls)


def main() -> None:
    Parser(description="Time a linear layer's products by layout.").parse_args()
    if device.use() != "cuda":
        raise UserError(f"layouts: this is for a GPU, and CUDA does not work here ({device.why_not_cuda})")
    print(f"{device.name}, TF32 {'on' if device.tf32 else 'off'}, TFLOP/s\n{'':36}    NN     NT     TN     TT")
    for name, (m, n, k) in SHAPES.items():
        rates = [f"{rate(m, n, k, *trans):6.0f}" for trans in product((False, True), repeat=2)]
        print(f"{name:20} {f'{m} x {n} x {k}':15}", " ".join(rates), flush=True)
    for size in (N, C), (4 * C, C), (N, 4 * C):
        inp, out = random_array(size[0] * size[1]), device.empty((size[0] * size[1],))
        microseconds = 1e6 * seconds(lambda: transpose(out, inp, *size), calls=50)  # noqa: B023
        print(f"transposing {f'{size[0]} x {size[1]}':12} {microseconds:6.1f} us")
    for V in VOCABULARIES:
        rates = rate(N, V, C, False, True), rate(N, C, V, False, False), rate(V, C, N, True, True)
        print(f"vocabulary {V}: out {rates[0]:.0f}, dinp {rates[1]:.0f}, dweight {rates[2]:.0f}", flush=True)


if __name__ == "__main__":
    run_program(main)
