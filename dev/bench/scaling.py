"""Times a training step on several GPUs, each with a batch of (B, T).

    python dev/bench scaling train_llama3 -e smollm2-135m --gpus 1
    python dev/bench scaling train_llama3 -e smollm2-135m --gpus 2

Prints the milliseconds of a step, the memory that it takes on a GPU, and how long NCCL (on the CPU gloo) takes to sum
all gradients with nothing beside. Each figure is the largest of all ranks. One GPU's milliseconds divided by those of N
GPUs are the share that they reach of N times its speed.
"""

import tempfile
import time

import device
from dev.bench.workload import Ours, make_parser, time_steps, workload_of, write_data
from llmc.ranks import collectives, ranks
from llmc.run.arguments import positive


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time a training step on several GPUs.")
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help="processes, one a GPU (1)")
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="steps to time (%(default)s)")
    args = parser.parse_args(arguments)
    ranks.start(args.gpus)
    device.use(args.device, ranks.local_rank())
    collectives.start()
    with tempfile.TemporaryDirectory() as directory:
        workload = workload_of(args, directory)
        write_data(workload)
        free, _ = device.memory()
        ours = Ours(workload)
        mebibytes = (free - device.memory()[0]) / 2**20  # CuPy keeps what it has asked the driver for
        ms, _ = time_steps(ours, args.steps)
        sum_ms = time_sum(ours.training.model.grads_memory)
    ms, mebibytes, sum_ms = map(max, zip(*ranks.all_gather((ms, mebibytes, sum_ms)), strict=True))
    gpus = f"{ranks.size()} GPU{'s' * (ranks.size() > 1)}"
    print(f"{workload}, {gpus}: {ms:.2f} ms, {mebibytes:.0f} MiB, all gradients' sum {sum_ms:.2f} ms", flush=True)
    ranks.finish()


def time_sum(array, calls: int = 10) -> float:
    """Milliseconds that the sum of an array over the ranks takes; 0 for one rank."""
    for count in (1, calls):
        device.synchronize()
        ranks.all_gather(None)  # all begin together
        started = time.perf_counter()
        for _ in range(count):
            collectives.all_reduce([array])
        device.wait_comm()
        device.synchronize()
    return 1000 * (time.perf_counter() - started) / calls if ranks.size() > 1 else 0.0
