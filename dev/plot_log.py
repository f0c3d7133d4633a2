"""Draws training and validation loss over steps, from the log files of one run or several, and below them bits per byte
of validation text, which compare runs of different vocabularies, where a log has them.

    python dev/plot_log.py run.log other.log -o loss.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, wherever this is run from

from dev.pictures import save_picture
from device.errors import UserError
from llmc.run.arguments import Parser, a_path
from llmc.run.logger import read_log
from llmc.run.program import run_program

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")  # no display needed


def plot(logs: list[Path], out: Path) -> None:
    """Draws the logs into the picture `out`, in the format of its suffix. Raises UserError for what cannot be read,
    drawn or written, and where `out` is a file that is no picture of ours."""
    runs = [read_log(log) for log in logs]
    for log, run in zip(logs, runs, strict=True):
        if not run.keys() & {"trl", "tel"}:
            raise UserError(f"{log}: no losses in it yet; give the log file of a run (-o)")
    labels = ["loss (nats per token)"] + ["bits per byte of text"] * any("bpb" in run for run in runs)
    figure, axes = plt.subplots(
        len(labels), figsize=(8, 1 + 4 * len(labels)), sharex=True, squeeze=False, layout="constrained"
    )
    panels = axes[:, 0]
    for i, (log, run) in enumerate(zip(logs, runs, strict=True)):
        prefix = f"{log}: " if len(logs) > 1 else ""
        validation = {
            "color": f"C{i}", "linewidth": 1.8, "label": f"{prefix}validation",
            "linestyle": "-" if i == 0 else "--",  # so that a run that coincides with the first one does not hide it
        }  # fmt: skip
        if "trl" in run:
            panels[0].plot(*run["trl"], color=f"C{i}", linewidth=0.8, alpha=0.4, label=f"{prefix}training")
        if "tel" in run:
            panels[0].plot(*run["tel"], **validation)
        if "bpb" in run:
            panels[1].plot(*run["bpb"], **validation)
    for panel, label in zip(panels, labels, strict=True):
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend()
    panels[-1].set_xlabel("step")
    save_picture(figure, out)
    plt.close(figure)


def main() -> None:
    parser = Parser(description="Draw the losses in log files (train_gpt2_fp32.py -o LOG).")
    parser.add_argument("logs", metavar="LOG", type=a_path, nargs="+")
    out = {"dest": "out", "type": a_path, "default": Path("loss.png")}
    parser.add_argument("-o", metavar="PICTURE", **out, help="(%(default)s)")
    args = parser.parse_args()
    plot(args.logs, args.out)
    print(args.out)


if __name__ == "__main__":
    run_program(main)
