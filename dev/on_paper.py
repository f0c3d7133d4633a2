"""What a data-parallel step takes on paper, for numbers of GPUs that are not at hand.

    python dev/on_paper.py --step 16.4 --forward 3.9 --backward 9.0 --parameters 124e6

Rings bring sums of gradients to the ranks that update them, and the parameters back. Each way every GPU sends and
receives (N - 1) / N times their bytes, through the narrowest link of its ring, and each of a ring's N - 1 passes has a
latency. Gradients are on their way beside the backward pass of the layers, parameters beside their forward pass. What
does not fit there is waited for, as the embedding is. Prints milliseconds a step and efficiency for the links in LINKS.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmc.arguments import Parser, above_0, non_negative, positive
from llmc.program import run_program

# Bytes a second that a GPU sends, and seconds for one pass of a ring.
LINKS = {
    "NVLink": (300e9, 3e-6),                          # as measured between two H200s: 498 MB in 1.66 ms
    "400 Gb/s Ethernet for each GPU": (45e9, 10e-6),  # nine tenths of its rate
    "400 Gb/s Ethernet for eight GPUs": (45e9 / 8, 10e-6),
}
LAYERS = 12  # of GPT-2 124M, each of which has a ring


def step_ms(
    step: float, forward: float, backward: float, n_bytes: float, late: float, N: int, rate: float, latency: float
) -> float:
    """Milliseconds on N GPUs of a step that takes `step` on one, `forward` and `backward` of it in the layers' passes.
    late: of the bytes, those of the embedding, whose gradient is complete last and which forward takes first."""

    def ring_ms(size: float, rings: int) -> float:
        return 1e3 * ((N - 1) / N * size / rate + rings * (N - 1) * latency)

    layers = ring_ms(n_bytes - late, LAYERS)
    return step + max(0.0, layers - forward) + max(0.0, layers - backward) + 2 * ring_ms(late, 1)


def main() -> None:
    parser = Parser(description="Estimate a data-parallel step on many GPUs.")
    add = parser.add_argument
    add("--step", type=above_0, default=16.4, metavar="MS", help="a step on one GPU (%(default)s)")
    add("--forward", type=non_negative, default=3.9, metavar="MS", help="the layers' forward pass (%(default)s)")
    add("--backward", type=non_negative, default=9.0, metavar="MS", help="the layers' backward pass (%(default)s)")
    add("--parameters", type=non_negative, default=124.48e6, metavar="N", help="numbers in all gradients (%(default)s)")
    add("--late", type=non_negative, default=38.6e6, metavar="N", help="of them, those of the embedding (%(default)s)")
    add("--gpus", type=positive, nargs="+", default=[2, 8, 64, 512], metavar="N", help="(%(default)s)")
    args = parser.parse_args()
    if args.late > args.parameters:
        parser.error(f"--late {args.late:g} must be at most --parameters {args.parameters:g}")
    print(f"{'':34}" + "".join(f"{f'{N} GPUs':>18}" for N in args.gpus))
    for name, (rate, latency) in LINKS.items():
        cells = []
        for N in args.gpus:
            ms = step_ms(args.step, args.forward, args.backward, 4 * args.parameters, 4 * args.late, N, rate, latency)
            cells.append(f"{f'{ms:.1f} ms {100 * args.step / ms:.0f}%':>18}")
        print(f"{name:34}" + "".join(cells))


if __name__ == "__main__":
    run_program(main)
