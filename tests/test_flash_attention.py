"""Flash attention against softmax attention in float64."""

import itertools
from types import SimpleNamespace

import device
from conftest import DEVICES, switch_device
from device.errors import UserError
from kernels import flash_attention
from kernels.flash_attention import flash_attention_backward, flash_attention_forward
from oracle import BF16, KERNEL_FP32, KERNEL_TF32, assert_close, attention, exact, normal, to_numpy
from support.kernels import FP32, autograd, fp32, launch, scratch, write

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

on_each_device = pytest.mark.usefixtures("dev")
ON = [f"{kind}{kernels}" for kind in ("cpu", "cuda") if kind in DEVICES for kernels in ("", "-bf16", "-bf16-wgmma")]


@pytest.fixture(params=ON)
def dev(request, monkeypatch):
    """The device, in TF32, in bf16, and in bf16 with Hopper's matrix product. These kernels have warps of 32 wherever
    they run."""
    switch_device(request.param, monkeypatch)
    wgmma = "wgmma" in request.param
    if wgmma and device.kind == "cuda" and not flash_attention.has_wgmma():
        pytest.skip(device.why_not_kernels(flash_attention.hopper.path))
    monkeypatch.setattr(flash_attention, "has_wgmma", lambda: wgmma)
    yield device
    device.synchronize()


def run(qkv: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """out (B,T,NH,HS), lse (B,NH,T) and dqkv, from qkv (B,T,NH+2*NKV,HS), by the kernels."""
    B, T, NH, HS = dout.shape
    sizes = B, T, NH, (qkv.shape[2] - NH) // 2, HS
    outputs = write(*dout.shape), write(B, NH, T, dtype=FP32)
    out, lse = map(to_numpy, launch(flash_attention_forward, *outputs, qkv, *sizes))
    (dqkv,) = launch(flash_attention_backward, write(*qkv.shape), dout, out, fp32(lse), qkv, *sizes)
    return out, lse, to_numpy(dqkv)


def make_inputs(rng, B: int, T: int, NH: int, NKV: int, HS: int) -> tuple[np.ndarray, np.ndarray]:
    """qkv (B,T,NH+2*NKV,HS) and dout (B,T,NH,HS)."""
    return normal(rng, B, T, NH + 2 * NKV, HS), normal(rng, B, T, NH, HS)


def reference(qkv: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same from PyTorch in float64."""
    B, T, NH, HS = dout.shape
    NKV = (qkv.shape[2] - NH) // 2
    out, dqkv = autograd(lambda qkv: attention(qkv.flatten(2), NH, "softmax", NKV).view(dout.shape), dout, qkv)
    q, k, _ = torch.from_numpy(qkv.astype(np.float64)).transpose(1, 2).split((NH, NKV, NKV), dim=1)
    scores = q @ k.repeat_interleave(NH // NKV, dim=1).transpose(-2, -1) / HS**0.5
    lse = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).logsumexp(-1)
    return out.numpy(), lse.numpy(), dqkv.numpy()


# How many roundings to bf16 lie on the way to a tensor. out: of p and of out. dv: of p and of dv. dq and dk: of out,
# from which D comes, of ds, and of the result.
ROUNDINGS = {"out": 2, "lse": 0, "dq": 3, "dk": 3, "dv": 2}


def tolerance(name: str) -> float:
    """How large |got - want| / |want| may be. A rounding to bf16 changes a number by a share of at most BF16. The
    changes of a sum's terms are as random as the terms, so they add up as those do, to the same share of the sum.
    Roundings do not depend on each other: the square of their error is the sum of their squares. Nothing on the way to
    lse is rounded, and the products are exact in fp32."""
    if device.floatX != device.BF16:
        return KERNEL_TF32
    return max(KERNEL_FP32, ROUNDINGS[name] ** 0.5 * BF16)


def gradients(dqkv: np.ndarray, NH: int) -> dict[str, np.ndarray]:
    """dq, dk and dv, of NH heads of queries."""
    NKV = (dqkv.shape[2] - NH) // 2
    return dict(zip(("dq", "dk", "dv"), np.split(dqkv, [NH, NH + NKV], axis=2), strict=True))


def check(got: tuple, want: tuple) -> None:
    assert_close("out", got[0], want[0], tolerance("out"))
    # Backward uses lse as the logarithm that it is: its absolute error is the relative one of all probabilities.
    assert_close("exp(lse), relative", np.exp(got[1] - want[1]), np.ones_like(want[1]), tolerance("lse"))
    ours, theirs = (gradients(dqkv, got[0].shape[2]) for dqkv in (got[2], want[2]))
    for name in ours:
        assert_close(name, ours[name], theirs[name], tolerance(name))


# From eight positions on: with fewer, dq and dk are differences of nearly equal numbers, and relative errors are large.
@on_each_device
@settings(max_examples=5)
@given(
    B=st.integers(1, 2), T=st.integers(8, 150), group=st.integers(1, 3), NKV=st.integers(1, 2),
    HS=st.sampled_from((64, 128)), min_blocks=st.sampled_from((1, 1000)),
)  # fmt: skip
@example(B=1, T=1, group=1, NKV=1, HS=64, min_blocks=1)
@example(B=1, T=256, group=1, NKV=1, HS=64, min_blocks=1)  # whole tiles
@example(B=1, T=300, group=1, NKV=1, HS=64, min_blocks=1)
@example(B=3, T=13, group=1, NKV=1, HS=128, min_blocks=1)  # less than a tile
@example(B=1, T=140, group=6, NKV=1, HS=64, min_blocks=1000)
@example(B=1, T=200, group=3, NKV=2, HS=128, min_blocks=1)  # a block of backward_key takes three query heads
def test_flash_attention_matches_softmax_attention_in_float64(B, T, group, NKV, HS, min_blocks):
    qkv, dout = make_inputs(np.random.default_rng([B, T, group, NKV, HS]), B, T, group * NKV, NKV, HS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "min_blocks", lambda: min_blocks)
        check(run(qkv, dout), reference(qkv, dout))


@on_each_device
@pytest.mark.parametrize("shape", [(1, 35, 9, 3, 64), (1, 67, 4, 1, 64), (2, 20, 4, 2, 128)], ids=str)
def test_gradients_of_shared_keys_and_values_are_the_sum_over_their_query_heads(rng, launches, shape):
    B, T, NH, NKV, HS = shape
    group = NH // NKV
    qkv, dout = make_inputs(rng, *shape)
    q, k, v = np.split(qkv, [NH, NH + NKV], axis=2)
    repeated = np.concatenate([q, k.repeat(group, axis=2), v.repeat(group, axis=2)], axis=2)
    out, lse, dqkv = run(qkv, dout)
    (dkv_heads,) = (to_numpy(found["dkv_heads"]) for name, found in launches.items() if "group_sum" in name)
    want_out, want_lse, want = run(repeated, dout)
    # A head computes the same whether its keys are shared or not, and shares are added in order: no bit may differ.
    shares = dkv_heads.reshape(B, T, 2 * NKV, group, HS)
    total = shares[:, :, :, 0].copy()
    for h in range(1, group):
        total += shares[:, :, :, h]
    assert (out == want_out).all() and (lse == want_lse).all()
    assert (dqkv[:, :, :NH] == want[:, :, :NH]).all()
    assert (exact(dkv_heads).reshape(B, T, 2 * NH, HS) == want[:, :, NH:]).all()
    assert (dqkv[:, :, NH:] == exact(total)).all()


@on_each_device
def test_scores_that_grow_and_shrink_by_hundreds_keep_their_precision(rng):
    # Along a row the largest score so far rises, from either end, by far more than exp can hold in a float. All factors
    # of the scores are exact in TF32 and bf16, so that only the sums' order of magnitude is on trial.
    T, HS = 200, 64
    qkv = normal(rng, 1, T, 3, 2, HS)  # q, k, v of two heads
    qkv[:, :, :2] = 0.0
    qkv[:, :, 0, :, 0] = 8.0
    height = 8.0 * (np.arange(T) // 8)
    qkv[0, :, 1, 0, 0] = 8.0 * height
    qkv[0, :, 1, 1, 0] = -8.0 * height
    qkv = qkv.reshape(1, T, 6, HS)
    dout = normal(rng, 1, T, 2, HS)
    got, want = run(qkv, dout), reference(qkv, dout)
    assert_close("out", got[0], want[0], tolerance("out"))
    assert_close("lse", got[1], want[1], 1e-6)
    assert_close("dv", got[2][:, :, 4:], want[2][:, :, 4:], tolerance("dv"))


@on_each_device
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1, 71, 2, 1, 64), (1, 37, 1, 1, 128)], ids=str)
def test_what_is_not_finite_is_handed_on(rng, monkeypatch, shape, value):
    # In TF32, tests/test_nonfinite.py says more.
    B, T, NH, NKV, HS = shape
    for spoiled, min_blocks in itertools.product((0, 1), (1, 1000)):
        monkeypatch.setattr(flash_attention, "min_blocks", lambda blocks=min_blocks: blocks)
        inputs = make_inputs(rng, *shape)
        inputs[spoiled].reshape(-1)[rng.integers(inputs[spoiled].size)] = value
        outputs = [scratch(*inputs[1].shape), scratch(B, NH, T, dtype=FP32)]
        got = [to_numpy(array) for array in launch(flash_attention_forward, *outputs, inputs[0], *shape)]
        gradients_from = inputs[1], got[0], fp32(got[1]), inputs[0]
        got += map(to_numpy, launch(flash_attention_backward, scratch(*inputs[0].shape), *gradients_from, *shape))
        want = reference(*inputs)
        ours, theirs = ({"out": out, "lse": lse, **gradients(dqkv, NH)} for out, lse, dqkv in (got, want))
        for name in ours:
            assert np.isfinite(theirs[name]).all() or not np.isfinite(ours[name]).all(), name


@pytest.mark.parametrize("B, NKV", [(911, 12), (1639, 4)])
def test_offsets_past_two_to_the_31_elements(dev, monkeypatch, B, NKV):
    monkeypatch.setattr(flash_attention, "min_blocks", lambda: 1)  # so that one sequence is computed as many are
    if dev.kind != "cuda" or dev.memory()[0] < 60 << 30:
        pytest.skip("needs a GPU with 60 GiB free")
    # B * T * (NH + 2 NKV) * HS is 2^31 and a bit; the last batch row must come out as it does alone.
    T, NH, HS = 1024, 12, 64
    heads = NH + 2 * NKV
    alone, dout_alone = make_inputs(np.random.default_rng(0), 1, T, NH, NKV, HS)
    want = run(alone, dout_alone)
    qkv, dqkv = (dev.zeros((B, T, heads, HS), dev.floatX) for _ in range(2))
    out, dout = (dev.zeros((B, T, NH, HS), dev.floatX) for _ in range(2))
    lse = dev.zeros((B, NH, T))
    for array, values in (qkv, alone), (dout, dout_alone):
        dev.copy_in(array[-1:], dev.to_floatX(values))
    flash_attention_forward(out, lse, qkv, B, T, NH, NKV, HS)
    flash_attention_backward(dqkv, dout, out, lse, qkv, B, T, NH, NKV, HS)
    for got, expected in zip((out, lse, dqkv), want, strict=True):
        assert (to_numpy(got[-1:]) == expected).all()


def test_wgmma_is_taken_where_the_gpu_and_the_precision_have_it(monkeypatch):
    gpu = object.__new__(device.CudaDevice)
    monkeypatch.setattr(device.current, "device", gpu)
    for gpu.compute_capability, gpu.floatX, gpu.name in (
        (90, device.BF16, "NVIDIA H200"), (90, np.dtype(FP32), "NVIDIA H200"), (100, device.BF16, "NVIDIA B200"),
        (80, device.BF16, "NVIDIA A100"),
    ):  # fmt: skip
        assert flash_attention.has_wgmma() == (gpu.compute_capability == 90 and gpu.floatX == device.BF16)
    message = "flash_attention_hopper.cu is for GPUs of compute capability 9.0, which NVIDIA A100 is not"
    assert device.why_not_kernels(flash_attention.hopper.path) == message
    assert not device.why_not_kernels(flash_attention.cu.path)
    device.use("cpu")
    device.use_precision("bf16")
    assert not flash_attention.has_wgmma()


# Multiprocessors and bytes of L2; then from how many blocks on backward_key takes whole groups of heads, and how many
# heads have their keys and values, 256 KiB, in L2 at a time.
HOPPERS = {
    "H100 SXM and H200": (132, 50 << 20, 264, 128),
    "H100 PCIe": (114, 50 << 20, 228, 128),
    "GH200": (132, 60 << 20, 264, 153),
    "half of an H100": (60, 25 << 20, 120, 64),
}


@pytest.mark.parametrize("name", HOPPERS)
def test_the_schedule_follows_the_gpus_multiprocessors_and_l2(name, monkeypatch):
    multiprocessors, l2_bytes, blocks, heads_in_l2 = HOPPERS[name]
    device.use("cpu")
    device.use_precision("bf16")
    for attribute, value in ("multiprocessors", multiprocessors), ("l2_bytes", l2_bytes):
        monkeypatch.setattr(device.current.device, attribute, value)
    T, NH, NKV, HS, launches = 1024, 4, 2, 64, {}

    def launch(name: str, grid: tuple, block: tuple, arguments: tuple, shared_mem: int) -> None:
        launches[name] = grid, arguments[-1]  # the last argument is the group

    monkeypatch.setattr(flash_attention, "has_wgmma", lambda: True)
    monkeypatch.setattr(flash_attention.hopper, "launch", launch)
    monkeypatch.setattr(flash_attention.cu, "launch", lambda *arguments: None)
    tiles = T // 128  # blocks of backward_key for each head of keys
    few, enough = (blocks - 1) // (NKV * tiles), -(-blocks // (NKV * tiles))
    for B in few, enough:
        q, kv = (np.zeros((B, T, heads, HS), np.uint16) for heads in (NH, NH + 2 * NKV))
        flash_attention_backward(kv, q, q, np.zeros((B, NH, T), FP32), kv, B, T, NH, NKV, HS)
        grid, group = launches["flash_attention_backward_key_wgmma_kernel_64"]
        whole_groups = B == enough
        assert grid == (B * (NKV if whole_groups else NH) * tiles,)
        assert group == heads_in_l2 * (1 if whole_groups else NH // NKV)
        assert launches["flash_attention_backward_query_wgmma_kernel_64"][1] == heads_in_l2 * NH // NKV
        assert ("dkv_heads" in flash_attention.scratch_of_flash(B, T, NH, NKV, HS)) != whole_groups


def test_observers_see_the_array_behind_a_tensor_map(launches):
    device.use("cpu")
    device.use_precision("bf16")
    qkv, out = device.zeros((1, 3, 3, 64), device.BF16), device.zeros((1, 3, 1, 64), device.BF16)
    flash_attention_forward(out, device.zeros((1, 1, 3)), qkv, 1, 3, 1, 1, 64, wgmma=True)
    ((name, arguments),) = ((name, arguments) for name, arguments in launches.items() if "qkv" in arguments)
    assert arguments["qkv"] is qkv and device.accesses(name, arguments)["qkv"] == "reads"


def test_a_tensor_map_on_cuda_has_the_fastest_axis_first(monkeypatch):
    calls = []
    monkeypatch.setattr("device.cuda.call_driver", lambda *arguments: calls.append(arguments))
    array = SimpleNamespace(data=SimpleNamespace(ptr=4096))
    made = device.CudaDevice.tensor_map(None, array, (2, 100, 192), (1, 64, 64))
    ((name, at, kind, rank, address, sizes, strides, box, steps, *_),) = calls
    assert (name, kind, rank, address.value) == ("cuTensorMapEncodeTiled", 9, 3, 4096)
    assert (*sizes,) == (192, 100, 2) and (*strides,) == (384, 38400)
    assert (*box,) == (64, 64, 1) and (*steps,) == (1, 1, 1)
    assert at.value == made.ctypes.data and at.value % 64 == 0 and made.nbytes == 128 and made.array is array


@pytest.mark.parametrize("HS, NH", [(96, 1), (32, 24), (33, 3), (256, 4)])
def test_other_head_sizes_are_refused(dev, HS, NH):
    x = dev.zeros((1, 1, 3 * NH, HS))
    with pytest.raises(UserError, match="-a softmax"):
        flash_attention_forward(dev.zeros((1, 1, NH, HS)), dev.zeros((1, NH, 1)), x, 1, 1, NH, NH, HS)
    with pytest.raises(UserError, match="-a softmax"):
        flash_attention_backward(x, x, x, x, x, 1, 1, NH, NH, HS)
