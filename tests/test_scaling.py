"""What is timed on several GPUs."""

import re
import subprocess
import sys
from pathlib import Path

from dev.bench import scaling

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_bench_prints_a_table_of_steps_on_one_process_and_several():
    flags = "--gpus 2 --device cpu -e layers=1,heads=2,channels=16 -b 2 -t 16 --vocab-size 100 --steps 3 --bitwise 1"
    command = [sys.executable, str(ROOT / "dev" / "bench"), "scaling", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    head, row = done.stdout.splitlines()
    assert re.fullmatch(r" +1 GPU +2 GPUs +all gradients' sum", head)
    assert re.fullmatch(
        r"train_gpt2_fp32 -b 2 -e layers=1,heads=2,channels=16 -t 16 --vocab-size 100 --bitwise 1 +"
        r"\d+\.\d\d ms, -?\d+ MiB +\d+\.\d\d ms, -?\d+ MiB, \d+\.\d% +\d+\.\d\d ms", row
    )  # fmt: skip


def test_what_is_timed_by_itself_has_the_precision_that_is_asked_for(monkeypatch, capsys):
    timed = []
    found = {"ms": 1.0, "mebibytes": 1.0, "sum_ms": 1.0}
    monkeypatch.setattr(scaling, "measure", lambda flags, gpus: timed.append(flags) or found)
    scaling.main(["--gpus", "2", "--precision", "bf16", "--device", "cpu"])
    assert len(timed) == 2 * len(scaling.WORKLOADS)
    assert all(" --precision bf16" in " ".join(flags) for flags in timed)
