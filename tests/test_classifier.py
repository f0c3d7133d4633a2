"""The classifier, whole and by chunks, and classifier.cu, against PyTorch's cross-entropy."""

from kernels.classifier import classifier, fused_classifier
from oracle import (
    BF16,
    KERNEL_FP32,
    assert_close,
    exact,
    guarded,
    kernel_tolerance,
    leaf,
    normal,
    relative_error,
    to_numpy,
)

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

DLOSS = 0.37
FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


def check(dev, logits: np.ndarray, targets: np.ndarray, Vp: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel on logits (B,T,V) in rows of Vp, whose padding holds NaN: compared, and its losses and gradients."""
    B, T, V = logits.shape
    padded = np.full((B, T, Vp), np.nan, dtype=np.float32)
    padded[..., :V] = logits
    with guarded(dev) as memory:
        dlogits, losses = memory.update(padded), memory.write((B, T), FP32)
        fused_classifier(dlogits, losses, DLOSS, memory.read(targets.astype(np.int32)), B, T, V, Vp)
    dlogits, losses = dev.to_host(dlogits), dev.to_host(losses)
    logits64 = leaf(logits)
    want = F.cross_entropy(logits64.flatten(0, 1), leaf(targets).long().flatten(), reduction="none").view(B, T)
    (DLOSS * want.sum()).backward()
    # On the CPU one thread adds up a whole row: the error of such a sum grows with the root of its length.
    tolerance = KERNEL_FP32 * max(1.0, (V / 16384) ** 0.5)
    assert_close("losses", losses, want, tolerance)
    assert_close("dlogits", dlogits[..., :V], logits64.grad, tolerance)
    assert not dlogits[..., V:].any(), "the padding's gradient must be exactly 0"
    return losses, to_numpy(dlogits)


@given(B=st.integers(1, 3), T=st.integers(1, 10), V=st.integers(2, 400), padding=st.integers(0, 2))
@example(B=2, T=8, V=256, padding=0)
@example(B=1, T=5, V=257, padding=0)
@example(B=3, T=3, V=101, padding=1)
@example(B=1, T=2, V=5003, padding=0)  # each thread of the block comes back for more
@example(B=1, T=2, V=120001, padding=0)  # a row is longer than shared memory, in bf16, too
def test_classifier_gives_losses_and_gradients_and_never_sees_the_padding(dev, B, T, V, padding):
    rng = np.random.default_rng([B, T, V])
    check(dev, exact(3 * normal(rng, B, T, V)), rng.integers(0, V, (B, T)), Vp=(-(-V // 128) + padding) * 128)


@pytest.mark.parametrize("V", [4, 61, 1000])
def test_classifier_withstands_extreme_logits(dev, V):
    rng = np.random.default_rng(V)
    logits = rng.choice(np.array([-80, 80, 0, -79.5], dtype=np.float32), (2, 6, V))
    logits[0, 0] = -80
    logits[0, 1] = 80
    logits[1, 0, 1:] = -8192
    check(dev, logits, rng.integers(0, V, (2, 6)), Vp=1024)


def test_a_loss_that_is_not_finite_has_no_gradient(dev):
    """With a target of probability 0 the loss is infinite, but softmax - 1 would be as good a number as any."""
    logits, targets = normal(np.random.default_rng(0), 3, 128), np.array([5, 6, 7], np.int32)
    logits[1, 6] = -np.inf
    dlogits, losses = guarded(dev).update(logits), dev.empty((3,))
    fused_classifier(dlogits, losses, DLOSS, dev.asarray(targets), 3, 1, 100, 128)
    assert np.isinf(dev.to_host(losses)).tolist() == [False, True, False]
    assert np.isnan(to_numpy(dlogits)[:, :100]).any(1).tolist() == [False, True, False]


def test_rows_are_found_beyond_two_to_the_31_elements(dev):
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
    values64 = leaf(values)
    want = F.cross_entropy(values64, leaf(targets[places]).long(), reduction="none")
    (DLOSS * want.sum()).backward()
    dlogits = np.stack([dev.to_host(logits[place]) for place in places])
    assert_close("losses of far rows", dev.to_host(losses)[places], want, KERNEL_FP32)
    assert_close("dlogits of far rows", dlogits[:, :V], values64.grad, KERNEL_FP32)
    others = np.delete(dev.to_host(losses), places)
    assert_close("losses of equal logits", others, np.full(others.shape, np.log(V)), KERNEL_FP32)


B, T, C, V, VP = 3, 11, 20, 101, 128  # 33 positions


class Head:
    """The classifier's inputs. `run` returns its results, on the host, with R rows of logits at a time."""

    def __init__(self, dev):
        self.dev, rng = dev, np.random.default_rng(0)
        self.inp, self.weight = exact(normal(rng, B, T, C) / 2), normal(rng, VP, C)
        self.before = normal(rng, VP, C)
        self.targets = rng.integers(0, V, (B, T), dtype=np.int32)

    def run(self, R: int, dloss: float = DLOSS, accumulate: bool = True) -> tuple:
        with guarded(self.dev) as memory, guarded(self.dev, shift=self.dev.width() // 2) as parameters:
            losses, logits = memory.write((B, T), FP32), memory.scratch((R, VP))
            dinp = memory.write((B, T, C)) if dloss else None
            dweight = parameters.update(self.before, FP32) if accumulate else parameters.write((VP, C), FP32)
            classifier(
                losses, logits, memory.read(self.inp), parameters.read(self.weight), memory.read(self.targets),
                B, T, C, V, dloss=dloss, dinp=dinp, dweight=dweight if dloss else None, accumulate=accumulate,
            )  # fmt: skip
        return losses, dinp, dweight, logits


@pytest.fixture
def head(each_product):
    return Head(each_product)


@pytest.mark.parametrize("R", [1, 2, 8, 11, 16, 32, 33])
def test_by_chunks_the_classifier_gives_losses_and_both_gradients(head, R):
    """In bf16 logits are rounded before the loss, and once more as their gradient: both errors are shares of sums."""
    inp, weight = leaf(head.inp), leaf(head.weight)
    logits = (inp @ weight[:V].T).flatten(0, 1)
    want = F.cross_entropy(logits, leaf(head.targets).long().flatten(), reduction="none").view(B, T)
    (DLOSS * want.sum()).backward()
    losses, dinp, dweight, _ = head.run(R, accumulate=False)
    rows = ("losses", losses, want, 1), ("dinp", dinp, inp.grad, 2), ("dweight", dweight, weight.grad, 2)
    for name, got, wanted, roundings in rows:
        if head.dev.floatX == head.dev.BF16:
            assert relative_error(got, wanted) <= roundings * BF16, name
        else:
            assert_close(name, got, wanted, 3 * kernel_tolerance(head.dev))


def test_the_classifier_adds_to_its_weights_gradient(head):
    _, _, set_, _ = head.run(8, accumulate=False)
    _, _, added, _ = head.run(8, accumulate=True)
    assert_close("dweight", added, to_numpy(set_).astype(float) + head.before, KERNEL_FP32)
    assert (to_numpy(set_)[V:] == 0).all(), "the padding's gradient must be exactly 0"


@pytest.mark.parametrize("R", [8, 33])
def test_without_a_dloss_the_classifier_gives_losses_and_leaves_the_last_chunks_logits(head, R):
    losses, _, dweight, logits = head.run(R, dloss=0.0)
    assert to_numpy(losses).tobytes() == to_numpy(head.run(R)[0]).tobytes()
    assert np.array_equal(to_numpy(dweight), head.before)
    last = (B * T - 1) % R + 1
    want = (leaf(head.inp) @ leaf(head.weight).T).detach().flatten(0, 1)[-last:]
    assert_close("logits", logits[:last], want, kernel_tolerance(head.dev))
