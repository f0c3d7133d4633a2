"""What a run says of its speed."""

import re

import device
from llmc.data.token_file import write_tokens
from llmc.run import peak as peaks
from llmc.run import report
from llmc.run.arguments import make_parser, parse_arguments
from train_gpt2_fp32 import GPT2, GPT2Config, train

import numpy as np
import pytest
from lazy import LazyDevice

PEAKS = [
    ("NVIDIA H200", 494.5e12),
    ("NVIDIA H100 PCIe", 378e12),
    ("NVIDIA H100 80GB HBM3", 494.5e12),
    ("NVIDIA GeForce RTX 4090", 82.6e12),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ("GeForce RTX 3090", 35.6e12),  # as old drivers have it
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", 73.5e12),
    ("NVIDIA GeForce RTX 5090 D", None),
    ("NVIDIA A10G", None),  # no A10
]


@pytest.mark.parametrize("name, peak", PEAKS)
def test_a_gpus_peak_is_its_own_or_unknown(monkeypatch, name, peak):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "precision", "tf32")
    monkeypatch.setattr(device.current.device, "name", name)
    assert peaks.tensor_core_peak() == peak
    monkeypatch.setattr(device.current.device, "precision", "bf16")
    assert peaks.tensor_core_peak() == (2 * peak if peak else None)
    monkeypatch.setattr(device.current.device, "precision", "fp32")
    assert peaks.tensor_core_peak() is None


@pytest.mark.parametrize("seconds, text", [(0, "0m00s"), (59.6, "1m00s"), (3599, "59m59s"), (7384, "2h03m")])
def test_the_time_left_is_told_in_minutes_or_hours(seconds, text):
    assert report.duration(seconds) == text


@pytest.mark.parametrize("batches", [1, 2, 7])
def test_each_step_takes_as_long_as_the_device_works_on_it_however_many_batches_it_has(
    batches, tmp_path, monkeypatch, capsys
):
    """Steps that are alike get the same time, also the first and the last. A work of the lazy device takes 1 ms."""
    V, B, T, steps = 61, 2, 8, 5
    for split in "train", "val":
        write_tokens(tmp_path / f"data_{split}.bin", np.arange(40 * B * T + 1) % V, V)
    monkeypatch.setattr(device, "use", lambda *_: setattr(device.current, "device", LazyDevice()))
    try:
        train(GPT2, parse_arguments(GPT2Config, [
            "-e", "layers=1,heads=2,channels=8", "-i", str(tmp_path / "data"), "-b", str(B), "-t", str(T),
            "-d", str(batches * B * T), "-x", str(steps), "-v", "2", "-g", "0",
        ]))  # fmt: skip
    finally:
        monkeypatch.undo()
        device.use("cpu")
    out = capsys.readouterr().out
    printed = re.findall(r"\((\d+\.\d\d) ms, (\d+) tok/s\)", out)
    (ms, speed), tokens = printed[0], batches * B * T
    assert printed == [(ms, speed)] * steps and float(ms) > 10 * batches
    assert int(speed) == round(1000 * tokens / float(ms))
    assert f"total average iteration time: {float(ms):.6f} ms\n" in out


def test_a_step_of_a_known_gpu_shows_its_model_flops_utilisation_and_the_help_says_what_that_is(monkeypatch, capsys):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "precision", "bf16")
    for name, shown in ("NVIDIA RTX A6000", ", MFU 50.0% of bf16 peak, "), ("NVIDIA RTX A6001", None):
        monkeypatch.setattr(device.current.device, "name", name)
        percent = report.percent_of_peak(77.4e9, 1.0)
        report.print_step(1, 2, 3.0, None, 1e-3, 1.0, 1.0, 100.0, percent)
        out = capsys.readouterr().out
        assert shown in out if shown else "MFU" not in out and "%" not in out
    text = " ".join(make_parser(GPT2Config).format_help().split())
    assert "model FLOPs utilisation (MFU)" in text and "6 N + 12 L NH HS T" in text
    sentences = text[text.index("(MFU)") :]
    assert peaks.TIMES_TF32.keys() == {"tf32", "bf16", "fp16", "fp8"}
    assert "in the precision that the line names" in sentences
    assert all(name in sentences for name in ("TF32", "bf16", "fp16", "fp8"))  # in fp8 of a peak that no run can reach
    assert "twice the peak in bf16" in sentences and peaks.TIMES_TF32["fp8"] == 2 * peaks.TIMES_TF32["bf16"]
