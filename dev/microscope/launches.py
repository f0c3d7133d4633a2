"""Every launcher of kernels/ with arguments to call it with: for the microscope, and for tests of all kernels.

    launch = LAUNCHES["layernorm_backward"]
    call = launch.prepare(launch.sizes | {"B": 4})    # makes arrays on the device in use
    call()                                            # may be called again: what it reads and adds to stays finite

A name after a colon tells variants of a launcher apart: attention_forward:relu.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import device
from device.errors import UserError
from kernels.adamw import adamw, join, split
from kernels.attention import Matrices, attention_backward, attention_forward
from kernels.cached_attention import Cached, cached_attention_forward
from kernels.classifier import fused_classifier
from kernels.dropout import Dropout
from kernels.encoder import add_sparse, encoder_backward, encoder_backward_sparse, encoder_forward
from kernels.exchange import checksum, gather_rows, sum_buffers
from kernels.flash_attention import flash_attention_backward, flash_attention_forward
from kernels.fp8.loading import load_layers
from kernels.fp8.quantize import quantize
from kernels.fp8.quantized import GradientScale, Quantized, WeightOnly
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_forward, layernorm_recompute
from kernels.matmul import matmul_backward_bias, matmul_forward, matvec, transpose, transposes
from kernels.norm import recompute_norm
from kernels.parallel_residual import parallel_residual_backward, parallel_residual_forward
from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.reduce import SQUARES, add_partials, column_sum, global_norm
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward, rmsnorm_recompute
from kernels.rope import rope_backward, rope_forward, rope_table
from kernels.sampling import sample
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.data.dataloader import sort_by_token
from llmc.model.batch import random_words

import numpy as np

load_layers()
EPS = 1e-5


@dataclass
class Launch:
    """A launcher, the sizes that it takes, the shapes of its arrays, and how its other arguments are made. fp32: the
    arrays that are fp32 in any precision; the others are of the type `floatX`."""

    launcher: Callable
    sizes: dict[str, int]
    shapes: dict[str, tuple[str, ...]]
    fp32: frozenset[str]
    others: Callable[[SimpleNamespace, SimpleNamespace], dict] = field(repr=False)
    needs: tuple[str, ...] = ()  # of the sizes
    precision: str = ""  # the only one that it takes, where there is one

    def shapes_at(self, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """The shape of each array where the sizes are these."""
        names = {**self.sizes, **sizes}
        return {name: tuple(eval(length, {}, names) for length in shape) for name, shape in self.shapes.items()}

    def prepare(self, sizes: dict[str, int]) -> Callable[[], None]:
        """A call of the launcher with arrays of these sizes on the device in use, filled with random numbers.

        Raises UserError for sizes and a precision that the launcher does not take.
        """
        if self.precision not in ("", device.precision):
            raise UserError(f"{self.launcher.__name__} is so called in {self.precision}: --precision {self.precision}")
        size = SimpleNamespace(**{**self.sizes, **sizes})
        for need in self.needs:
            if not eval(need, {}, vars(size)):
                raise UserError(f"{self.launcher.__name__} needs {need}")
        rng = np.random.default_rng(1)
        arrays = {}
        for name, shape in self.shapes_at(sizes).items():
            values = rng.standard_normal(shape, np.float32)
            values = abs(values) if name in ("rstd", "v") else values
            arrays[name] = device.asarray(values if name in self.fp32 else device.to_floatX(values))
        given = {**vars(size), **arrays}
        given |= self.others(size, SimpleNamespace(**arrays))
        wanted = [name for name in inspect.signature(self.launcher).parameters if name in given]
        arguments = {name: given[name] for name in wanted}

        def call() -> None:
            self.launcher(**arguments)

        call.arguments, call.arrays = arguments, arrays  # which a launcher may be given by their addresses alone
        return call


LAUNCHES: dict[str, Launch] = {}


def add(
    launcher: Callable, sizes: str, shapes: str, others: Callable = lambda size, a: {}, variant: str = "",
    needs: tuple[str, ...] = (), precision: str = "",
) -> None:  # fmt: skip
    """sizes: "B=2 T=8"; shapes: "inp=B,T,C mean*=B,T", of expressions of the sizes; a star says that the array is fp32
    in any precision."""
    name = launcher.__name__ + (f":{variant}" if variant else "")
    pairs = [word.split("=") for word in shapes.split()]
    LAUNCHES[name] = Launch(
        launcher,
        {key: int(value) for key, value in (word.split("=") for word in sizes.split())},
        {key.rstrip("*"): tuple(shape.split(",")) for key, shape in pairs},
        frozenset(key[:-1] for key, _ in pairs if key.endswith("*")),
        others,
        needs,
        precision,
    )


def tokens(*shape: int, below: int):
    """Random token ids, of which half are the same one."""
    ids = np.random.default_rng(2).integers(0, below, shape, np.int32)
    ids.reshape(-1)[::2] = below // 2
    return ids


def dropout(site: int = 0) -> Dropout:
    """A fifth is dropped."""
    return Dropout(device.asarray(random_words((0.2, 1), 0, 0)), site)


def sorted_tokens(size, a) -> dict:
    inp = tokens(size.B, size.T, below=size.V)
    order, count = sort_by_token(inp)
    return {"inp": device.asarray(inp), "order": device.asarray(order), "count": device.asarray(count)}


ROWS = "B=2 T=8 C=128"
add(encoder_forward, ROWS + " V=50", "out=B,T,C wte=V,C wpe=T,C", sorted_tokens)
add(encoder_forward, ROWS + " V=50", "out=B,T,C wte=V,C wpe=T,C",
    lambda size, a: sorted_tokens(size, a) | {"dropout": dropout()}, "dropout")
add(encoder_backward, ROWS + " V=50", "dwte*=V,C dwpe*=T,C dout=B,T,C", sorted_tokens)
add(encoder_backward_sparse, ROWS + " V=50", "values*=B*T,C dwpe*=T,C dout=B,T,C",
    lambda size, a: sorted_tokens(size, a) | {"indices": device.zeros((size.B * size.T,), np.int32)})
add(add_sparse, "N=64 V=100 C=128", "dwte*=V,C values*=N,C",
    lambda size, a: {"indices": device.asarray(np.arange(size.N, dtype=np.int32))}, needs=("N <= V",))

STATS = "mean*=B,T rstd*=B,T"
FUSED = "residual=B,T,C out=B,T,C inp1=B,T,C inp2=B,T,C weight=C"
BACKWARD = "dinp=B,T,C dout=B,T,C inp=B,T,C weight=C dweight*=C"


def pairs(size, a) -> dict:
    """Of a layernorm: its parameters, their gradients where there are any, and what forward keeps."""
    given = {"norm": (a.weight, getattr(a, "bias", None)), "stats": (a.mean, a.rstd)}
    return given | ({"dnorm": (a.dweight, a.dbias)} if hasattr(a, "dweight") else {})


def recomputed(array) -> dict:
    """An array (N,C) as the matrix that backward recomputes."""
    return {"out": array.reshape(array.shape[::-1]).T if transposes() else array}


add(layernorm_forward, ROWS, f"out=B,T,C {STATS} inp=B,T,C weight=C bias=C", pairs)
add(fused_residual_forward, ROWS, f"{FUSED} {STATS} bias=C", pairs)
add(layernorm_backward, ROWS, f"{BACKWARD} {STATS} dbias*=C dbias2*=C", pairs)
add(layernorm_recompute, "B=2 T=32 C=64", f"out=B*T,C inp=B,T,C weight=C bias=C {STATS}",
    lambda size, a: pairs(size, a) | recomputed(a.out))


def epsilon(size, a) -> dict:
    return {"eps": EPS}


add(rmsnorm_forward, ROWS, "out=B,T,C rstd*=B,T inp=B,T,C weight=C", epsilon)
add(fused_residual_rmsnorm_forward, ROWS, f"{FUSED} rstd*=B,T", epsilon)
add(rmsnorm_backward, ROWS, f"{BACKWARD} rstd*=B,T")
add(rmsnorm_recompute, "B=2 T=32 C=64", "out=B*T,C inp=B,T,C weight=C rstd*=B,T", lambda size, a: recomputed(a.out))

BRANCHES = "inp=B,T,C proj0=B,T,C proj1=B,T,C residual=B,T,C out0=B,T,C out1=B,T,C"
NORMS = f"weight0=C weight1=C shift0=C shift1=C {STATS}"
GRADIENTS = (
    "inp=B,T,C dinp=B,T,C dproj0=B,T,C dproj1=B,T,C dout0=B,T,C dout1=B,T,C "
    "dbias0*=C dbias1*=C dweight0*=C dweight1*=C dshift0*=C dshift1*=C"
)


def add_parallel_residual(variant: str, drops: bool) -> None:
    def drop(site: int) -> Dropout | None:
        return dropout(site) if drops else None

    def forward(size, a) -> dict:
        return {
            "outs": [a.out0, a.out1], "eps": EPS, "norms": [(a.weight0, a.shift0), (a.weight1, a.shift1)],
            "stats": (a.mean, a.rstd), "branches": [(a.proj0, drop(0)), (a.proj1, drop(1))],
        }  # fmt: skip

    def backward(size, a) -> dict:
        return {
            "douts": [a.dout0, a.dout1], "dnorms": [(a.dweight0, a.dshift0), (a.dweight1, a.dshift1)],
            "branches": [(a.dproj0, a.dbias0, drop(0)), (a.dproj1, a.dbias1, drop(1))],
            "norms": [(a.weight0, None), (a.weight1, None)], "stats": (a.mean, a.rstd),
        }  # fmt: skip

    add(parallel_residual_forward, ROWS, f"{BRANCHES} {NORMS}", forward, variant)
    add(parallel_residual_backward, ROWS, f"{GRADIENTS} {NORMS}", backward, variant)


add_parallel_residual("", drops=False)
add_parallel_residual("dropout", drops=True)
add(recompute_norm, "B=2 T=32 C=64", f"out=B*T,C inp=B,T,C weight=C shift=C {STATS}",
    lambda size, a: {"norm": (a.weight, a.shift), "stats": (a.mean, a.rstd)} | recomputed(a.out))

MATRIX = "N=64 C=128"
add(matmul_forward, "B=2 T=8 C=64 OC=128", "out=B,T,OC inp=B,T,C weight=OC,C bias=OC")
add(matvec, "C=256 OC=64", "out=OC inp=C weight=OC,C bias=OC")
add(matmul_backward_bias, "B=2 T=320 OC=128", "dbias*=OC dout=B,T,OC")
add(transpose, MATRIX, "out=C,N inp=N,C")
for erf in False, True:
    variant = "erf" if erf else ""
    add(gelu_forward, MATRIX, "out=N,C inp=N,C bias=C", lambda size, a, erf=erf: {"erf": erf}, variant)
    add(gelu_backward, MATRIX, "dinp=N,C dbias*=C out=N,C inp=N,C bias=C",
        lambda size, a, erf=erf: {"erf": erf, "dout": a.dinp} | recomputed(a.out), variant)
add(swiglu_forward, MATRIX, "out=N,C inp=N,2*C")
add(swiglu_backward, MATRIX, "dinp=N,2*C out=N,C dout=N,C inp=N,2*C", lambda size, a: recomputed(a.out))


def quantized(N: int, C: int) -> Quantized:
    """Room for q and q_T, and a scale, a ratio and a previous amax of 1."""
    ones = (device.asarray(np.ones(n, np.float32)) for n in (2, 1))
    q, q_T = (device.empty(shape, np.uint8) for shape in ((N, C), (C, N)))
    return Quantized(q, q_T, GradientScale("matrix", *ones))


def weight_only(size, a) -> dict:
    q = np.random.default_rng(3).integers(0, 127, (size.OC, size.C), np.uint8)
    return {"weight": WeightOnly(device.asarray(q), device.asarray(np.ones(1, np.float32)))}


for rows, variant in (1, "fp8"), (2, "fp8 rows"):
    add(matmul_forward, f"B=1 T={rows} C=256 OC=64", "out=B,T,OC inp=B,T,C bias=OC", weight_only, variant,
        ("C % 16 == 0",), "bf16")
FP8 = {"variant": "fp8", "needs": ("N % 16 == 0", "C % 16 == 0"), "precision": "bf16"}
add(quantize, MATRIX, "inp=N,C", lambda size, a: {"out": quantized(size.N, size.C)}, **FP8 | {"variant": ""})
for erf in False, True:
    more = FP8 | {"variant": "erf fp8" if erf else "fp8"}
    add(gelu_forward, MATRIX, "inp=N,C bias=C",
        lambda size, a, erf=erf: {"out": quantized(size.N, size.C), "erf": erf}, **more)
    add(gelu_backward, MATRIX, "dbias*=C dout=N,C inp=N,C bias=C", lambda size, a, erf=erf: {
        "dinp": quantized(size.N, size.C), "out": quantized(size.N, size.C), "erf": erf}, **more)
FP8_ROWS = FP8 | {"needs": ("B * T % 16 == 0", "C % 16 == 0")}
add(fused_residual_forward, ROWS, f"{FUSED} {STATS} bias=C",
    lambda size, a: pairs(size, a) | {"out": quantized(size.B * size.T, size.C)}, **FP8_ROWS)
add(layernorm_recompute, ROWS, f"inp=B,T,C weight=C bias=C {STATS}",
    lambda size, a: pairs(size, a) | {"out": quantized(size.B * size.T, size.C)}, **FP8_ROWS)
add(fused_residual_rmsnorm_forward, ROWS, f"{FUSED} rstd*=B,T",
    lambda size, a: epsilon(size, a) | {"out": quantized(size.B * size.T, size.C)}, **FP8_ROWS)
add(rmsnorm_recompute, ROWS, "inp=B,T,C weight=C rstd*=B,T",
    lambda size, a: {"out": quantized(size.B * size.T, size.C)}, **FP8_ROWS)
add(swiglu_forward, MATRIX, "inp=N,2*C", lambda size, a: {"out": quantized(size.N, size.C)}, **FP8)
add(swiglu_backward, MATRIX, "dout=N,C inp=N,2*C", lambda size, a: {
    "dinp": quantized(size.N, 2 * size.C), "out": quantized(size.N, size.C)}, **FP8)

add(fused_classifier, "B=2 T=4 V=1000 Vp=1024", "logits=B,T,Vp losses*=B,T",
    lambda size, a: {"dloss": 1.0, "targets": device.asarray(tokens(size.B, size.T, below=size.V))},
    needs=("V <= Vp", "Vp % 8 == 0"))


for top_p, variant in (1.0, ""), (0.5, "top_p"):
    def drawing(size, a, top_p=top_p) -> dict:
        return {
            "tokens": device.zeros((size.B,), np.int32), "positions": device.zeros((size.B,), np.int32),
            "states": device.asarray(np.arange(1, size.B + 1, dtype=np.uint64)), "top_p": top_p,
        }  # fmt: skip

    add(sample, "B=2 V=1000 Vp=1024 context=8 top_k=0", "logits=B,Vp", drawing, variant,
        ("V <= Vp", "Vp % 8 == 0"))

ALL_HEADS = "B,T,NH+2*NKV,HS"
GROUPS = ("NH % NKV == 0",)
BY_HEAD = f"qkvr={ALL_HEADS} att=B,NH,T,T qkv={ALL_HEADS}"
for relu in False, True:
    def by_head(size, a, relu=relu) -> dict:
        return {"kept": Matrices(a.qkvr, a.att, relu)}

    sizes, variant = "B=1 T=32 NH=4 NKV=4 HS=32", "relu" if relu else ""
    add(attention_forward, sizes, f"out=B,T,NH*HS {BY_HEAD}", by_head, variant, GROUPS)
    add(attention_backward, sizes, f"dqkv={ALL_HEADS} dout=B,T,NH*HS out=B,T,NH*HS {BY_HEAD}", by_head, variant, GROUPS)
for HS in 64, 128:
    sizes, variant = f"B=1 T=80 NH=2 NKV=1 HS={HS}", "" if HS == 64 else "128"
    for wgmma in False, True:
        add(
            flash_attention_forward, sizes, f"out=B,T,NH*HS lse*=B,NH,T qkv={ALL_HEADS}",
            lambda size, a, wgmma=wgmma: {"wgmma": wgmma}, "wgmma" * wgmma + variant, GROUPS, "bf16" * wgmma,
        )  # fmt: skip
        add(
            flash_attention_backward, sizes,
            f"dqkv={ALL_HEADS} dout=B,T,NH*HS out=B,T,NH*HS lse*=B,NH,T qkv={ALL_HEADS}",
            lambda size, a, wgmma=wgmma: {"wgmma": wgmma}, "wgmma" * wgmma + variant, GROUPS, "bf16" * wgmma,
        )  # fmt: skip


def cached(size, a) -> dict:
    starts = np.full(size.B, size.position, np.int32)
    return {"kept": Cached(a.keys, a.values, device.asarray(starts))}


CACHED = "B=2 T=1 position=199 context=256 HS=64 splits=4"
CACHES = f"keys=B,NKV,context,HS values=B,NKV,context,HS qkv={ALL_HEADS}"
for heads, variant in ("NH=2 NKV=2", ""), ("NH=4 NKV=1", "shared"):
    add(cached_attention_forward, f"{CACHED} {heads}", f"out=B,T,NH*HS {CACHES}", cached, variant,
        (*GROUPS, "position + T <= context"))


def angles(size, a) -> dict:
    return {"table": device.asarray(rope_table(size.T, size.HS, 1e4))}


for rope in rope_forward, rope_backward:
    name = "qkv" if rope is rope_forward else "dqkv"
    add(rope, "B=2 T=16 NH=4 NKV=2 HS=32", f"{name}={ALL_HEADS}", angles, needs=("HS % 2 == 0",))


QK = f"rstd*=B,T,NH+NKV inp={ALL_HEADS} qweight=HS kweight=HS"
OF_QK = f"dqweight*=HS dkweight*=HS {QK}"


def of_heads(size, a) -> dict:
    """The table of angles, and the weights of queries and keys with their gradients where there are any."""
    given = angles(size, a) | {"weights": (a.qweight, a.kweight)}
    return given | ({"dweights": (a.dqweight, a.dkweight)} if hasattr(a, "dqweight") else {})


add(qk_norm_forward, "B=2 T=16 NH=4 NKV=2 HS=32", f"out={ALL_HEADS} {QK}",
    lambda size, a: of_heads(size, a) | {"eps": EPS}, needs=("HS % 2 == 0",))
add(qk_norm_backward, "B=2 T=16 NH=4 NKV=2 HS=32", f"dinp={ALL_HEADS} {OF_QK}",
    lambda size, a: of_heads(size, a) | {"dout": a.dinp}, needs=("HS % 2 == 0",))
add(qk_norm_backward, "B=2 T=16 NH=2 NKV=1 HS=128", f"dout={ALL_HEADS} {OF_QK}", lambda size, a: of_heads(size, a) | {
    "dinp": quantized(size.B * size.T, (size.NH + 2 * size.NKV) * size.HS)},
    **FP8 | {"needs": ("B * T % 16 == 0", "HS == 128")})


def norm() -> dict:
    return {"norm": device.asarray(np.array([1, 1, 0, 0], np.float32))}


def addresses(*arrays) -> object:
    return device.asarray(np.array([device.address(x) for x in arrays], np.uint64))


RECIPE = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "t": 1}
add(adamw, "n=4096", "params=n grads*=n m*=n v*=n low=n",
    lambda size, a: norm() | RECIPE | {"low": a.low if device.floatX == device.BF16 else None})
add(split, "n=4096", "params=n values*=n low=n v*=n", precision="bf16")
add(join, "n=4096", "values*=n params=n low=n v*=n", precision="bf16")
add(global_norm, "n=4096", "x*=n",
    lambda size, a: norm() | {
        "scratch": device.empty((SQUARES,)), "arrays": [a.x], "largest": 1.0, "skip_nonfinite": False,
    })
add(column_sum, "N=640 C=128", "out*=C inp=N,C")
add(add_partials, "P=40 C=128", "out0*=C out1*=C partials*=P,2,C", lambda size, a: {"outs": [a.out0, a.out1]})
add(sum_buffers, "N=3 n=1000 blocks=2", "out*=n parts*=N,n",
    lambda size, a: {"to": addresses(a.out), "sources": addresses(*a.parts), "ranges": [(0, size.n)]})
add(gather_rows, "own=0 N=16 V=50 C=128", "mine=V,C other=V,C",
    lambda size, a: sorted_tokens(SimpleNamespace(B=1, T=size.N, V=size.V), a) | {
        "buffers": addresses(a.mine, a.other), "length": 4 * device.ceil_div(size.V * size.C, 8), "start": 0,
    }, needs=("own < 2",))
add(checksum, "n=4096", "buffer*=n")


def launches_in(precision: str) -> dict[str, Launch]:
    return {name: launch for name, launch in LAUNCHES.items() if launch.precision in ("", precision)}


def sizes_of(text: str, launch: Launch) -> dict[str, int]:
    """A launch's sizes with those that a text such as "B=2,T=8" sets; UserError where it does not say so."""
    sizes = dict(launch.sizes)
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in sizes or not value.isdecimal() or not (name != "own") <= int(value) < 1 << 31:
            known = ",".join(f"{key}={size}" for key, size in launch.sizes.items())
            raise UserError(f"--shape {text}: {word!r} is not one of its sizes and a number, as in {known}")
        sizes[name] = int(value)
    return sizes
