"""Fixtures that all tests share: the device they run on, and seeded random numbers."""

import os

# Read when numpy loads, so before any import that brings it in: idle worker threads would steal the tests' own cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from configs; nothing is fetched

import numpy as np
import pytest

from llmc import device
from llmc.errors import UserError

DEVICES = ["cpu", "cpu-warp32"]
try:
    device.use("cuda")
    DEVICES.append("cuda")
    NO_CUDA = ""
except UserError as error:
    NO_CUDA = f" (no cuda: {error})"


def pytest_report_header() -> str:
    return f"devices: {', '.join(DEVICES)}{NO_CUDA}"


@pytest.fixture(params=DEVICES)
def dev(request, monkeypatch):
    """llmc.device, switched to each device in turn.

    "cpu" runs the kernels with warps of one thread, as training on the CPU does; "cpu-warp32" runs them with the warps
    of 32 that a GPU has, so that every shuffle takes part; "cuda" is the GPU, left out where there is none.
    """
    kind, _, warp = request.param.partition("-warp")
    if kind == "cpu":
        monkeypatch.setenv("LLMC_CPU_WARP", warp or "1")
    device.use(kind)
    yield device
    device.synchronize()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that are the same on every run, and differ from test to test."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
