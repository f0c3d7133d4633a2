"""The device in fp8, and how PyTorch quantizes."""

from collections.abc import Iterator
from types import ModuleType

import device
from conftest import switch_device
from device.fp8 import from_e4m3
from kernels.fp8.quantized import Quantized
from llmc.model import fp8

import numpy as np
import pytest
import torch

MAX_E4M3 = 448.0


def in_fp8(request, monkeypatch) -> Iterator[ModuleType]:
    """What a fixture does, if its parameters are devices: the test runs in fp8, and all weights are quantized, however
    small they are."""
    switch_device(request.param, monkeypatch)
    if device.use_precision("bf16") and device.kind == "cuda" and device.current.device.compute_capability < 89:
        pytest.skip("this GPU has no fp8")
    device.use_precision("fp8")
    monkeypatch.setattr(fp8, "MIN_GAIN", 0)
    yield device
    device.synchronize()


def scale_of(amax: float) -> np.float32:
    """The least power of two, from 2^-126 on, with which `amax` is at most 448."""
    return np.float32(2.0 ** max(-126, np.ceil(np.log2(max(np.float64(amax), 1e-300) / MAX_E4M3))))


def quantized_by_pytorch(values: np.ndarray, scale: float) -> np.ndarray:
    """values / scale in e4m3, clipped, as PyTorch rounds."""
    scaled = torch.from_numpy(values / np.float32(scale)).clamp(-MAX_E4M3, MAX_E4M3)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def dequantized(values: np.ndarray) -> np.ndarray:
    """The numbers of a quantized matrix, float64."""
    scale = scale_of(np.abs(values).max())
    return from_e4m3(quantized_by_pytorch(values, scale)).astype(np.float64) * scale


def assert_quantized(found: Quantized, values: np.ndarray, scale: np.float32 | None = None) -> None:
    """Those layouts that are there hold the values, quantized by this scale, by default their own."""
    scale = scale_of(np.abs(values).max()) if scale is None else scale
    expected = quantized_by_pytorch(values, scale)
    assert device.to_host(found.scale.scale)[0] == scale and not (found.q is None and found.q_T is None)
    assert found.q is None or np.array_equal(device.to_host(found.q), expected)
    assert found.q_T is None or np.array_equal(device.to_host(found.q_T), expected.T)
