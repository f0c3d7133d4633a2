"""mlp_hopper.cu against the product and the kernel in whose place it comes, to the last bit."""

import device
from conftest import DEVICES, switch_device
from kernels import mlp_hopper
from kernels.gelu import gelu_forward, matmul_gelu_forward
from kernels.matmul import matmul_forward
from kernels.mlp_hopper import matmul_gelu_forward_wgmma
from oracle import normal
from support.kernels import launch, parameter, shapes, write

import numpy as np
import pytest

# Of two blocks: a tile with one stage; several tiles whose last rows and columns lie outside; many turns.
any_shape = shapes((1, 1, 1), (129, 25, 33), (389, 75, 9), N=(1, 300), wide=(1, 60), narrow=(1, 20))


@pytest.fixture(params=[kind for kind in DEVICES if kind != "cpu"], autouse=True)
def on_device(request, monkeypatch):
    """On a CPU all kernels have warps of 32: then no compiler changes how they round."""
    switch_device(request.param, monkeypatch)
    device.use_precision("bf16")
    if why := device.why_not_kernels(mlp_hopper.cu.path):
        pytest.skip(why)
    if device.kind == "cpu":
        monkeypatch.setattr(device.current.device, "multiprocessors", 2)


def whole(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers with few bits: their products' sums are exact, in whatever order they are added up."""
    return rng.integers(-4, 5, shape).astype(np.float32) / 8


def bits(arrays) -> list[bytes]:
    return [device.to_host(array).tobytes() for array in arrays]


@any_shape
def test_gelu_behind_a_product_has_the_bits_of_the_two_kernels(N, wide, narrow):
    OC, C = 8 * wide, 8 * narrow
    rng = np.random.default_rng([N, OC, C])
    inp, weight, bias = whole(rng, N, C), whole(rng, OC, C), normal(rng, OC)
    fused = launch(
        matmul_gelu_forward_wgmma, write(N, OC), write(N, OC), inp, parameter(weight), parameter(bias), N, C, OC
    )
    (fch,) = launch(matmul_forward, write(N, OC), inp, parameter(weight), None, 1, N, C, OC)
    (out,) = launch(gelu_forward, write(N, OC), device.to_floats(fch), parameter(bias), N, OC)
    assert bits(fused) == bits([out, fch])


def test_composites_take_these_kernels_where_there_are_rows_enough(monkeypatch):
    seen = []
    monkeypatch.setattr(mlp_hopper, "has_wgmma", lambda: True)
    monkeypatch.setattr(mlp_hopper, "launch", lambda name, *arguments, **given: seen.append(name))
    monkeypatch.setattr(device.current.device, "multiprocessors", 2)
    for N, C, OC, there in (385, 72, 192, True), (384, 72, 192, False), (385, 72, 190, False), (385, 71, 192, False):
        seen.clear()
        a = {name: device.zeros(shape, device.floatX) for name, shape in {
            "inp": (N, C), "weight": (OC, C), "bias": (OC,), "out": (N, OC), "fch": (N, OC),
        }.items()}  # fmt: skip
        matmul_gelu_forward(a["out"], a["fch"], a["inp"], a["weight"], a["bias"], 1, N, C, OC)
        assert seen == ["matmul_gelu_forward"] * there
        matmul_gelu_forward(a["out"], a["fch"], a["inp"], a["weight"], a["bias"], 1, N, C, OC, erf=True)
        matmul_gelu_forward(a["out"], a["fch"], a["inp"], a["weight"], None, 1, N, C, OC)
        assert seen == ["matmul_gelu_forward"] * there
