"""parallel_residual.cu against autograd through its definition: both norms, one output and two, dropout and none."""

import itertools

from draws import factors, words
from kernels.dropout import Dropout
from kernels.norm import recompute_norm
from kernels.parallel_residual import parallel_residual_backward, parallel_residual_forward
from kernels.reduce import MAX_PARTIALS
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, normal, to_numpy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

EPS = 1e-5
FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


# The norm, whether both branches read the same output ("tied"), and the rates at which each branch is dropped.
VARIANTS = itertools.product(("layernorm", "rmsnorm"), ("tied", "untied"), ("0,0", ".3,.3", ".5,0"))
ORDINARY = 1, 3, 5, 6, 8, 10  # have each pair
each_variant = pytest.mark.parametrize("variant", [
    pytest.param(" ".join(words), marks=[] if i in ORDINARY else pytest.mark.long) for i, words in enumerate(VARIANTS)
])  # fmt: skip

# A parameter stands anywhere in its buffer, so it need not begin at 16 bytes even where C is a multiple of 8. Rows of
# two or three numbers may be nearly constant: a norm then magnifies the rounding of its input without bound.
any_shape = given(B=st.integers(1, 4), T=st.integers(1, 30), C=st.integers(5, 150), shift=st.integers(0, 3))


def examples(test):
    for B, T, C, shift in [(2, 8, 64, 0), (1, 5, 7, 1), (3, 43, 130, 2), (1, 9, 768, 0), (1, 3, 2050, 3)]:
        test = example(B=B, T=T, C=C, shift=shift)(test)
    return test


class Case:
    """A variant's inputs, with the dropouts' words in `memory`, and its definition in float64."""

    def __init__(self, memory, variant: str, B: int, T: int, C: int, branches: int = 2):
        norm, outputs, rates = variant.split()
        self.shape, self.centred, self.outputs = (B, T, C), norm == "layernorm", 2 if outputs == "untied" else 1
        self.rng = rng = np.random.default_rng([B, T, C])
        x = 2 * normal(rng, B, T, C) + 1
        self.inp = exact(x + np.copysign(FP32(0.5), x))
        self.projs = [normal(rng, B, T, C) / 4 for _ in range(branches)]
        self.biases = [np.zeros(C, FP32) for _ in range(branches)]  # which the products have added
        self.weights = [normal(rng, C) for _ in range(self.outputs)]
        self.shifts = [normal(rng, C) if self.centred else None for _ in range(self.outputs)]
        self.dropouts = [
            Dropout(memory.read(words(float(rate))), site) if float(rate) and site <= branches else None
            for site, rate in enumerate(rates.split(","), start=1)
        ]
        self.factors = [factors(dropout, B, T, C) for dropout in self.dropouts]

    def define(self, stored: np.ndarray | None = None) -> None:
        """Sets leaves and, from them, x, the norm's input, as it is before it is stored, and `stored`, by default x in
        the device's type; from that its mean and rstd, and the outputs."""
        self.leaves = {"inp": leaf(self.inp)}
        for name in "projs", "biases", "weights", "shifts":
            self.leaves[name] = [None if values is None else leaf(values) for values in getattr(self, name)]
        x = self.leaves["inp"]
        for proj, bias, factor in zip(self.leaves["projs"], self.leaves["biases"], self.factors, strict=False):
            x = x + (proj + bias) * factor
        self.x = x
        self.stored = exact(to_numpy(x).astype(FP32)) if stored is None else stored
        x = x + (leaf(self.stored) - x).detach()  # its numbers, and the gradient of x
        self.mean = x.mean(-1, keepdim=True) if self.centred else torch.zeros(())
        self.rstd = ((x - self.mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        n = (x - self.mean) * self.rstd
        self.outs = [
            n * weight + (0 if shift is None else shift)
            for weight, shift in zip(self.leaves["weights"], self.leaves["shifts"], strict=True)
        ]

    def statistics(self, memory) -> tuple:
        """mean, None for RMSNorm, and rstd, as forward leaves them."""
        mean, rstd = (to_numpy(each).astype(FP32) for each in (self.mean, self.rstd))
        return memory.read(mean[..., 0], FP32) if self.centred else None, memory.read(rstd[..., 0], FP32)


def pair(values: list) -> list:
    """Two of them, None for those that lack."""
    return [*values, None, None][:2]


def optional(place, values):
    return None if values is None else place(values)


def check_forward(dev, variant: str, B: int, T: int, C: int, shift: int, branches: int = 2) -> None:
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        case = Case(memory, variant, B, T, C, branches)
        residual = memory.write(case.shape) if branches else None
        outs = [memory.write(case.shape) for _ in range(case.outputs)]
        mean, rstd = stats = memory.write((B, T), FP32) if case.centred else None, memory.write((B, T), FP32)
        projs = [memory.read(values) for values in case.projs]
        ours = {
            name: [optional(parameters.read, values) for values in getattr(case, name)]
            for name in ("weights", "shifts")
        }
        added = list(zip(projs, case.dropouts, strict=False))
        norms = list(zip(ours["weights"], ours["shifts"], strict=True))
        parallel_residual_forward(residual, outs, stats, memory.read(case.inp), norms, EPS, B, T, C, branches=added)
    case.define(to_numpy(residual) if branches else None)
    if branches:
        assert_close("residual", residual, case.x, KERNEL_FP32)
    if case.centred:
        assert_close("mean", mean, case.mean[..., 0], KERNEL_FP32)
    assert_close("rstd", rstd, case.rstd[..., 0], KERNEL_FP32)
    for name, out, want in zip(("out0", "out1"), outs, case.outs, strict=False):
        assert_close(name, out, want, KERNEL_FP32)


@each_variant
@any_shape
@examples
def test_forward_adds_both_branches_to_the_stream_normalises_it_once_and_scales_it_for_each(
    dev, variant, B, T, C, shift
):
    check_forward(dev, variant, B, T, C, shift)


@pytest.mark.parametrize("variant", ["layernorm untied 0,0", "rmsnorm tied 0,0", "layernorm tied .3,0"])
@pytest.mark.parametrize("branches", [0, 1])
def test_forward_takes_fewer_branches(dev, variant, branches):
    check_forward(dev, variant, 2, 7, 44, 0, branches)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@any_shape
@examples
def test_an_output_is_recomputed(dev, norm, B, T, C, shift):
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        case = Case(memory, f"{norm} untied 0,0", B, T, C)
        case.define()
        out = memory.recomputed(B * T, C)
        second = [optional(parameters.read, values) for values in (case.weights[1], case.shifts[1])]
        recompute_norm(out, memory.read(case.stored), second, case.statistics(memory), B, T, C)
    assert_close("recomputed", out, case.outs[1].reshape(B * T, C), KERNEL_FP32)


def check_backward(dev, variant: str, B: int, T: int, C: int, shift: int, biases: int = 2, branches: int = 2) -> None:
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        case = Case(memory, variant, B, T, C, branches)
        case.define()
        stream = normal(case.rng, B, T, C)  # the residual stream's own gradient
        douts = [normal(case.rng, B, T, C) for _ in range(case.outputs)]
        loss = (case.x * leaf(stream).detach()).sum()
        for out, dout in zip(case.outs, douts, strict=True):
            loss = loss + (out * leaf(dout).detach()).sum()
        loss.backward()

        dinp = memory.update(stream)
        dprojs = [memory.write(case.shape) if dropout else None for dropout in case.dropouts]
        before = {name: [normal(case.rng, C) for _ in range(2)] for name in ("weights", "shifts", "biases")}
        count = {"weights": case.outputs, "shifts": case.outputs * case.centred, "biases": biases}
        ours = {
            name: pair([parameters.update(values, FP32) for values in arrays[: count[name]]])
            for name, arrays in before.items()
        }
        added = list(zip(dprojs, ours["biases"], case.dropouts, strict=True))[:branches]
        dnorms = list(zip(ours["weights"], ours["shifts"], strict=True))[: case.outputs]
        norms = [(parameters.read(weight), None) for weight in case.weights]
        parallel_residual_backward(
            dinp, dnorms, [memory.read(dout) for dout in douts], memory.read(case.stored), norms,
            case.statistics(memory), B, T, C, branches=added,
        )  # fmt: skip
    assert_close("dinp", dinp, case.leaves["inp"].grad, KERNEL_FP32)
    for i, dproj in enumerate(dprojs):
        if dproj is not None:
            assert_close(f"dproj{i}", dproj, case.leaves["projs"][i].grad, KERNEL_FP32)
    for name, arrays in ours.items():
        for i, array in enumerate(arrays[: count[name]]):
            assert_close(f"{name} {i}", array, case.leaves[name][i].grad + leaf(before[name][i]).detach(), KERNEL_FP32)


@each_variant
@any_shape
@examples
def test_backward_adds_to_the_residual_gradient_and_passes_it_back_through_both_dropouts(dev, variant, B, T, C, shift):
    check_backward(dev, variant, B, T, C, shift)


@pytest.mark.parametrize("variant", ["layernorm untied 0,0", "rmsnorm tied 0,0", "layernorm untied .3,.3"])
@pytest.mark.parametrize("biases", [0, 1])
def test_backward_leaves_out_the_bias_gradients_that_are_not_wanted(dev, variant, biases):
    check_backward(dev, variant, 2, 13, 20, 0, biases)


def test_backward_of_the_first_block_can_give_the_embeddings_gradient_through_its_dropout(dev):
    check_backward(dev, "layernorm untied .3,0", 2, 13, 20, 0, biases=0, branches=1)


@pytest.mark.parametrize("variant", ["layernorm untied .3,.3", "rmsnorm tied 0,0"])
@pytest.mark.parametrize("T, C", [(1501, 5), (1500, 8)])
def test_backward_gives_a_block_more_rows_than_it_takes_at_once(dev, variant, T, C):
    assert 3 * T > 4 * MAX_PARTIALS
    check_backward(dev, variant, 3, T, C, 0)


@pytest.mark.parametrize("variant, S, rows, keep, few, lacking", [
    ("layernorm untied 0,0", 5, 3, True, 304, 3), ("layernorm untied 0,0", 5, 3, False, 304, 0),
    ("layernorm untied .3,.3", 6, 1, True, 304, 0), ("layernorm untied .3,.3", 6, 1, False, 304, 3),
    ("rmsnorm tied 0,0", 2, 2, True, 304, 0), ("rmsnorm tied 0,0", 2, 1, False, 304, 3),
    ("rmsnorm tied 0,0", 2, 1, False, 2064, 0),
])  # fmt: skip
def test_backward_takes_fewer_rows_and_keeps_its_sums_elsewhere_where_shared_memory_is_too_small(
    dev, columns_that_fit, launches, variant, S, rows, keep, few, lacking
):  # fmt: skip
    """S: sums of a column. few: of 2064 columns a thread takes several. T: on the CPU a block takes rows twice, or more
    often, and not always as many."""
    blocks = 2 if dev.kind == "cpu" and few < 1024 else 1  # which share a multiprocessor
    C = columns_that_fit(blocks * (2 * rows + S * keep), blocks * 2048, few) - lacking
    check_backward(dev, variant, 1, 8 * rows + 2, C, 0)
    (launch,) = (arguments for name, arguments in launches.items() if name.endswith("backward_kernel"))
    assert (launch["rows"], launch["keep"]) == (rows, keep)
