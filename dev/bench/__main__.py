"""Times our training and our text beside others'.

    python dev/bench …              a training step, beside PyTorch's (step.py)
    python dev/bench attention …    flash attention alone, on a GPU
    python dev/bench text …         a token of generated text, beside transformers'
    python dev/bench scaling …      a training step on several GPUs
    python dev/bench torch …        trains in PyTorch what a script would train, for a log to compare

Each says by --help which flags it has; the beginning of its file says what it measures.
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmc.run.program import run_program

MODULES = {"attention": "attention", "text": "text", "scaling": "scaling", "torch": "train_torch"}


def main() -> None:
    named = MODULES.get("".join(sys.argv[1:2]))
    import_module(f"dev.bench.{named or 'step'}").main(sys.argv[2 if named else 1 :])


run_program(main)
