"""Page 1's eight kernels: what they compute."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_all_eight_do_what_they_say():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LLMC_CPU_")}
    command = [sys.executable, "doc/eight_kernels.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert [line[0] for line in said.splitlines() if "_kernel: " in line] == list("12345678")
    rows = [line.split() for line in said.splitlines() if line]
    assert ["blockIdx.x", *(str(i // 8) for i in range(24))] in rows           # index
    assert ["threadIdx.x", *(str(i % 8) for i in range(24))] in rows
    assert ["y", *(str(i * i) for i in range(10)), *["-1"] * 6] in rows        # guard
    assert ["row", "4", "blocks", *"6666777788"] in rows                       # matrix
    assert ["y", *map(str, [*range(7, -1, -1), *range(15, 7, -1)])] in rows    # shared
    assert ["half", "1", "36", "20", "10", "12", "5", "6", "7", "8"] in rows   # barrier
    assert ["xor", "1", *["496"] * 32] in rows                                 # shuffle
    assert said.count("sum 780") == 2 and "1 thread; lane" in said             # warps of 32 lanes and of one
