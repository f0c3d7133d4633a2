"""The AdamW optimizer, and the master copy of parameters in bf16: the launchers of adamw.cu."""

import device
from device import ceil_div
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)

BLOCK = 256  # on an H200 64 to 512 take as long, 1024 18% longer


def adamw(
    params, grads, m, v, norm, n: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int, *, low=None, rates=None,
) -> None:  # fmt: skip
    """One AdamW step over n consecutive parameters of the type `floatX`: params, m and v (n) are updated from grads
    (n). In bf16 low (n), uint16, is updated, too: params, low and the sign of v are the master copy as `split` stores
    it. In fp32 it is None.

    norm (4) comes from global_norm. norm[1] multiplies every gradient; if it is NaN, nothing changes. If the square of
    a gradient is not finite, the parameters of its thread (four of them on a GPU) stay as they are, and norm[3] becomes
    1. t counts steps from 1. rates (3): on the device lr and the corrections 1 - beta1^t and 1 - beta2^t, which
    replace lr and t; or None.
    """
    scalars = (lr, beta1, beta2, 1.0 - beta1, 1.0 - beta2, 1.0 - beta1**t, 1.0 - beta2**t, eps, weight_decay)
    args = params, low, grads, m, v, norm, rates, n, *map(np.float32, scalars)
    cu.launch("adamw_kernel", (ceil_div(n, cu.floats * BLOCK),), (BLOCK,), args)


def split(params, values, n: int, *, low=None, v=None) -> None:
    """Sets params (n), bf16, to fp32 values (n), rounded to nearest. With low (n), uint16, and v (n), fp32: sets low to
    the last 16 bits of the values, and the sign of v, which else stays as it is, to whether a value was rounded up (its
    first 16 bits, as an integer, are one less than the parameter's)."""
    cu.launch("split_kernel", (ceil_div(n, BLOCK),), (BLOCK,), (params, low, v, values, n))


def join(values, params, low, v, n: int) -> None:
    """Sets values (n) to the values that `split` was given, to the last bit. A NaN is a NaN again, of other bits."""
    cu.launch("join_kernel", (ceil_div(n, BLOCK),), (BLOCK,), (values, params, low, v, n))


describe(
    adamw, "n=4096", "params low: n; grads* m* v*: n",
    lambda size, a: {
        "norm": device.asarray(np.array([1, 1, 0, 0], np.float32)),
        "low": a.low if device.floatX == device.BF16 else None,
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "t": 1,
    },
    hard="n=10001", twice={"adamw": "params low m v"},
    hides="grads")  # it leaves what is not finite out of the update on purpose
describe(split, "n=4096", "params low: n; values* v*: n", precision="bf16", twice={"split": "v"})
describe(join, "n=4096", "params low: n; values* v*: n", precision="bf16")
