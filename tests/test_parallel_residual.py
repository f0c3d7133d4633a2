"""parallel_residual.cu against autograd through its definition: both norms, one output and two, dropout and none."""

import itertools

import device
from kernels.dropout import Dropout
from kernels.parallel_residual import add_dropped, branch_forward, parallel_residual_backward, parallel_residual_forward
from kernels.reduce import MAX_PARTIALS
from oracle import BF16, KERNEL_FP32, assert_close, exact, kernel_tolerance, leaf, normal, to_numpy
from support.draws import factors, words
from support.kernels import FP32, Place, fp32, gradient, launch, parameter, shapes, update, write

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("each_type")

EPS = 1e-5

# The norm, whether both branches read the same output ("tied"), and the rates at which each branch is dropped.
VARIANTS = itertools.product(("layernorm", "rmsnorm"), ("tied", "untied"), ("0,0", ".3,.3", ".5,0"))
ORDINARY = 1, 3, 5, 6, 8, 10  # have each pair
each_variant = pytest.mark.parametrize("variant", [
    pytest.param(" ".join(words), marks=[] if i in ORDINARY else pytest.mark.long) for i, words in enumerate(VARIANTS)
])  # fmt: skip

# Rows of two or three numbers may be nearly constant: a norm then magnifies the rounding of its input without bound.
any_shape = shapes(
    (2, 8, 64, 0), (1, 5, 7, 1), (3, 43, 130, 2), (1, 9, 768, 0), (1, 3, 2050, 3),
    B=(1, 3), T=(1, 16), C=(5, 150), shift=(0, 3),
)  # fmt: skip


class Case:
    """A variant's inputs, and its definition in float64."""

    def __init__(self, variant: str, B: int, T: int, C: int, branches: int = 2):
        norm, outputs, rates = variant.split()
        self.centred, self.outputs = norm == "layernorm", 2 if outputs == "untied" else 1
        self.rng = rng = np.random.default_rng([B, T, C])
        x = 2 * normal(rng, B, T, C) + 1
        self.inp = exact(x + np.copysign(FP32(0.5), x))
        self.projs = [normal(rng, B, T, C) / 4 for _ in range(branches)]
        self.biases = [np.zeros(C, FP32) for _ in range(branches)]  # which the products have added
        self.weights = [normal(rng, C) for _ in range(self.outputs)]
        self.shifts = [normal(rng, C) if self.centred else None for _ in range(self.outputs)]
        self.dropouts = [
            Dropout(words(float(rate)), site) if float(rate) else None
            for site, rate in enumerate(rates.split(",")[:branches], start=1)
        ]
        self.factors = [factors(dropout, B, T, C) for dropout in self.dropouts]

    def norms(self) -> list[tuple[Place, Place | None]]:
        pairs = zip(self.weights, self.shifts, strict=True)
        return [(parameter(weight), None if shift is None else parameter(shift)) for weight, shift in pairs]

    def define(self, stored: np.ndarray | None = None) -> None:
        """Sets leaves and, from them, x, the norm's input, as it is before it is stored, and `stored`, by default x in
        the device's type; from that its mean and rstd, and the outputs."""
        self.leaves = {"inp": leaf(self.inp)}
        for name in "projs", "biases", "weights", "shifts":
            self.leaves[name] = [None if values is None else leaf(values) for values in getattr(self, name)]
        x = self.leaves["inp"]
        for proj, bias, factor in zip(self.leaves["projs"], self.leaves["biases"], self.factors, strict=True):
            x = x + (proj + bias) * factor
        self.x = x
        self.stored = exact(to_numpy(x).astype(FP32)) if stored is None else stored
        x = x + (leaf(self.stored) - x).detach()  # its numbers, and the gradient of x
        mean = x.mean(-1, keepdim=True) if self.centred else torch.zeros(())
        rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        n = (x - mean) * rstd
        self.stats = mean[..., 0] if self.centred else None, rstd[..., 0]
        self.outs = [
            n * weight + (0 if shift is None else shift)
            for weight, shift in zip(self.leaves["weights"], self.leaves["shifts"], strict=True)
        ]

    def given_stats(self) -> list[Place | None]:
        """As forward leaves them."""
        return [None if each is None else fp32(to_numpy(each)) for each in self.stats]


@pytest.mark.parametrize("outputs", ["tied", "untied"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@any_shape
def test_forward_normalises_the_stream_once_and_scales_it_for_each_branch(norm, outputs, B, T, C, shift):
    case = Case(f"{norm} {outputs} 0,0", B, T, C, branches=0)
    case.define()
    outs = [write(B, T, C) for _ in range(case.outputs)]
    stats = [write(B, T, dtype=FP32) if case.centred else None, write(B, T, dtype=FP32)]
    found = launch(parallel_residual_forward, outs, stats, case.inp, case.norms(), EPS, B, T, C, shift=shift)
    names = [*(f"out{i}" for i in range(case.outputs)), "mean", "rstd"]
    there = [(name, want) for name, want in zip(names, [*case.outs, *case.stats], strict=True) if want is not None]
    for got, (name, want) in zip(found, there, strict=True):
        assert_close(name, got, want, KERNEL_FP32)


@shapes((2, 8, 64), (1, 5, 7), (3, 43, 130), (1, 9, 768), B=(1, 3), T=(1, 16), C=(1, 150))
def test_a_branch_is_dropped_and_added_to_the_stream(B, T, C):
    case = Case("layernorm tied .3,0", B, T, C, branches=1)
    case.define()
    args = update(case.projs[0].reshape(B * T, C)), case.inp.reshape(B * T, C), case.dropouts[0], B * T, C
    (out,) = launch(add_dropped, *args)
    assert_close("out", out, case.x.reshape(B * T, C), KERNEL_FP32)


@pytest.mark.parametrize("rate", [0, 0.3])
def test_a_branch_ends_with_a_product_its_bias_and_dropout_on_the_stream(rate):
    B, T, C, OC = 2, 5, 12, 20
    rng = np.random.default_rng(0)
    inp, weight, bias, residual = (normal(rng, *shape) for shape in ((B, T, C), (OC, C), (OC,), (B, T, OC)))
    dropout = Dropout(words(rate), 3) if rate else None
    given = inp, parameter(weight), parameter(bias), B, T, C, OC, residual, dropout
    (out,) = launch(branch_forward, write(B, T, OC), *given)
    product = leaf(inp) @ leaf(weight).T + leaf(bias)
    # In bf16 dropout takes a product that has been rounded; and so may the sum, on a GPU.
    allowed = kernel_tolerance(device) + (BF16 if device.floatX == device.BF16 else 0)
    assert_close("out", out, leaf(residual) + product * factors(dropout, B, T, OC), allowed)


def check_backward(variant: str, B: int, T: int, C: int, shift: int = 0, biases: int = 2, branches: int = 2) -> None:
    case = Case(variant, B, T, C, branches)
    case.define()
    stream = normal(case.rng, B, T, C)  # the residual stream's own gradient
    douts = [normal(case.rng, B, T, C) for _ in range(case.outputs)]
    loss = sum(
        (out * leaf(dout).detach()).sum() for out, dout in zip([case.x, *case.outs], [stream, *douts], strict=True)
    )
    loss.backward()
    expected = [("dinp", case.leaves["inp"].grad)]

    def added_to(name: str, i: int) -> Place:
        before = normal(case.rng, C)
        expected.append((f"{name} {i}", case.leaves[name][i].grad + leaf(before).detach()))
        return gradient(before)

    def dproj(i: int) -> Place:
        expected.append((f"dproj{i}", case.leaves["projs"][i].grad))
        return write(B, T, C)

    dnorms = [(added_to("weights", i), added_to("shifts", i) if case.centred else None) for i in range(case.outputs)]
    added = [(dproj(i) if dropout else None, added_to("biases", i) if i < biases else None, dropout)
             for i, dropout in enumerate(case.dropouts)]  # fmt: skip
    args = update(stream), dnorms, douts, case.stored, [(weight, None) for weight, _ in case.norms()]
    found = launch(parallel_residual_backward, *args, case.given_stats(), B, T, C, branches=added, shift=shift)
    for got, (name, want) in zip(found, expected, strict=True):
        assert_close(name, got, want, KERNEL_FP32)


@each_variant
@any_shape
def test_backward_adds_to_the_residual_gradient_and_passes_it_back_through_both_dropouts(variant, B, T, C, shift):
    check_backward(variant, B, T, C, shift)


# Last: the first block gives the gradient of the embedding through its dropout.
@pytest.mark.parametrize("variant, biases, branches", [
    *((variant, biases, 2) for variant in ("layernorm untied 0,0", "rmsnorm tied 0,0", "layernorm untied .3,.3")
      for biases in (0, 1)), ("layernorm untied .3,0", 0, 1),
])  # fmt: skip
def test_backward_leaves_out_what_is_not_wanted(variant, biases, branches):
    check_backward(variant, 2, 13, 20, 0, biases, branches)


@pytest.mark.parametrize("variant", ["layernorm untied .3,.3", "rmsnorm tied 0,0"])
@pytest.mark.parametrize("T, C", [(1501, 5), (1500, 8)])
def test_backward_gives_a_block_more_rows_than_it_takes_at_once(variant, T, C):
    assert 3 * T > 4 * MAX_PARTIALS
    check_backward(variant, 3, T, C)


@pytest.mark.parametrize("variant, S, rows, keep, few, lacking", [
    ("layernorm untied 0,0", 5, 3, True, 304, 3), ("layernorm untied 0,0", 5, 3, False, 304, 0),
    ("layernorm untied .3,.3", 6, 1, True, 304, 0), ("layernorm untied .3,.3", 6, 1, False, 304, 3),
    ("rmsnorm tied 0,0", 2, 2, True, 304, 0), ("rmsnorm tied 0,0", 2, 1, False, 304, 3),
    ("rmsnorm tied 0,0", 2, 1, False, 2064, 0),
])  # fmt: skip
def test_backward_takes_fewer_rows_and_keeps_its_sums_elsewhere_where_shared_memory_is_too_small(
    columns_that_fit, launches, variant, S, rows, keep, few, lacking
):  # fmt: skip
    """S: sums of a column. few: of 2064 columns a thread takes several. T: on the CPU a block takes rows twice, or more
    often, and not always as many."""
    blocks = 2 if device.kind == "cpu" and few < 1024 else 1  # which share a multiprocessor
    C = columns_that_fit(blocks * (2 * rows + S * keep), blocks * 2048, few) - lacking
    check_backward(variant, 1, 8 * rows + 2, C)
    (launch,) = (arguments for name, arguments in launches.items() if name.endswith("backward_kernel"))
    assert (launch["rows"], launch["keep"]) == (rows, keep)
