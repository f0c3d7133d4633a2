"""No kernel lacks a barrier: whichever thread of a block goes first, the results are the same to the last bit.

The CPU device can run the threads of a block, between two waits, forward or shuffled (LLMC_CPU_ORDER). What
one thread reads that another wrote without a barrier between them then differs.
"""

import zlib
from dataclasses import replace
from pathlib import Path

import device
from dev.microscope.launches import quantized
from device import cpp, cpu
from kernels import flash_attention
from kernels.adamw import join, split
from kernels.cached_attention import Cached, cached_attention_forward
from kernels.dropout import Dropout
from kernels.encoder import add_sparse, encoder_backward, encoder_backward_sparse
from kernels.exchange import checksum, gather_rows, sum_buffers
from kernels.flash_attention import flash_attention_backward, flash_attention_forward
from kernels.fp8.quantize import quantize
from kernels.fp8.quantized import Quantized, Scale, WeightOnly
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_recompute
from kernels.matmul import matmul_forward, matvec
from kernels.norm import recompute_norm
from kernels.parallel_residual import parallel_residual_backward, parallel_residual_forward
from kernels.qk_norm import qk_norm_backward
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_recompute
from kernels.rope import rope_table
from kernels.sampling import sample
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.data.batches import Batches
from llmc.data.dataloader import sort_by_token
from llmc.model.batch import random_words
from llmc.model.tensors import Config
from llmc.model.weights import randomize
from llmc.step.training import make_training
from models import ONE_OF_EACH, kind_of
from oracle import normal
from train_gpt2_fp32 import GPT2Config, training_step
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
ORDERS = ["forward", "shuffled"]


@pytest.fixture
def launches(monkeypatch) -> list:
    """The kernels launched since the list was last cleared, each with the checksum of what its arrays then held. What
    the device allocates holds zeros, also where nobody writes."""
    monkeypatch.setenv("LLMC_CPU_WARP", "32")
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "empty", lambda shape, dtype=np.float32: np.zeros(shape, dtype))
    seen = []
    run = cpp.Kernel.__call__

    def run_and_note(kernel, grid, block, args, shared_mem=0):
        run(kernel, grid, block, args, shared_mem)
        checksum = 0
        for array in args:
            if type(array) is np.ndarray:  # a tensor map has an address
                checksum = zlib.crc32(array, checksum)
        seen.append((kernel.name, checksum))

    monkeypatch.setattr(cpp.Kernel, "__call__", run_and_note)
    return seen


def results_by_order(launches: list, monkeypatch, work) -> list[list]:
    results = []
    for order in ORDERS:
        monkeypatch.setenv("LLMC_CPU_ORDER", order)
        launches.clear()
        device.regions.clear()
        work()
        results.append(list(launches))
    return results


class OneBatch:
    """A loader of one random batch, of V tokens, in which many positions hold the same one."""

    def __init__(self, V: int):
        self.V = V

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        inputs[:], targets[:] = np.random.default_rng(1).integers(0, self.V, (2, *inputs.shape), dtype=np.int32)
        inputs.reshape(-1)[: inputs.size // 2] = 5


def step_of(config: Config, attention: str, B: int, T: int, rate: float = 0.0):
    """A function that makes a model and trains it for a step."""

    def work():
        training = make_training(
            kind_of(config), config, B, T, attention, weight_decay=0.1, grad_clip=0.1,
            dropout=(rate, 1) if rate else None,
        )  # fmt: skip
        randomize(training.model, training.adamw, seed=1)
        training_step(training, Batches(training.batch, training.acts.losses, OneBatch(config.vocab_size)))(0, 1e-3)

    return work


ROWS, MANY = 512, 17  # so many rows are worth transposing here; 32 MANY are more
STEPS = {
    "softmax, odd sizes": (GPT2Config(21, 1101, 1, 3, 33), "softmax", 2, 21),
    "softmax, more rows than a pass takes": (GPT2Config(MANY, 101, 1, 1, 8), "softmax", 32, MANY),
    "llama, more rows than a pass takes": (Llama3Config(MANY, 101, 1, 2, 2, 8, 9, tied=False), "softmax", 32, MANY),
    "pythia, dropout": (PythiaConfig(21, 1101, 1, 3, 33, rotary=0.6), "softmax", 2, 21, 0.2),
    "pythia, RMSNorm": (PythiaConfig(21, 1101, 1, 3, 24, norm="rms", tied_norm=True, gelu="erf"), "softmax", 2, 21),
    "pythia, sequential, flash": (PythiaConfig(70, 1101, 1, 2, 128, parallel=False), "flash", 1, 70),
    "llama, flash, heads of 128": (Llama3Config(70, 1101, 1, 2, 1, 256, 80), "flash", 1, 70),
} | {
    f"{config.NAME}, {attention}": (replace(config, vocab_size=1101, num_layers=1), attention, 1, 70 if flash else 21)
    for config, attention in ONE_OF_EACH for flash in [attention == "flash"]
}


def parallel_residual(N: int, C: int, rate: float):
    """A function that takes a parallel residual forward and back."""

    def work():
        rng = np.random.default_rng(3)
        words = random_words((rate, 1), 0, 0)
        drops = [Dropout(words, site) if rate else None for site in range(2)]
        weight0, shift0, weight1, shift1, *sums = (normal(rng, C) for _ in range(10))
        residual, out0, out1, dproj0, dproj1, out_again = (np.zeros((N, C), np.float32) for _ in range(6))
        stats, norms = (np.zeros(N, np.float32), np.zeros(N, np.float32)), [(weight0, shift0), (weight1, shift1)]
        inp, proj0, proj1, dinp, dout0, dout1 = (normal(rng, N, C) for _ in range(6))
        branches = list(zip((proj0, proj1), drops, strict=True))
        parallel_residual_forward(residual, [out0, out1], stats, inp, norms, 1e-5, 1, N, C, branches=branches)
        recompute_norm(out_again.reshape(C, N).T, residual, norms[1], stats, 1, N, C)
        branches = list(zip((dproj0, dproj1), sums[4:], drops, strict=True))
        parallel_residual_backward(
            dinp, [sums[:2], sums[2:4]], [dout0, dout1], residual, norms, stats, 1, N, C, branches=branches
        )

    return work


# Their addresses are arguments of kernels, and must be the same in every order.
SUMS, PARTS = np.zeros(1001, np.float32), np.zeros((3, 1001), np.float32)


def exchange():
    """A batch's rows of an embedding from three ranks; adds what they have in their order, and takes a checksum; a
    batch's rows for the embedding's gradient."""
    rng = np.random.default_rng(4)
    PARTS[:] = normal(rng, 3, 1001)
    to, sources = (np.array([x.__array_interface__["data"][0] for x in found], np.uint64) for found in ([SUMS], PARTS))
    tokens, dout = rng.integers(0, 20, (2, 16), dtype=np.int32), normal(rng, 32, 33)
    sorted_ = sort_by_token(tokens)
    gather_rows(sources, 0, 336, 5, tokens, *sorted_, 32, 33)
    sum_buffers(to, sources, [(0, 1001)], 3)
    checksum(SUMS)
    values, indices, dwte = np.zeros((32, 33), np.float32), np.zeros(32, np.int32), np.zeros((20, 33), np.float32)
    encoder_backward_sparse(values, indices, None, dout, tokens, *sorted_, 2, 16, 33)
    add_sparse(dwte, values, indices, 32, 33)


def wgmma():
    """Flash attention by Hopper's matrix product, of more tiles than are in shared memory at a time. Query heads that
    share keys have a block of backward_key each, or one together."""
    device.use_precision("bf16")
    rng, usual = np.random.default_rng(6), flash_attention.min_blocks

    def one() -> int:
        return 1

    for T, NH, HS, min_blocks in (261, 2, 64, usual), (261, 1, 128, usual), (197, 2, 64, one), (197, 2, 128, one):
        flash_attention.min_blocks, sizes = min_blocks, (1, T, NH, 1, HS)
        qkv, dout = (device.to_bf16(normal(rng, 1, T, heads, HS)) for heads in (NH + 2, NH))
        dqkv, out, lse = np.zeros_like(qkv), np.zeros_like(dout), np.zeros((1, NH, T), np.float32)
        flash_attention_forward(out, lse, qkv, *sizes, wgmma=True)
        flash_attention_backward(dqkv, dout, out, lse, qkv, *sizes, wgmma=True)
    flash_attention.min_blocks = usual
    device.use_precision("fp32")


def text():
    """A query of each of two texts, whose keys two blocks share, of two tiles each, and tokens drawn."""
    rng, starts = np.random.default_rng(5), np.array([190, 70], np.int32)
    for NH, NKV, HS in (2, 2, 20), (10, 2, 64):
        keys, values = (normal(rng, 2, NKV, 256, HS) for _ in range(2))
        out, qkv = np.zeros((2, NH, HS), np.float32), normal(rng, 2, 1, NH + 2 * NKV, HS)
        cached_attention_forward(out, Cached(keys, values, starts), qkv, 2, 1, NH, NKV, HS, splits=2)
    for C in 33, 1100:  # a warp for each output, and several
        matvec(np.zeros(5, np.float32), normal(rng, C), normal(rng, 5, C), normal(rng, 5), C, 5)
    tokens, states = np.zeros(2, np.int32), np.array([5, 6], np.uint64)
    logits = normal(rng, 2, 1152)
    for how in {}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.5}:
        sample(tokens, starts, states, logits, 2, 1101, 1152, 256, **how)


def master_copy():
    """Is taken apart, and put together again."""
    values = normal(np.random.default_rng(7), 1000)
    (params, low), v, joined = np.zeros((2, 1000), np.uint16), abs(values), np.zeros(1000, np.float32)
    split(params, values, 1000, low=low, v=v)
    join(joined, params, low, v, 1000)


def fp8():
    """Quantized matrices of several tiles, with transposed copies; and the kernels that read one as a weight."""
    device.use_precision("bf16")
    N, C = 80, 272
    inp = device.to_bf16(normal(np.random.default_rng(8), N, C))
    weight = WeightOnly(np.zeros((N, C), np.uint8), np.zeros(1, np.float32))
    quantize(Quantized(weight.q, np.zeros((C, N), np.uint8), Scale("weight", weight.scale)), inp, N, C)
    for rows in 1, 2:
        matmul_forward(np.zeros((rows, N), np.uint16), inp[:rows], weight, None, 1, rows, C, N)
    H, dout, dbias = C // 2, np.ascontiguousarray(inp[:, : C // 2]), np.zeros(C, np.float32)
    for erf in False, True:
        gelu_forward(quantized(N, C), inp, inp[0], N, C, erf)
        gelu_backward(quantized(N, C), dbias, quantized(N, C), inp, inp, inp[0], N, C, erf)
    residual, stats, norm = np.empty_like(inp), np.ones((2, N), np.float32), (inp[0], inp[1])
    out = quantized(N, C)
    fused_residual_forward(residual, out, stats, inp, inp[::-1].copy(), norm, 1, N, C)
    layernorm_recompute(out, residual, norm, stats, 1, N, C)
    fused_residual_rmsnorm_forward(residual, out, stats[1], inp, inp[::-1].copy(), norm[0], 1e-5, 1, N, C)
    rmsnorm_recompute(out, residual, norm[0], stats[1], 1, N, C)
    swiglu_forward(quantized(N, H), inp, N, H)
    swiglu_backward(quantized(N, C), quantized(N, H), dout, inp, N, H)
    NH, NKV, HS = 2, 1, 128
    qkv, dout = (device.to_bf16(normal(np.random.default_rng(each), N, (NH + 2 * NKV) * HS)) for each in (9, 10))
    rstd, sums = np.ones((N, NH + NKV), np.float32), np.zeros((2, HS), np.float32)
    qk_norm_backward(
        quantized(N, qkv.shape[1]), sums, dout, qkv, (qkv[0], qkv[1]), rstd, rope_table(N, HS, 1e4),
        1, N, NH, NKV, HS,
    )  # fmt: skip
    device.use_precision("fp32")


def several_passes() -> None:
    """The backward kernels that come back to shared memory, with so many rows or channels that they do."""
    rng = np.random.default_rng(2)
    N, C = 9, 2100
    tokens = np.full(N, 3, np.int32)
    dwte, dwpe = np.zeros((5, C), np.float32), np.zeros((N, C), np.float32)
    encoder_backward(dwte, dwpe, normal(rng, N, C), tokens, *sort_by_token(tokens), 1, N, C)
    N, C = 200, 300
    dinp, dout, inp = (normal(rng, N, C) for _ in range(3))
    dnorm, stats = (np.zeros(C, np.float32), np.zeros(C, np.float32)), (normal(rng, N), abs(normal(rng, N)))
    layernorm_backward(dinp, dnorm, dout, inp, (normal(rng, C), normal(rng, C)), stats, 1, N, C)


WORKS = {name: step_of(*step) for name, step in STEPS.items()} | {
    "parallel residual": parallel_residual(9, 33, 0.0),
    "parallel residual, several rows and passes": parallel_residual(200, 2100, 0.0),
    "parallel residual, dropout": parallel_residual(200, 2100, 0.2),
    "parallel residual, sums in partials": parallel_residual(50, 9004, 0.0),
    "exchange": exchange, "text": text, "wgmma": wgmma, "shared memory again": several_passes,
    "master copy": master_copy, "fp8": fp8,
}

launched: set[str] = set()


@pytest.mark.parametrize("name", WORKS)
def test_the_order_of_threads_changes_no_bit_of_any_kernels_results(launches, monkeypatch, name):
    monkeypatch.setattr("kernels.matmul.ROWS_WORTH_TRANSPOSING", ROWS)
    forward, shuffled = results_by_order(launches, monkeypatch, WORKS[name])
    for (name, crc), (name_there, crc_there) in zip(forward, shuffled, strict=True):
        assert name == name_there
        assert crc == crc_there, f"{name} depends on the order of its threads"
    launched.update(name for name, _ in forward)


def test_every_kernel_was_among_them():
    if not launched:
        pytest.skip("the tests above have not run")
    files = [*sorted((ROOT / "kernels").rglob("*.cu")), cpu.PRODUCTS]
    assert launched == {name for path in files for name in cpp.compile_source(path).kernels}


@pytest.mark.parametrize("kernel, whole", [
    ("reverse_kernel", True), ("reads_too_early_kernel", False), ("overwrites_too_early_kernel", False),
])  # fmt: skip
def test_a_missing_barrier_is_caught(launches, monkeypatch, kernel, whole):
    kernel = cpp.compile_source(ROOT / "tests" / "cu" / "missing_barriers.cu").kernel(kernel)
    R, N = 5, 128
    x = np.random.default_rng(0).random((R, N), dtype=np.float32)

    def work():
        kernel((1,), (N,), (np.zeros_like(x), x, R, N))

    results = results_by_order(launches, monkeypatch, work)
    assert (results[0] == results[1]) is whole

