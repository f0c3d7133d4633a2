"""mlp_hopper.cu against the product and the kernel in whose place it comes, to the last bit."""

import device
from conftest import DEVICES, switch_device
from kernels import mlp_hopper
from kernels.gelu import gelu_backward, gelu_forward, matmul_gelu_backward, matmul_gelu_forward
from kernels.matmul import matmul_backward_inp, matmul_forward
from kernels.mlp_hopper import (
    matmul_gelu_backward_wgmma,
    matmul_gelu_forward_wgmma,
    matmul_swiglu_backward_wgmma,
    matmul_swiglu_forward_wgmma,
)
from kernels.swiglu import matmul_swiglu_backward, matmul_swiglu_forward, swiglu_backward, swiglu_forward
from oracle import KERNEL_FP32, assert_close, exact, leaf, normal
from support.kernels import gradient, launch, parameter, shapes, update, write

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


@any_shape
def test_gelus_backward_pass_behind_a_product_has_the_bits_of_the_two_kernels(N, wide, narrow):
    """But for the bias' gradient, which is added up in another order."""
    C, OC = 8 * wide, 8 * narrow
    rng = np.random.default_rng([N, OC, C])
    dout, weight, bias, dbias = whole(rng, N, OC), parameter(whole(rng, OC, C)), normal(rng, C), normal(rng, C)
    fch = exact(2 * normal(rng, N, C))
    dfch, dbias1, again = launch(
        matmul_gelu_backward_wgmma, write(N, C), gradient(dbias), write(N, C), dout, weight, fch, parameter(bias),
        N, C, OC,
    )  # fmt: skip
    (dgelu,) = launch(matmul_backward_inp, write(N, C), dout, weight, 1, N, C, OC)
    place = update(device.to_floats(dgelu))
    want, dbias2, out = launch(
        gelu_backward, place, gradient(dbias), write(N, C), place, fch, parameter(bias), N, C
    )
    assert bits([dfch, again]) == bits([want, out])
    size = leaf(want).abs().sum(0) + leaf(dbias).abs()
    assert_close("dbias", leaf(dbias1) + size, leaf(dbias2) + size, KERNEL_FP32)


@any_shape
def test_swiglu_behind_a_product_has_the_bits_of_the_two_kernels(N, wide, narrow):
    H, C = 8 * wide, 8 * narrow
    rng = np.random.default_rng([N, H, C])
    inp, weight = whole(rng, N, C), parameter(whole(rng, 2 * H, C))
    fused = launch(matmul_swiglu_forward_wgmma, write(N, H), write(N, 2 * H), inp, weight, N, C, H)
    (fch,) = launch(matmul_forward, write(N, 2 * H), inp, weight, None, 1, N, C, 2 * H)
    (out,) = launch(swiglu_forward, write(N, H), device.to_floats(fch), N, H)
    assert bits(fused) == bits([out, fch])


@shapes((1, 1, 1), (129, 5, 33), (389, 10, 9), N=(1, 300), wide=(1, 8), narrow=(1, 20))
def test_swiglus_backward_pass_behind_a_product_has_the_bits_of_the_two_kernels(N, wide, narrow):
    H, C = 64 * wide, 8 * narrow
    rng = np.random.default_rng([N, H, C])
    dout, weight, fch = whole(rng, N, C), parameter(whole(rng, C, H)), exact(2 * normal(rng, N, 2 * H))
    fused = launch(matmul_swiglu_backward_wgmma, write(N, 2 * H), write(N, H), dout, weight, fch, N, H, C)
    (dswiglu,) = launch(matmul_backward_inp, write(N, H), dout, weight, 1, N, H, C)
    two = launch(swiglu_backward, write(N, 2 * H), write(N, H), device.to_floats(dswiglu), fch, N, H)
    assert bits(fused) == bits(two)


def test_composites_take_these_kernels_where_there_are_rows_enough(monkeypatch):
    seen = []
    monkeypatch.setattr(mlp_hopper, "has_wgmma", lambda: True)
    monkeypatch.setattr(mlp_hopper, "launch", lambda name, *arguments, **given: seen.append(name))
    monkeypatch.setattr(mlp_hopper, "add_partials", lambda *arguments: None)
    monkeypatch.setattr(device.current.device, "multiprocessors", 2)
    for N, C, OC, there in (385, 72, 192, True), (384, 72, 192, False), (385, 72, 190, False), (385, 71, 192, False):
        seen.clear()
        a = {name: device.zeros(shape, device.floatX) for name, shape in {
            "inp": (N, C), "weight": (OC, C), "bias": (OC,), "out": (N, OC), "fch": (N, OC), "dout": (N, C),
            "back": (C, OC), "up_gate": (N, 2 * OC), "dfch": (N, 2 * OC),
        }.items()}  # fmt: skip
        matmul_gelu_forward(a["out"], a["fch"], a["inp"], a["weight"], a["bias"], 1, N, C, OC)
        matmul_gelu_backward(
            a["fch"], None, a["out"], a["fch"], a["dout"], a["back"], a["fch"], a["bias"], 1, N, OC, C
        )
        matmul_swiglu_forward(a["out"].reshape(2, -1)[0], a["out"], a["inp"], a["weight"], 1, N, C, OC // 2)
        matmul_swiglu_backward(a["dfch"], a["out"], a["fch"], a["dout"], a["back"], a["up_gate"], 1, N, OC, C)
        assert seen == there * [
            "matmul_gelu_forward", "matmul_gelu_backward", "matmul_swiglu_forward", "matmul_swiglu_backward",
        ]  # fmt: skip
        matmul_gelu_forward(a["out"], a["fch"], a["inp"], a["weight"], a["bias"], 1, N, C, OC, erf=True)
        matmul_gelu_forward(a["out"], a["fch"], a["inp"], a["weight"], None, 1, N, C, OC)
        assert len(seen) == 4 * there
