"""What a run says of its speed."""

import device
from llmc.run import report

import pytest

PEAKS = [
    ("NVIDIA H200", 494.5e12),
    ("NVIDIA H100 PCIe", 378e12),
    ("NVIDIA H100 80GB HBM3", 494.5e12),
    ("NVIDIA A100-SXM4-80GB", 156e12),
    ("NVIDIA L40S", 183e12),
    ("NVIDIA GeForce RTX 4090", 82.6e12),
    ("NVIDIA RTX A4000", None),  # no A40
    ("NVIDIA A10G", None),  # no A10
    ("NVIDIA RTX A1000", None),
]


@pytest.mark.parametrize("name, peak", PEAKS)
def test_a_gpus_peak_is_its_own_or_unknown(monkeypatch, name, peak):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "precision", "tf32")
    monkeypatch.setattr(device.current.device, "name", name)
    assert report.tensor_core_peak() == peak
    monkeypatch.setattr(device.current.device, "precision", "bf16")
    assert report.tensor_core_peak() == (2 * peak if peak else None)


def test_in_fp32_there_is_no_share_of_a_peak(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "name", "NVIDIA H200")
    assert report.tensor_core_peak() is None


@pytest.mark.parametrize("seconds, text", [(0, "0m00s"), (59.6, "1m00s"), (3599, "59m59s"), (7384, "2h03m")])
def test_the_time_left_is_told_in_minutes_or_hours(seconds, text):
    assert report.duration(seconds) == text
