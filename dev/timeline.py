"""Draws what each part of a GPU does in a training step on several GPUs, from a profile of rank 0.

    python dev/timeline.py train_gpt2_fp32 --gpus 2 -o doc/gpus.png

The rows are the exchange between GPUs, by copies and kernels, matrix products, and all other kernels; a box is one of
them, from when it began to when it ended. Prints how long the exchange took, and how much of it nothing else was done
beside. PyTorch's profiler is asked, which sees all kernels of the process, those of a replayed graph too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import tempfile

import device
from dev.bench.workload import Ours, make_parser, workload_of, write_data
from dev.pictures import check_picture, save_picture
from device.errors import UserError
from llmc.ranks import collectives, ranks
from llmc.run.arguments import a_path, positive
from llmc.run.program import run_program

WARM_UP, STEPS = 8, 3  # of which the middle one is drawn
ROWS = {"exchange": "#d95f02", "matrix products": "#1b9e77", "other kernels": "#7570b3"}

# How the names of its kernels begin.
EXCHANGE = "nccl", "sum_kernel", "add_sparse_kernel", "gather_rows_kernel"

Span = tuple[float, float]  # milliseconds: begin, end


def profile(ours: Ours) -> list[tuple[str, Span]]:
    """The kernels of STEPS steps, and the copies from GPU to GPU, with their names. Raises UserError where the profiler
    sees none."""
    import torch

    for step in range(WARM_UP):
        ours.launch(step)
        device.synchronize()
        ours.loss(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for step in range(WARM_UP, WARM_UP + STEPS):
            ours.launch(step)
        device.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel" or "PtoP" in e.get("name", "")]
    if not kernels:
        raise UserError("the profiler has seen no kernels: another program may be profiling this GPU")
    return [(e["name"], (e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000)) for e in kernels]


def row_of(name: str) -> str:
    """Which of ROWS a kernel belongs to, by its name."""
    lower = name.lower()
    if "ptop" in lower or lower.startswith(EXCHANGE):
        return "exchange"
    return "matrix products" if any(word in lower for word in ("gemm", "cutlass", "xmma", "nvjet")) else "other kernels"


def one_step(kernels: list[tuple[str, Span]]) -> dict[str, list[Span]]:
    """The spans of each row in the middle step, which begins where the embedding of its batch does."""
    begins = sorted(span[0] for name, span in kernels if "encoder" in name and "forward" in name)
    begin, end = begins[1], begins[2]
    rows = {row: [] for row in ROWS}
    for name, (start, stop) in kernels:
        if begin <= start < end:
            rows[row_of(name)].append((start - begin, stop - begin))
    return rows


def without(spans: list[Span], others: list[Span]) -> float:
    """Milliseconds that spans take up and others do not."""
    points = sorted({t for span in spans + others for t in span})
    total = 0.0
    for a, b in zip(points, points[1:], strict=False):
        middle = (a + b) / 2
        inside = any(s <= middle < e for s, e in spans)
        total += (b - a) * (inside and not any(s <= middle < e for s, e in others))
    return total


def draw(rows: dict[str, list[Span]], title: str, path: Path) -> None:
    """Writes the picture as `save_picture` does."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 2.6), layout="constrained")
    for place, (row, spans) in enumerate(rows.items()):
        boxes = [(start, stop - start) for start, stop in spans]
        axes.broken_barh(boxes, (len(rows) - place - 0.9, 0.8), color=ROWS[row])
    axes.set_yticks([len(rows) - place - 0.5 for place in range(len(rows))], list(rows))
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    axes.set_xlim(left=0)
    save_picture(figure, path, dpi=110)


def main() -> None:
    parser = make_parser("Draw what a GPU does in a training step on several GPUs.")
    parser.add_argument("--gpus", type=positive, default=2, metavar="N", help="GPUs (2)")
    out = {"type": a_path, "default": Path("timeline.png")}
    parser.add_argument("-o", "--out", **out, metavar="FILE", help="the picture (%(default)s)")
    args = parser.parse_args()
    check_picture(args.out)
    ranks.start(args.gpus)
    device.use(args.device, ranks.local_rank())
    if device.kind == "cpu":
        raise UserError("there is nothing to draw on the CPU device, which does one thing after another")
    collectives.start()
    with tempfile.TemporaryDirectory() as directory:
        workload = workload_of(args, directory)
        write_data(workload)
        rows = one_step(profile(Ours(workload)))
    everything = [span for spans in rows.values() for span in spans]
    computing = rows["matrix products"] + rows["other kernels"]
    sending = without(rows["exchange"], [])
    print(f"{device.name}, rank 0 of {ranks.size()}, {workload}")
    print(f"a step {max(end for _, end in everything):.2f} ms, the exchange {sending:.2f} ms, of which nothing else is "
          f"done beside {without(rows['exchange'], computing):.2f} ms")  # fmt: skip
    if ranks.rank() == 0:
        draw(rows, f"{device.name}, rank 0 of {ranks.size()}: {workload}", args.out)
    ranks.finish()


if __name__ == "__main__":
    run_program(main)
