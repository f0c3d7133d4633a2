"""Fixtures that all tests share: the device they run on, and seeded random numbers."""

import os

# Read when numpy loads, so before any import that brings it in: idle worker threads would steal the tests' own cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np
import pytest

from llmc import device
from llmc.errors import UserError


def cuda_missing() -> str | None:
    """Why the CUDA device cannot be used here, or None where it can."""
    try:
        device.use("cuda")
    except UserError as error:
        return str(error)
    return None


CUDA_MISSING = cuda_missing()
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(CUDA_MISSING is not None, reason=str(CUDA_MISSING)))


@pytest.fixture(params=["cpu", "cpu-warp32", CUDA])
def dev(request, monkeypatch):
    """llmc.device, switched to each device in turn.

    "cpu" runs the kernels with warps of one thread, as training on the CPU does; "cpu-warp32" runs them with the warps
    of 32 that a GPU has, so that every shuffle takes part; "cuda" is the GPU, skipped where there is none.
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
    seed = np.frombuffer(request.node.nodeid.encode(), dtype=np.uint8)
    return np.random.default_rng(seed)
