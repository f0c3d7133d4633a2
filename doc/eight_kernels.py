"""Launches the eight kernels of page 1 and prints what each thread did, on a GPU or on the CPU.

    python doc/eight_kernels.py                                 # all of them
    python doc/eight_kernels.py matrix shuffle                  # some
    LLMC_CPU_ORDER=shuffled python doc/eight_kernels.py race    # the CPU device runs a block's threads in another order
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

import device
from device.errors import UserError
from llmc.run.arguments import Parser
from llmc.run.program import run_program

import numpy as np

cu = device.source(__file__)


def row(values) -> str:
    return " ".join(f"{v:3g}" for v in np.asarray(values).tolist())


def floats(values):
    return device.asarray(np.asarray(values, np.float32))


def index() -> None:
    """Three blocks of eight threads."""
    block, thread = device.zeros((24,), np.int32), device.zeros((24,), np.int32)
    cu.launch("index_kernel", (3,), (8,), (block, thread))
    print("i           ", row(range(24)))
    print("blockIdx.x  ", row(device.to_host(block)))
    print("threadIdx.x ", row(device.to_host(thread)))


def guard() -> None:
    """Ten numbers, so two blocks of eight threads: six of the sixteen do nothing."""
    n, block = 10, 8
    x, y = floats(range(n)), floats([-1] * 16)  # y is longer than it need be, to see what is not written
    cu.launch("guard_kernel", (device.ceil_div(n, block),), (block,), (y, x, n))
    print("i ", row(range(16)))
    print("y ", row(device.to_host(y)))


def matrix() -> None:
    """5 rows of 10 numbers; a block has 2 rows of 4 threads, so the grid has 3 rows of 3 blocks."""
    N, C = 5, 10
    who = device.zeros((N, C), np.int32)
    cu.launch("matrix_kernel", (device.ceil_div(C, 4), device.ceil_div(N, 2)), (4, 2), (who, N, C))
    for n, blocks in enumerate(device.to_host(who)):
        print(f"row {n}  blocks", row(blocks))


def shared() -> None:
    """Two blocks; each has a shared memory of its own."""
    x = floats(range(16))
    y = floats([0] * 16)
    cu.launch("shared_kernel", (2,), (8,), (y, x))
    print("x ", row(device.to_host(x)))
    print("y ", row(device.to_host(y)))


def barrier() -> None:
    """Eight numbers become one, in three rounds."""
    rounds = floats(np.zeros((4, 8)))
    cu.launch("barrier_kernel", (1,), (8,), (rounds, floats(range(1, 9))))
    for half, sums in zip(("start", "half 4", "half 2", "half 1"), device.to_host(rounds), strict=True):
        print(f"{half:7}", row(sums))


def shuffle() -> None:
    """32 numbers become 32 times their sum, in five rounds."""
    rounds = floats(np.zeros((6, 32)))
    cu.launch("shuffle_kernel", (1,), (32,), (rounds, floats(range(32))))
    for offset, sums in zip(("start", 16, 8, 4, 2, 1), device.to_host(rounds), strict=True):
        print(f"{offset if offset == 'start' else f'xor {offset}':7}", row(sums))


def race() -> None:
    """The differences of 0, 1, 4, 9, 16 ... are the odd numbers, if every left neighbour has come first."""
    y = floats([0] * 64)
    cu.launch("race_kernel", (1,), (64,), (y, floats([i * i for i in range(64)])))
    result = device.to_host(y)
    print("y ", row(result[:20]), "...")
    wrong = int((result[1:] != np.arange(1, 64) * 2 - 1).sum())
    print(f"{wrong} of 63 are wrong" if wrong else "all 63 are right, by luck")


def warps() -> None:
    """The same kernel with a warp of 32 lanes, and on the CPU device with a warp of one lane too."""
    for lanes in ("32",) if device.kind == "cuda" else ("32", "1"):
        use_warps_of(lanes)
        total, lane_of = floats([0]), device.zeros((40,), np.int32)
        threads = cu.block(32)
        cu.launch("warps_kernel", (1,), (threads,), (total, lane_of, floats(range(40)), 40))
        print(f"{threads} thread{'s' * (threads > 1)}; lane of each number:")
        for half in np.split(device.to_host(lane_of), 2):
            print("  ", row(half))
        print(f"   sum {device.to_host(total)[0]:g}")
    use_warps_of("32")


def use_warps_of(lanes: str) -> None:
    """Lanes in a warp of the CPU device from now on; a GPU has 32."""
    os.environ["LLMC_CPU_WARP"] = lanes
    device.use(device.kind)


KERNELS = {f.__name__: f for f in (index, guard, matrix, shared, barrier, shuffle, race, warps)}


def main() -> None:
    parser = Parser(description="Launch the eight kernels of page 1.")
    parser.add_argument("names", nargs="*", metavar="kernel", help=f"{', '.join(KERNELS)} (all)")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (%(default)s)")
    args = parser.parse_args()
    for name in args.names:
        if name not in KERNELS:
            raise UserError(f"{name}: not one of the eight; they are {', '.join(KERNELS)}")
    device.use(args.device)
    use_warps_of("32")
    print(device.name)
    for number, (name, show) in enumerate(KERNELS.items(), 1):
        if not args.names or name in args.names:
            print(f"\n{number}. {name}_kernel: {show.__doc__}")
            show()


if __name__ == "__main__":
    run_program(main)
