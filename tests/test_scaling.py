"""What is timed, drawn and estimated of several GPUs."""

import re
import subprocess
import sys
from pathlib import Path

from dev.bench import scaling
from dev.timeline import one_step, row_of, without

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


@pytest.mark.parametrize("name, row", [
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "matrix products"),
    ("nvjet_tss_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
    ("adamw_kernel", "other kernels"), ("sum_kernel", "exchange"), ("checksum_kernel", "other kernels"),
    ("flash_attention_group_sum_kernel", "other kernels"), ("Memcpy PtoP", "exchange"),
])  # fmt: skip
def test_kernels_are_told_apart_by_name(name, row):
    assert row_of(name) == row


def test_the_middle_one_of_three_steps_is_drawn():
    kernels = []
    for begin in (0.0, 10.0, 20.0):
        spans = {"encoder_forward": (0, 1), "gemm": (2, 5), "ncclAllReduce": (4, 7), "wte_backward": (8, 9)}
        kernels += [(name, (begin + start, begin + stop)) for name, (start, stop) in spans.items()]
    rows = one_step(kernels)
    assert rows == {
        "exchange": [(4.0, 7.0)], "matrix products": [(2.0, 5.0)], "other kernels": [(0.0, 1.0), (8.0, 9.0)],
    }  # fmt: skip
    assert without(rows["exchange"], rows["matrix products"]) == 2.0 and without(rows["exchange"], []) == 3.0
