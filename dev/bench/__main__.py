"""Times our training and our text beside others'.

    python dev/bench …              a training step, beside PyTorch's (step.py)
    python dev/bench attention …    flash attention alone, on a GPU
    python dev/bench text …         a token of generated text, beside transformers'
    python dev/bench start …        from a program's start to its first finished step
    python dev/bench scaling …      a training step on one GPU and on several
    python dev/bench awake          times nothing: keeps the links between GPUs awake, for `scaling`
    python dev/bench torch …        trains in PyTorch what a script would train, for a log to compare

Each says by --help which flags it has; the beginning of its file says what it measures.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmc.run.program import run_program


def main() -> None:
    name, *flags = sys.argv[1:] or [""]
    if name == "attention":
        from dev.bench.attention import main as run
    elif name == "text":
        from dev.bench.text import main as run
    elif name == "start":
        from dev.bench.start import main as run
    elif name == "scaling":
        from dev.bench.scaling import main as run
    elif name == "awake":
        from dev.bench.scaling import keep_awake as run
    elif name == "torch":
        from dev.bench.train_torch import main as run
    else:
        from dev.bench.step import main as run

        flags = sys.argv[1:]
    run(flags)


run_program(main)
