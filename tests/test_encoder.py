"""encoder.cu against PyTorch's embedding."""

from draws import factors, words
from kernels.dropout import Dropout
from kernels.encoder import add_sparse, encoder_backward, encoder_backward_sparse, encoder_forward, sort_by_token
from oracle import KERNEL_FP32, assert_close, guarded, leaf, normal, to_numpy

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


any_shape = given(B=st.integers(1, 4), T=st.integers(1, 20), C=st.integers(1, 150), V=st.integers(1, 60))


def check(dev, tokens: np.ndarray, C: int, V: int) -> None:
    """Forward and backward for tokens (B, T), with more rows in wte and wpe than are used."""
    B, T = tokens.shape
    rng = np.random.default_rng([B, T, C, V])
    wte, wpe, dout = normal(rng, V, C), normal(rng, T + 3, C), normal(rng, B, T, C)
    dwte, dwpe = normal(rng, V, C), normal(rng, T + 3, C)
    with guarded(dev) as memory, guarded(dev, shift=C % dev.width()) as parameters:
        out, inp = memory.write((B, T, C)), memory.read(tokens)
        encoder_forward(out, inp, parameters.read(wte), parameters.read(wpe), B, T, C)
        ours_dwte, ours_dwpe = parameters.update(dwte, FP32), parameters.update(dwpe, FP32)
        order, count = (memory.read(values) for values in sort_by_token(tokens))
        encoder_backward(ours_dwte, ours_dwpe, memory.read(dout), inp, order, count, B, T, C)
        sparse_dwte, sparse_dwpe = parameters.update(dwte, FP32), parameters.update(dwpe, FP32)
        values, indices = memory.scratch((B * T, C), FP32), memory.scratch((B * T,), np.int32)
        encoder_backward_sparse(values, indices, sparse_dwpe, memory.read(dout), inp, order, count, B, T, C)
        add_sparse(sparse_dwte, values, indices, B * T, C)
    token_rows, position_rows = leaf(wte), leaf(wpe)
    want = F.embedding(leaf(tokens).long(), token_rows) + position_rows[:T]
    (want * leaf(dout).detach()).sum().backward()
    assert_close("encoded", out, want, KERNEL_FP32)
    assert_close("dwte", ours_dwte, token_rows.grad + leaf(dwte), KERNEL_FP32)
    assert_close("dwpe", ours_dwpe, position_rows.grad + leaf(dwpe), KERNEL_FP32)
    assert_close("dwte by its rows", sparse_dwte, token_rows.grad + leaf(dwte), KERNEL_FP32)
    assert np.array_equal(dev.to_host(sparse_dwpe), dev.to_host(ours_dwpe))
    assert sorted(dev.to_host(indices)[dev.to_host(indices) >= 0]) == sorted(set(tokens.ravel()))


@any_shape
@example(B=2, T=8, C=64, V=50)
@example(B=1, T=5, C=7, V=11)
@example(B=3, T=33, C=130, V=40)
@example(B=1, T=1, C=1, V=1)
@example(B=3, T=17, C=64, V=1)  # one token everywhere
@example(B=3, T=17, C=13, V=1)
def test_encoder_equals_embedding_of_tokens_and_positions(dev, B, T, C, V):
    rng = np.random.default_rng(V)
    check(dev, rng.integers(0, V, (B, T), dtype=np.int32), C, V)


@pytest.mark.parametrize("C", [64, 13])
@pytest.mark.parametrize("positions", [True, False])
def test_the_embedding_is_dropped(dev, C, positions):
    rng = np.random.default_rng(C)
    B, T, V = 3, 9, 20
    tokens, wte, wpe = rng.integers(0, V, (B, T), dtype=np.int32), normal(rng, V, C), normal(rng, T, C)
    with guarded(dev) as memory:
        drop, out, rows = Dropout(memory.read(words(0.3)), 0), memory.write((B, T, C)), memory.read(wpe)
        encoder_forward(out, memory.read(tokens), memory.read(wte), rows if positions else None, B, T, C, drop)
    assert_close("dropped", out, (wte[tokens] + wpe * positions) * factors(drop, B, T, C).numpy(), KERNEL_FP32)


@any_shape
@example(B=2, T=8, C=64, V=50)
@example(B=1, T=5, C=7, V=11)
def test_encoder_without_position_embedding_takes_the_rows_of_wte_as_they_are(dev, B, T, C, V):
    rng = np.random.default_rng([B, T, C, V])
    tokens = rng.integers(0, V, (B, T), dtype=np.int32)
    wte, dwte, dout = normal(rng, V, C), normal(rng, V, C), normal(rng, B, T, C)
    with guarded(dev) as memory, guarded(dev, shift=C % dev.width()) as parameters:
        out, inp, ours_dwte = memory.write((B, T, C)), memory.read(tokens), parameters.update(dwte, FP32)
        encoder_forward(out, inp, parameters.read(wte), None, B, T, C)
        order, count = (memory.read(values) for values in sort_by_token(tokens))
        encoder_backward(ours_dwte, None, memory.read(dout), inp, order, count, B, T, C)
    assert (to_numpy(out) == wte[tokens]).all()
    want = leaf(dwte).detach().index_add(0, leaf(tokens).long().flatten(), leaf(dout).flatten(0, 1))
    assert_close("dwte alone", ours_dwte, want, KERNEL_FP32)


def test_encoder_backward_adds_to_the_rows_of_duplicated_tokens_and_to_no_others(dev):
    check(dev, np.array([[5, 0, 5, 2, 2, 5, 9]], dtype=np.int32), C=33, V=10)
