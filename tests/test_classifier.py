"""The classifier, whole and by chunks, and classifier.cu, against PyTorch's cross-entropy."""

from types import SimpleNamespace

import device
from kernels.classifier import classifier, fused_classifier
from oracle import BF16, KERNEL_FP32, assert_close, exact, guarded, kernel_tolerance, leaf, normal, to_numpy
from oracle import relative_error as error_of
from support.kernels import FP32, Place, autograd, gradient, launch, parameter, scratch, shapes, update, write

import numpy as np
import pytest
import torch
import torch.nn.functional as F

DLOSS = 0.37
on_each_type = pytest.mark.usefixtures("each_type")


def cross_entropy(logits, targets: np.ndarray) -> torch.Tensor:
    """The losses, in the targets' shape, of logits with one axis more."""
    return F.cross_entropy(logits.flatten(0, -2), leaf(targets).long().flatten(), reduction="none").view(targets.shape)


def check(logits: np.ndarray, targets: np.ndarray, Vp: int) -> None:
    """The kernel on logits (B,T,V) in rows of Vp, whose padding holds NaN."""
    B, T, V = logits.shape
    padded = np.full((B, T, Vp), np.nan, FP32)
    padded[..., :V] = logits
    args = update(padded), write(B, T, dtype=FP32), DLOSS, targets.astype(np.int32), B, T, V, Vp
    dlogits, losses = launch(fused_classifier, *args)
    want, dlogits64 = autograd(lambda logits: cross_entropy(logits, targets), np.full((B, T), DLOSS), logits)
    # On the CPU one thread adds up a whole row: the error of such a sum grows with the root of its length.
    tolerance = KERNEL_FP32 * max(1.0, (V / 16384) ** 0.5)
    assert_close("losses", losses, want, tolerance)
    assert_close("dlogits", dlogits[..., :V], dlogits64, tolerance)
    assert not to_numpy(dlogits)[..., V:].any(), "the padding's gradient must be exactly 0"


@on_each_type
@shapes(
    (2, 8, 256, 0), (1, 5, 257, 0), (3, 3, 101, 1),
    (1, 2, 5003, 0),  # each thread of the block comes back for more
    (1, 2, 120001, 0),  # a row is longer than shared memory, in bf16, too
    B=(1, 3), T=(1, 10), V=(2, 400), padding=(0, 2),
)  # fmt: skip
def test_classifier_gives_losses_and_gradients_and_never_sees_the_padding(B, T, V, padding):
    rng = np.random.default_rng([B, T, V])
    check(exact(3 * normal(rng, B, T, V)), rng.integers(0, V, (B, T)), Vp=(-(-V // 128) + padding) * 128)


@on_each_type
@pytest.mark.parametrize("V", [4, 61, 1000])
def test_classifier_withstands_extreme_logits(V):
    rng = np.random.default_rng(V)
    logits = rng.choice(np.array([-80, 80, 0, -79.5], dtype=np.float32), (2, 6, V))
    logits[0, 0] = -80
    logits[0, 1] = 80
    logits[1, 0, 1:] = -8192
    check(logits, rng.integers(0, V, (2, 6)), Vp=1024)


def test_a_loss_that_is_not_finite_has_no_gradient(each_type):
    """With a target of probability 0 the loss is infinite, but softmax - 1 would be as good a number as any."""
    logits, targets = normal(np.random.default_rng(0), 3, 128), np.array([5, 6, 7], np.int32)
    logits[1, 6] = -np.inf
    dlogits, losses = guarded(device).update(logits), device.empty((3,))
    fused_classifier(dlogits, losses, DLOSS, device.asarray(targets), 3, 1, 100, 128)
    assert np.isinf(device.to_host(losses)).tolist() == [False, True, False]
    assert np.isnan(to_numpy(dlogits)[:, :100]).any(1).tolist() == [False, True, False]


@on_each_type
def test_a_target_that_is_not_learned_has_no_loss_and_no_gradient():
    rng = np.random.default_rng(3)
    logits, targets = exact(3 * normal(rng, 4, 5, 256)), rng.integers(0, 200, (4, 5), dtype=np.int32)
    marked = np.where(rng.integers(0, 2, (4, 5)) == 1, targets, -1).astype(np.int32)
    spoilt = np.where((marked < 0)[..., None], np.float32(np.nan), logits)
    whole, losses = launch(fused_classifier, update(logits), write(4, 5, dtype=FP32), DLOSS, targets, 4, 5, 200, 256)
    args = update(spoilt), write(4, 5, dtype=FP32), DLOSS, marked, 4, 5, 200, 256
    found, found_losses = launch(fused_classifier, *args)
    for got, want in (found, whole), (found_losses, losses):
        got, want = to_numpy(got), to_numpy(want)
        assert got[marked >= 0].tobytes() == want[marked >= 0].tobytes() and not got[marked < 0].any()


@on_each_type
def test_dloss_on_the_device_gives_the_same_bits():
    rng = np.random.default_rng(4)
    logits, targets = exact(normal(rng, 3, 5, 256)), rng.integers(0, 250, (3, 5), dtype=np.int32)
    found = []
    for dloss in DLOSS, Place("read", np.array([DLOSS], np.float32), FP32):
        args = update(logits), write(3, 5, dtype=FP32), dloss, targets, 3, 5, 250, 256
        found.append([to_numpy(each).tobytes() for each in launch(fused_classifier, *args)])
    assert found[0] == found[1]


def test_rows_are_found_beyond_two_to_the_31_elements(each_type):
    dev = each_type
    rows, V, Vp = 43000, 50257, 50304  # row 42691 is the first that lies beyond
    if dev.kind != "cuda" or dev.memory()[0] < 4.2 * rows * Vp:
        pytest.skip("needs 9 GB of GPU memory")
    logits, losses = dev.zeros((rows, Vp), dev.floatX), dev.empty((rows,))
    rng = np.random.default_rng(0)
    places = [0, 1, 42690, 42691, rows - 1]
    values, targets = normal(rng, len(places), V), rng.integers(0, V, rows, dtype=np.int32)
    for place, row in zip(places, values, strict=True):
        dev.copy(logits[place], guarded(dev).read(row))
    dev.synchronize()
    fused_classifier(logits, losses, DLOSS, dev.asarray(targets), rows, 1, V, Vp)
    dlosses = np.full(len(places), DLOSS)
    want, dvalues64 = autograd(lambda logits: cross_entropy(logits, targets[places]), dlosses, values)
    dlogits = np.stack([dev.to_host(logits[place]) for place in places])
    assert_close("losses of far rows", dev.to_host(losses)[places], want, KERNEL_FP32)
    assert_close("dlogits of far rows", dlogits[:, :V], dvalues64, KERNEL_FP32)
    others = np.delete(dev.to_host(losses), places)
    assert_close("losses of equal logits", others, np.full(others.shape, np.log(V)), KERNEL_FP32)


B, T, C, V, VP = 3, 11, 20, 101, 128  # 33 positions


@pytest.fixture
def head(each_product):
    rng = np.random.default_rng(0)
    return SimpleNamespace(
        inp=exact(normal(rng, B, T, C) / 2), weight=normal(rng, VP, C), before=normal(rng, VP, C),
        targets=rng.integers(0, V, (B, T), dtype=np.int32),
    )  # fmt: skip


def run(head, R: int, accumulate: bool = True) -> list:
    """Losses, logits, dinp and dweight, with R rows of logits at a time."""
    dweight = gradient(head.before) if accumulate else Place("write", (VP, C), FP32, parameter=True)
    return launch(
        classifier, write(B, T, dtype=FP32), scratch(R, VP), head.inp, parameter(head.weight), head.targets, B, T, C, V,
        dloss=DLOSS, dinp=write(B, T, C), dweight=dweight, accumulate=accumulate, shift=device.width() // 2,
    )  # fmt: skip


@pytest.mark.parametrize("R", [1, 2, 8, 11, 16, 32, 33])
def test_by_chunks_the_classifier_gives_losses_and_both_gradients(head, R):
    """In bf16 logits are rounded before the loss, and once more as their gradient: both errors are shares of sums."""
    losses, _, dinp, dweight = run(head, R, accumulate=False)
    want, *gradients = autograd(
        lambda inp, weight: cross_entropy(inp @ weight[:V].T, head.targets),
        np.full((B, T), DLOSS),
        head.inp,
        head.weight,
    )
    found = zip(("losses", "dinp", "dweight"), (losses, dinp, dweight), (want, *gradients), (1, 2, 2), strict=True)
    for name, got, wanted, roundings in found:
        if device.floatX == device.BF16:
            assert error_of(got, wanted) <= roundings * BF16, name
        else:
            assert_close(name, got, wanted, 3 * kernel_tolerance(device))


def test_the_classifier_adds_to_its_weights_gradient(head):
    *_, set_ = run(head, 8, accumulate=False)
    *_, added = run(head, 8)
    assert_close("dweight", added, to_numpy(set_).astype(float) + head.before, KERNEL_FP32)
    assert (to_numpy(set_)[V:] == 0).all(), "the padding's gradient must be exactly 0"


@pytest.mark.parametrize("R", [8, 33])
def test_without_a_dloss_the_classifier_gives_losses_and_leaves_the_last_chunks_logits(head, R):
    args = write(B, T, dtype=FP32), scratch(R, VP), head.inp, parameter(head.weight), head.targets, B, T, C, V
    losses, logits = launch(classifier, *args, shift=device.width() // 2)
    assert to_numpy(losses).tobytes() == to_numpy(run(head, R)[0]).tobytes()
    last = (B * T - 1) % R + 1
    want = (leaf(head.inp) @ leaf(head.weight).T).detach().flatten(0, 1)[-last:]
    assert_close("logits", logits[:last], want, kernel_tolerance(device))
