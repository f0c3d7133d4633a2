"""What the ladders are made of: for each topic its arrays, sizes and reference, and its rungs in their order.

doc/ladder.py climbs them. A topic's sizes have llm.c's names, N is B*T; `a` stands for its arrays, sizes and numbers.
The kernels' parameters have the names of these, so a launch need not list them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import device
from device import ceil_div, sources
from kernels import attention
from kernels.adamw import adamw
from kernels.classifier import fused_classifier
from kernels.encoder import encoder_backward, sort_by_token
from kernels.flash_attention import flash_attention_backward, flash_attention_forward
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import layernorm_backward, layernorm_forward
from kernels.matmul import transpose
from kernels.reduce import MAX_PARTIALS, add_partials, column_sum, rows_per_chunk

import numpy as np

Launch = Callable[[device.Source, SimpleNamespace], None]


@dataclass
class Rung:
    """A kernel of the topic's file, whose comment says its title and idea, or what stands for the end of the ladder."""

    kernel: str
    launch: Launch              # given the topic's file, its arrays and its sizes
    idea: str = ""              # of a rung that is no kernel of the file
    fours: bool = False         # takes only sizes that are multiples of 4, or of 8 in bf16
    tf32: bool = False
    ordered: bool = True        # sums in a fixed order
    recorded: bool = True       # timed as a replayed graph

    @property
    def in_file(self) -> bool:
        """Whether it is a kernel of the topic's file."""
        return not self.idea


@dataclass
class Topic:
    """Arrays as "name=shape" of the sizes: `reads` are inputs, `adds` come in with numbers and are updated, `sets` come
    in as NaNs, and so does `scratch`. Those that `bf16` names are of that type; a topic that has any is climbed with
    the device in that precision, for which its file is compiled."""

    reads: str
    sets: str
    adds: str
    scratch: str
    odd: dict[str, int]
    fours: dict[str, int]       # odd multiples of four, or of eight
    round: dict[str, int]       # where the microscope counts
    bench: dict[str, int]       # where a GPU is timed
    reference: Callable[[SimpleNamespace], dict]
    bytes: Callable[[SimpleNamespace], float]
    rungs: list[Rung]
    flops: Callable[[SimpleNamespace], float] | None = None
    others: Callable[[SimpleNamespace, dict], dict] = lambda size, given: {}  # arrays that are not just random
    numbers: dict[str, float] = field(default_factory=dict)  # that kernels are given
    bf16: tuple[str, ...] = ()
    gpu: str = ""               # whose times the book shows, if it is another one than that of most topics


def grid(n: int, *others: int, block: int = 256) -> tuple:
    return (ceil_div(n, block), *others)


def launch(cu: device.Source, a: SimpleNamespace, kernel: str, grid: tuple, block: tuple, **others) -> None:
    """Launches a kernel of the topic's file. others: those of its parameters that the topic does not know."""
    parameters = sources.kernel_accesses(cu.path)[kernel]
    cu.launch(kernel, grid, block, tuple(others[one] if one in others else getattr(a, one) for one in parameters))


def rung(kernel: str, grid: Callable[[SimpleNamespace], tuple], block: tuple = (256,), **options) -> Rung:
    """A rung that launches one kernel."""
    return Rung(kernel, lambda cu, a: launch(cu, a, kernel, grid(a), block), **options)


TOPICS: dict[str, Topic] = {}

TOPICS["copy"] = Topic(
    reads="inp=n", sets="out=n", adds="", scratch="",
    odd={"n": 1001}, fours={"n": 1004}, round={"n": 8192}, bench={"n": 1 << 26},
    reference=lambda a: {"out": a.inp},
    bytes=lambda s: 8 * s.n,
    rungs=[
        rung("run_a_thread_kernel", lambda a: grid(a.n, block=32 * 256)),
        rung("float_a_thread_kernel", lambda a: grid(a.n)),
        rung("float4_a_thread_kernel", lambda a: grid(a.n, block=1024), fours=True),
        rung("four_loads_kernel", lambda a: grid(a.n, block=4096), fours=True),
        # In a graph a copy is left to the copy engines, which are slower than the multiprocessors.
        Rung("cudaMemcpyAsync", lambda cu, a: device.copy(a.out, a.inp), "NVIDIA's own.", recorded=False),
    ],
)  # fmt: skip


def in_chunks(kernel: str, width: int = 1) -> Launch:
    """64 chunks of rows, then their sums."""

    def chunks_then_sums(cu: device.Source, a: SimpleNamespace) -> None:
        rows = ceil_div(a.N, 64)
        P = ceil_div(a.N, rows)
        launch(cu, a, kernel, grid(a.C, P, block=64 * width), (64,), rows=rows)
        launch(cu, a, "second_stage_kernel", grid(a.C, block=64), (64,), P=P)

    return chunks_then_sums


TOPICS["column_sum"] = Topic(
    reads="inp=N,C", sets="", adds="out=C", scratch="partials=P,C",
    odd={"N": 131, "C": 37}, fours={"N": 131, "C": 36}, round={"N": 640, "C": 128}, bench={"N": 4096, "C": 3072},
    reference=lambda a: {"out": a.out + a.inp.sum(axis=0)},
    bytes=lambda s: 4 * s.N * s.C,
    rungs=[
        rung("thread_a_column_kernel", lambda a: grid(a.C, block=64), (64,)),
        rung("block_a_column_kernel", lambda a: (a.C,)),
        Rung("atomics_kernel",
             lambda cu, a: launch(
                 cu, a, "atomics_kernel", grid(a.C, 64, block=64), (64,), rows=ceil_div(a.N, 64)), ordered=False),
        Rung("chunks_kernel", in_chunks("chunks_kernel")),
        Rung("float4_kernel", in_chunks("float4_kernel", 4), fours=True),
        Rung("column_sum of kernels/reduce.py", lambda cu, a: column_sum(a.out, a.inp, a.N, a.C),
             "As many chunks as fill the GPU, and a second stage in which threads share the chunks of a column."),
    ],
)  # fmt: skip


def normalised(a: SimpleNamespace) -> dict:
    mean = a.inp.mean(axis=1)
    rstd = 1 / np.sqrt(a.inp.var(axis=1) + 1e-5)
    return {"out": (a.inp - mean[:, None]) * rstd[:, None] * a.weight + a.bias, "mean": mean, "rstd": rstd}


TOPICS["layernorm_forward"] = Topic(
    reads="inp=N,C weight=C bias=C", sets="out=N,C mean=N rstd=N", adds="", scratch="",
    odd={"N": 37, "C": 101}, fours={"N": 37, "C": 100}, round={"N": 64, "C": 768}, bench={"N": 4096, "C": 768},
    reference=normalised,
    bytes=lambda s: 8 * s.N * s.C,
    rungs=[
        rung("thread_a_row_kernel", lambda a: grid(a.N, block=64), (64,)),
        rung("block_a_row_kernel", lambda a: (a.N,)),
        rung("warp_a_row_kernel", lambda a: grid(a.N, block=8), (32, 8)),
        rung("registers_kernel", lambda a: grid(a.N, block=8), (32, 8), fours=True),
        Rung("layernorm_forward of kernels/layernorm.py",
             lambda cu, a: layernorm_forward(a.out, (a.mean, a.rstd), a.inp, (a.weight, a.bias), 1, a.N, a.C),
             "A warp for a row of up to 1024 channels, several warps for a longer one; rows wait in shared memory."),
    ],
)  # fmt: skip


def layernorm_gradients(a: SimpleNamespace) -> dict:
    n, g = (a.inp - a.mean[:, None]) * a.rstd[:, None], a.dout * a.weight
    dx = a.rstd[:, None] * (g - g.mean(axis=1, keepdims=True) - n * (g * n).mean(axis=1, keepdims=True))
    return {"dinp": a.dinp + dx, "dweight": a.dweight + (a.dout * n).sum(axis=0), "dbias": a.dbias + a.dout.sum(axis=0)}


def thread_a_row(cu: device.Source, a: SimpleNamespace) -> None:
    launch(cu, a, "thread_a_row_kernel", grid(a.N, block=64), (64,))
    launch(cu, a, "thread_a_column_kernel", grid(a.C, block=64), (64,))


def warp_a_row(cu: device.Source, a: SimpleNamespace) -> None:
    launch(cu, a, "warp_a_row_kernel", grid(a.N, block=8), (32, 8))
    in_chunks("chunks_kernel")(cu, a)


def one_pass(cu: device.Source, a: SimpleNamespace) -> None:
    blocks = min(MAX_PARTIALS, a.N)
    launch(cu, a, "one_pass_kernel", (blocks,), (256,))
    launch(cu, a, "second_stage_kernel", grid(a.C, block=64), (64,), P=blocks)


TOPICS["layernorm_backward"] = Topic(
    reads="dout=N,C inp=N,C weight=C mean=N rstd=N", sets="", adds="dinp=N,C dweight=C dbias=C",
    scratch="partials=P,3*C",
    odd={"N": 37, "C": 101}, fours={"N": 37, "C": 100}, round={"N": 64, "C": 768}, bench={"N": 4096, "C": 768},
    reference=layernorm_gradients,
    bytes=lambda s: 16 * s.N * s.C,
    rungs=[
        Rung("thread_a_row_kernel", thread_a_row),
        rung("atomics_kernel", lambda a: grid(a.N, block=8), (32, 8), ordered=False),
        Rung("warp_a_row_kernel", warp_a_row),
        Rung("one_pass_kernel", one_pass),
        Rung("layernorm_backward of kernels/layernorm.py",
             lambda cu, a: layernorm_backward(
                 a.dinp, (a.dweight, a.dbias), a.dout, a.inp, (a.weight, None), (a.mean, a.rstd), 1, a.N, a.C),
             "A warp per row finds the two means, then a thread with four columns walks down the block's rows: two "
             "barriers for as many rows as there are warps."),
    ],
)  # fmt: skip


def product_rung(kernel: str, block: tuple, rows: int, columns: int, **options) -> Rung:
    """A block makes rows x columns elements; the naive one has the rows along x."""
    step = -1 if kernel == "naive_kernel" else 1
    return rung(kernel, lambda a: (ceil_div(a.N, columns), ceil_div(a.M, rows))[::step], block, **options)


def cublas(cu: device.Source, a: SimpleNamespace) -> None:
    device.gemm(a.c, a.a, a.b, a.M, a.N, a.K)


def cublas_in(precision: str) -> Launch:
    def product(cu: device.Source, a: SimpleNamespace) -> None:
        before = device.precision
        device.use_precision(precision)
        cublas(cu, a)
        device.use_precision(before)

    return product


TOPICS["matmul"] = Topic(
    reads="a=M,K b=K,N", sets="c=M,N", adds="", scratch="",
    odd={"M": 37, "N": 41, "K": 35}, fours={"M": 133, "N": 132, "K": 36},
    round={"M": 128, "N": 128, "K": 64}, bench={"M": 4096, "N": 3072, "K": 768},
    reference=lambda a: {"c": a.a @ a.b},
    bytes=lambda s: 4 * (s.M * s.K + s.K * s.N + s.M * s.N),
    flops=lambda s: 2 * s.M * s.N * s.K,
    rungs=[
        product_rung("naive_kernel", (32, 8), 32, 8),
        product_rung("coalesced_kernel", (32, 8), 8, 32),
        product_rung("shared_kernel", (1024,), 32, 32),
        product_rung("column_of_8_kernel", (512,), 64, 64),
        product_rung("square_of_8_kernel", (256,), 128, 128),
        product_rung("vectorised_kernel", (256,), 128, 128, fours=True),
        product_rung("warp_tiles_kernel", (256,), 128, 128, fours=True),
        product_rung("mma_kernel", (256,), 128, 128, fours=True, tf32=True),
        product_rung("two_stages_kernel", (256,), 128, 128, fours=True, tf32=True),
        Rung("cuBLAS in fp32", cublas_in("fp32"), "NVIDIA's own, without tensor cores."),
        Rung("cuBLAS in TF32", cublas_in("tf32"), "NVIDIA's own, which training uses.", tf32=True),
    ],
)  # fmt: skip


def tiles_of_32(a: SimpleNamespace) -> tuple:
    return ceil_div(a.C, 32), ceil_div(a.N, 32)


TOPICS["transpose"] = Topic(
    reads="inp=N,C", sets="out=C,N", adds="", scratch="",
    odd={"N": 67, "C": 45}, fours={"N": 68, "C": 44}, round={"N": 128, "C": 128}, bench={"N": 4096, "C": 3072},
    reference=lambda a: {"out": a.inp.T},
    bytes=lambda s: 8 * s.N * s.C,
    rungs=[
        rung("rows_in_kernel", lambda a: (ceil_div(a.C, 32), ceil_div(a.N, 8)), (32, 8)),
        rung("rows_out_kernel", lambda a: (ceil_div(a.N, 32), ceil_div(a.C, 8)), (32, 8)),
        rung("tile_kernel", tiles_of_32, (32, 8)),
        rung("padded_tile_kernel", tiles_of_32, (32, 8)),
        Rung("transpose of kernels/matmul.py", lambda cu, a: transpose(a.out, a.inp, a.N, a.C),
             "Tiles of 64 x 64, which device memory gives and takes by 16 bytes."),
    ],
)  # fmt: skip


def gelu(a: SimpleNamespace) -> dict:
    x = a.inp + a.bias
    return {"out": 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))}


TOPICS["gelu"] = Topic(
    reads="inp=N,C bias=C", sets="out=N,C", adds="", scratch="",
    odd={"N": 5, "C": 301}, fours={"N": 5, "C": 300}, round={"N": 8, "C": 1024}, bench={"N": 4096, "C": 3072},
    reference=gelu,
    bytes=lambda s: 8 * s.N * s.C,
    rungs=[
        Rung("formula_kernel",
             lambda cu, a: launch(cu, a, "formula_kernel", grid(a.N * a.C), (256,), n=a.N * a.C)),
        rung("sigmoid_kernel", lambda a: (a.N, ceil_div(a.C, 256))),
        rung("float4_kernel", lambda a: (a.N, ceil_div(a.C, 1024)), fours=True),
        Rung("gelu_forward of kernels/gelu.py", lambda cu, a: gelu_forward(a.out, a.inp, a.bias, a.N, a.C),
             "The same, for any C and any place of the bias."),
    ],
)  # fmt: skip


def gelu_gradients(a: SimpleNamespace) -> dict:
    x = a.inp + a.bias
    tanh_u = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    dinp = a.dout * (0.5 * (1 + tanh_u) + 0.5 * x * (1 - tanh_u**2) * slope)
    return {"dout": dinp, "out_T": (0.5 * x * (1 + tanh_u)).T, "dbias": a.dbias + dinp.sum(axis=0)}


def scattered(cu: device.Source, a: SimpleNamespace) -> None:
    launch(cu, a, "scattered_kernel", grid(a.N * a.C), (256,))
    column_sum(a.dbias, a.dout, a.N, a.C)


def kernel_a_result(cu: device.Source, a: SimpleNamespace) -> None:
    launch(cu, a, "derivative_kernel", (a.N, ceil_div(a.C, 256)), (256,))
    gelu_forward(a.out, a.inp, a.bias, a.N, a.C)
    transpose(a.out_T, a.out, a.N, a.C)
    column_sum(a.dbias, a.dout, a.N, a.C)


def by_tiles(cu: device.Source, a: SimpleNamespace) -> None:
    launch(cu, a, "tile_kernel", tiles_of_32(a), (32, 8))
    column_sum(a.dbias, a.dout, a.N, a.C)


def with_sums(cu: device.Source, a: SimpleNamespace) -> None:
    rows = rows_per_chunk(a.N, multiple=32)
    chunks = ceil_div(a.N, rows)
    launch(cu, a, "sums_kernel", (ceil_div(a.C, 32), chunks), (32, 8), rows=rows)
    add_partials([a.dbias], a.partials, chunks, a.C)


TOPICS["gelu_backward"] = Topic(
    reads="inp=N,C bias=C", sets="out_T=C,N", adds="dout=N,C dbias=C", scratch="out=N,C partials=P,C",
    odd={"N": 67, "C": 45}, fours={"N": 68, "C": 44}, round={"N": 128, "C": 128}, bench={"N": 4096, "C": 3072},
    reference=gelu_gradients,
    bytes=lambda s: 16 * s.N * s.C,
    rungs=[
        Rung("scattered_kernel", scattered),
        Rung("derivative_kernel", kernel_a_result),
        Rung("tile_kernel", by_tiles),
        Rung("sums_kernel", with_sums),
        Rung("gelu_backward of kernels/gelu.py",
             lambda cu, a: gelu_backward(a.dout, a.dbias, a.out_T.T, a.dout, a.inp, a.bias, a.N, a.C),
             "Four columns per thread: accesses of 16 bytes and tiles of 64 x 64."),
    ],
)  # fmt: skip


def tokens(size: SimpleNamespace, given: dict) -> dict:
    """Token ids much as texts have them: the commonest is a tenth of all, and most are rare (Zipf)."""
    inp = (np.random.default_rng(2).zipf(1.1, size.N) % size.V).astype(np.int32)
    order, count = sort_by_token(inp)
    return {"inp": inp, "order": order, "count": count}


def embedding_gradient(a: SimpleNamespace) -> dict:
    dwte = a.dwte.copy()
    np.add.at(dwte, a.inp, a.dout)
    return {"dwte": dwte}


def different_tokens(size: SimpleNamespace) -> int:
    return int(np.count_nonzero(tokens(size, {})["count"]))


TOPICS["embedding_backward"] = Topic(
    reads="dout=N,C", sets="", adds="dwte=V,C", scratch="",
    odd={"N": 71, "C": 37, "V": 29}, fours={"N": 71, "C": 36, "V": 29}, round={"N": 128, "C": 256, "V": 100},
    bench={"N": 4096, "C": 768, "V": 50257},
    reference=embedding_gradient, others=tokens,
    bytes=lambda s: 4 * s.C * (s.N + 2 * different_tokens(s)),
    rungs=[
        rung("thread_a_channel_kernel", lambda a: grid(a.C, block=64), (64,)),
        rung("atomics_kernel", lambda a: (a.N, ceil_div(a.C, 256)), ordered=False),
        rung("sorted_kernel", lambda a: (a.N,)),
        Rung("encoder_backward of kernels/encoder.py",
             lambda cu, a: encoder_backward(a.dwte, None, a.dout, a.inp, a.order, a.count, 1, a.N, a.C),
             "Four channels per thread, and four threads share the positions of a token."),
    ],
)  # fmt: skip


def with_targets(size: SimpleNamespace, given: dict) -> dict:
    return {"targets": np.random.default_rng(3).integers(0, size.V, size.N, np.int32)}


def cross_entropy(a: SimpleNamespace) -> dict:
    x, rows = a.logits[:, : a.V], np.arange(a.N)
    largest = x.max(axis=1, keepdims=True)
    p = np.exp(x - largest)
    total = p.sum(axis=1, keepdims=True)
    losses = (np.log(total) + largest)[:, 0] - x[rows, a.targets]
    gradient = np.zeros_like(a.logits)
    gradient[:, : a.V] = p / total * a.dloss
    gradient[rows, a.targets] -= a.dloss
    return {"losses": losses, "logits": gradient}


TOPICS["classifier"] = Topic(
    reads="", sets="losses=N", adds="logits=N,Vp", scratch="",
    odd={"N": 3, "V": 1501, "Vp": 1504}, fours={"N": 3, "V": 1501, "Vp": 1512}, round={"N": 8, "V": 4000, "Vp": 4096},
    bench={"N": 4096, "V": 50257, "Vp": 50304},
    reference=cross_entropy, others=with_targets, numbers={"dloss": 0.25},
    bytes=lambda s: 8 * s.N * s.Vp,
    rungs=[
        rung("thread_a_row_kernel", lambda a: grid(a.N, block=32), (32,)),
        rung("block_a_row_kernel", lambda a: (a.N,), (1024,)),
        rung("online_kernel", lambda a: (a.N,), (1024,)),
        rung("float4_kernel", lambda a: (a.N,), (1024,), fours=True),
        Rung("fused_classifier of kernels/classifier.py",
             lambda cu, a: fused_classifier(a.logits, a.losses, float(a.dloss), a.targets, 1, a.N, a.V, a.Vp),
             "The row waits in shared memory, as far as it fits, instead of coming a second time."),
    ],
)  # fmt: skip


def causal_softmax(a: SimpleNamespace) -> dict:
    x = a.scale * a.att.reshape(-1, a.T, a.T)
    x = np.where(np.tri(a.T, dtype=bool), x, -np.inf)
    p = np.exp(x - x.max(axis=2, keepdims=True))
    return {"att": (p / p.sum(axis=2, keepdims=True)).reshape(a.att.shape)}


def softmax_rung(kernel: str, grid: Callable[[SimpleNamespace], tuple], block: tuple) -> Rung:
    return Rung(kernel, lambda cu, a: launch(cu, a, kernel, grid(a), block, rows=a.H * a.T))


TOPICS["softmax"] = Topic(
    reads="", sets="", adds="att=H*T,T", scratch="",
    odd={"H": 2, "T": 37}, fours={"H": 2, "T": 44}, round={"H": 1, "T": 128}, bench={"H": 48, "T": 1024},
    reference=causal_softmax, numbers={"scale": 0.125},
    bytes=lambda s: 6 * s.H * s.T * s.T,
    rungs=[
        softmax_rung("thread_a_row_kernel", lambda a: grid(a.H * a.T, block=64), (64,)),
        softmax_rung("block_a_row_kernel", lambda a: (a.H * a.T,), (256,)),
        softmax_rung("warp_a_row_kernel", lambda a: grid(a.H * a.T, block=8), (32, 8)),
        softmax_rung("online_kernel", lambda a: grid(a.H * a.T, block=8), (32, 8)),
        Rung("softmax_forward_kernel of kernels/attention.cu",
             lambda cu, a: attention.launch_by_att_row(
                 "softmax_forward_kernel", a.H * a.T, (a.att, a.scale, a.H * a.T, a.T)),
             "Four entries a lane by accesses of 16 bytes, and one rescaling for the four."),
    ],
)  # fmt: skip


def causal_attention(a: SimpleNamespace) -> dict:
    q, k, v = a.qkv.transpose(2, 0, 3, 1, 4)  # each (B, NH, T, HS)
    x = np.where(np.tri(a.T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    largest = x.max(axis=3, keepdims=True)
    p = np.exp(x - largest)
    total = p.sum(axis=3, keepdims=True)
    return {"out": (p / total @ v).transpose(0, 2, 1, 3), "lse": (largest + np.log(total))[..., 0]}


def attention_rung(kernel: str, threads: int, tf32: bool = True) -> Rung:
    return rung(kernel, lambda a: (a.B * a.NH, ceil_div(a.T, 64)), (threads,), tf32=tf32)


TOPICS["flash_attention"] = Topic(
    reads="qkv=B,T,3,NH,64", sets="out=B,T,NH,64 lse=B,NH,T", adds="", scratch="",
    odd={"B": 1, "T": 69, "NH": 2}, fours={"B": 2, "T": 20, "NH": 1}, round={"B": 1, "T": 128, "NH": 1},
    bench={"B": 4, "T": 1024, "NH": 12},
    reference=causal_attention,
    bytes=lambda s: 16 * s.B * s.T * s.NH * 64,
    flops=lambda s: 2 * s.T**2 * 64 * s.B * s.NH,  # half of 4 T^2 HS: what lies above the diagonal does not count
    rungs=[
        attention_rung("scalar_kernel", 64, tf32=False),
        attention_rung("tiled_kernel", 64, tf32=False),
        attention_rung("mma_kernel", 128),
        attention_rung("registers_kernel", 128),
        attention_rung("swizzled_kernel", 128),
        attention_rung("two_stages_kernel", 128),
        Rung("flash_attention_forward of kernels/flash_attention.py",
             lambda cu, a: flash_attention_forward(a.out, a.lse, a.qkv, a.B, a.T, a.NH, a.NH, 64),
             "32 queries per warp, so each operand that is loaded serves four products, by wide loads.", tf32=True),
    ],
)  # fmt: skip


def of_forward(size: SimpleNamespace, given: dict) -> dict:
    """What forward has left for backward. A head at a time, so that its scores stay in a cache."""
    out = np.empty((size.B, size.T, size.NH, 64), np.float32)
    lse = np.empty((size.B, size.NH, size.T), np.float32)
    for b, h in np.ndindex(size.B, size.NH):
        left = causal_attention(SimpleNamespace(qkv=given["qkv"][b : b + 1, :, :, h : h + 1], T=size.T))
        out[b, :, h], lse[b, h] = left["out"][0, :, 0], left["lse"][0, 0]
    return {"out": out, "lse": lse}


def attention_gradients(a: SimpleNamespace) -> dict:
    q, k, v = a.qkv.transpose(2, 0, 3, 1, 4)  # each (B, NH, T, HS)
    dout = a.dout.transpose(0, 2, 1, 3)
    x = np.where(np.tri(a.T, dtype=bool), q @ k.swapaxes(2, 3) / 8, -np.inf)
    p = np.exp(x - x.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(axis=3, keepdims=True)) / 8
    gradients = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout
    return {"dqkv": np.stack(gradients).transpose(1, 3, 0, 2, 4)}


def backward_rung(kernel: str, passes: int, tf32: bool = True) -> Rung:
    """Blocks with 64 rows: of queries and of keys, or in one pass of keys alone, which add to dq with atomics."""

    def work(cu: device.Source, a: SimpleNamespace) -> None:
        rows, dqkv = a.B * a.T * a.NH, a.dqkv if passes == 1 else None
        launch(cu, a, "dsum_kernel", grid(rows, block=8), (32, 8), rows=rows, dqkv=dqkv)
        launch(cu, a, kernel, (a.B * a.NH, ceil_div(a.T, 64), passes), (128,))

    return Rung(kernel, work, tf32=tf32, ordered=passes > 1)


TOPICS["flash_attention_backward"] = Topic(
    reads="qkv=B,T,3,NH,64 dout=B,T,NH,64", sets="dqkv=B,T,3,NH,64", adds="", scratch="dsum=B,NH,T",
    odd={"B": 1, "T": 69, "NH": 2}, fours={"B": 2, "T": 20, "NH": 1}, round={"B": 1, "T": 128, "NH": 1},
    bench={"B": 4, "T": 1024, "NH": 12},
    reference=attention_gradients, others=of_forward,
    bytes=lambda s: 32 * s.B * s.T * s.NH * 64,
    flops=lambda s: 5 * s.T**2 * 64 * s.B * s.NH,  # the five products that must be, half of each
    rungs=[
        backward_rung("scalar_kernel", 2, tf32=False),
        backward_rung("tiled_kernel", 2, tf32=False),
        backward_rung("mma_kernel", 2),
        backward_rung("atomics_kernel", 1),
        backward_rung("two_stages_kernel", 2),
        Rung("flash_attention_backward of kernels/flash_attention.py",
             lambda cu, a: flash_attention_backward(
                 a.dqkv, a.dout, a.out, a.lse, a.qkv, a.B, a.T, a.NH, a.NH, 64),
             "32 rows per warp and wide loads, the mask only where the diagonal is, and the longest blocks first.",
             tf32=True),
    ],
)  # fmt: skip

RECIPE = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "t": 3}
FACTORS = {
    "complement1": 1 - 0.9, "complement2": 1 - 0.999, "correction1": 1 - 0.9**3, "correction2": 1 - 0.999**3,
}  # fmt: skip


def adamw_step(a: SimpleNamespace) -> dict:
    m = a.beta1 * a.m + (1 - a.beta1) * a.grads
    v = a.beta2 * a.v + (1 - a.beta2) * a.grads**2
    step = m / (1 - a.beta1**a.t) / (np.sqrt(v / (1 - a.beta2**a.t)) + a.eps)
    return {"params": a.params - a.lr * (step + a.weight_decay * a.params), "m": m, "v": v}


def moments(size: SimpleNamespace, given: dict) -> dict:
    """v is a mean of squares; norm is what global_norm leaves where nothing is clipped."""
    return {"v": abs(given["v"]), "norm": np.array([1, 1, 0, 0], np.float32)}


def line_by_line(cu: device.Source, a: SimpleNamespace) -> None:
    for kernel in "moment1_kernel", "moment2_kernel", "step_kernel":
        launch(cu, a, kernel, grid(a.n), (256,))


TOPICS["adamw"] = Topic(
    reads="grads=n", sets="", adds="params=n m=n v=n", scratch="",
    odd={"n": 1003}, fours={"n": 1004}, round={"n": 4096}, bench={"n": 1 << 25},
    reference=adamw_step, others=moments, numbers=RECIPE | FACTORS,
    bytes=lambda s: 28 * s.n,
    rungs=[
        Rung("moment1_kernel", line_by_line),
        rung("fused_kernel", lambda a: grid(a.n)),
        rung("float4_kernel", lambda a: grid(a.n, block=1024), fours=True),
        Rung("adamw of kernels/adamw.py",
             lambda cu, a: adamw(a.params, a.grads, a.m, a.v, a.norm, a.n, *RECIPE.values()),
             "The same with the factor that clips, and a guard against gradients that are not finite."),
    ],
)  # fmt: skip

TOPICS["matmul_bf16"] = Topic(
    reads="a=M,K b=K,N", sets="c=M,N", adds="", scratch="", bf16=("a", "b", "c"),
    odd={"M": 37, "N": 41, "K": 35}, fours={"M": 133, "N": 136, "K": 40},
    round={"M": 128, "N": 128, "K": 64}, bench={"M": 4096, "N": 3072, "K": 768},
    reference=lambda a: {"c": a.a @ a.b},
    bytes=lambda s: 2 * (s.M * s.K + s.K * s.N + s.M * s.N),
    flops=lambda s: 2 * s.M * s.N * s.K,
    rungs=[
        product_rung("fma_kernel", (256,), 128, 128, fours=True),
        product_rung("mma_kernel", (256,), 128, 128, fours=True),
        product_rung("ldmatrix_kernel", (256,), 128, 128, fours=True),
        product_rung("two_stages_kernel", (256,), 128, 128, fours=True),
        Rung("cuBLAS in bf16", cublas, "NVIDIA's own, which training uses."),
    ],
)  # fmt: skip


def hopper_rung(kernel: str, columns: int, stages: int, blocks: int = 0, buffer: int = 0, barriers: int = 0) -> Rung:
    """A block makes 128 x columns elements. In shared memory it holds `stages` pairs of tiles with two mbarriers each,
    `buffer` bytes, and so many other mbarriers. blocks: of a cluster, where blocks stay and take one tile after the
    other."""

    def work(cu: device.Source, a: SimpleNamespace) -> None:
        arrays, block = (a.c, a.a, a.b), (256 if stages == 1 else 384,)
        if kernel != "wgmma_kernel":
            in_a, in_b = (1, 128, 64), (1, 64, 64)
            arrays = a.c, device.tensor_map(a.a, (1, a.M, a.K), in_a), device.tensor_map(a.b, (1, a.K, a.N), in_b)
        if buffer:
            arrays = device.tensor_map(a.c, (1, a.M, a.N), (1, 16, 64)), *arrays[1:]
        grid = (device.multiprocessors // blocks * blocks,) if blocks else (ceil_div(a.N, columns), ceil_div(a.M, 128))
        shared = stages * ((128 + columns) * 64 * 2 + 16) + buffer + 8 * barriers
        cu.launch(kernel, grid, block, (*arrays, a.M, a.N, a.K), shared_mem=shared)

    return Rung(kernel, work, fours=True)


TOPICS["matmul_hopper"] = Topic(
    reads="a=M,K b=K,N", sets="c=M,N", adds="", scratch="", bf16=("a", "b", "c"),
    odd={"M": 37, "N": 41, "K": 35}, fours={"M": 261, "N": 264, "K": 264},
    round={"M": 256, "N": 256, "K": 256}, bench={"M": 8192, "N": 8192, "K": 8192},
    reference=TOPICS["matmul_bf16"].reference, bytes=TOPICS["matmul_bf16"].bytes, flops=TOPICS["matmul_bf16"].flops,
    gpu="NVIDIA H100 80GB HBM3",
    rungs=[
        hopper_rung("wgmma_kernel", 128, 1),
        hopper_rung("tma_kernel", 128, 1),
        hopper_rung("ring_kernel", 128, 4),
        hopper_rung("wide_kernel", 256, 4),
        hopper_rung("persistent_kernel", 256, 4, blocks=1),
        hopper_rung("cluster_kernel", 256, 4, blocks=2),
        hopper_rung("store_kernel", 256, 4, blocks=2, buffer=8 * 2 * 16 * 64 * 2),
        hopper_rung("pingpong_kernel", 192, 4, blocks=2, buffer=8 * 3 * 16 * 64 * 2, barriers=2),
        TOPICS["matmul_bf16"].rungs[-1],
    ],
)  # fmt: skip

TOPICS["flash_attention_bf16"] = Topic(
    reads="qkv=B,T,3,NH,64", sets="out=B,T,NH,64 lse=B,NH,T", adds="", scratch="", bf16=("qkv", "out"),
    odd={"B": 1, "T": 69, "NH": 2}, fours={"B": 2, "T": 24, "NH": 1}, round={"B": 1, "T": 128, "NH": 1},
    bench={"B": 4, "T": 1024, "NH": 12},
    reference=causal_attention,
    bytes=lambda s: 8 * s.B * s.T * s.NH * 64,
    flops=TOPICS["flash_attention"].flops,
    rungs=[
        attention_rung("registers_kernel", 128, tf32=False),
        attention_rung("ldmatrix_kernel", 128, tf32=False),
        attention_rung("swizzled_kernel", 128, tf32=False),
        attention_rung("two_stages_kernel", 128, tf32=False),
        Rung("flash_attention_forward without wgmma of kernels/flash_attention.cu",
             lambda cu, a: flash_attention_forward(a.out, a.lse, a.qkv, a.B, a.T, a.NH, a.NH, 64, wgmma=False),
             "32 queries per warp, so each ldmatrix serves four products instead of two; sums are seldom rescaled."),
        Rung("flash_attention_forward of kernels/flash_attention.py",
             lambda cu, a: flash_attention_forward(
                 a.out, a.lse, a.qkv, a.B, a.T, a.NH, a.NH, 64, wgmma=device.kind == "cpu" or None),
             "On Hopper by wgmma: products of 64 rows that read keys and values in shared memory themselves, while the "
             "warps take exponentials."),
    ],
)  # fmt: skip
