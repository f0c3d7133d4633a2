"""encoder.cu against PyTorch's embedding."""

import device
from kernels.dropout import Dropout
from kernels.encoder import add_sparse, encoder_backward, encoder_backward_sparse, encoder_forward, sort_by_token
from oracle import KERNEL_FP32, assert_close, leaf, normal, to_numpy
from support.draws import factors, words
from support.kernels import FP32, fp32, gradient, launch, parameter, scratch, shapes, write

import numpy as np
import pytest
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("each_type")


def check(tokens: np.ndarray, C: int, V: int, positions: bool = True) -> None:
    """Forward and backward for tokens (B, T), with more rows in wte and wpe than are used."""
    (B, T), shift = tokens.shape, C % device.width()
    rng = np.random.default_rng([B, T, C, V])
    wte, wpe, dout = normal(rng, V, C), normal(rng, T + 3, C), normal(rng, B, T, C)
    dwte, dwpe = normal(rng, V, C), normal(rng, T + 3, C)
    rows = parameter(wpe) if positions else None
    (out,) = launch(encoder_forward, write(B, T, C), tokens, parameter(wte), rows, B, T, C, shift=shift)
    batch = dout, tokens, *sort_by_token(tokens), B, T, C
    ours = launch(encoder_backward, gradient(dwte), gradient(dwpe) if positions else None, *batch, shift=shift)
    token_rows, position_rows = leaf(wte), leaf(wpe)
    want = F.embedding(leaf(tokens).long(), token_rows) + position_rows[:T] * positions
    (want * leaf(dout).detach()).sum().backward()
    assert_close("encoded", out, want, KERNEL_FP32)
    assert positions or (to_numpy(out) == wte[tokens]).all()
    assert_close("dwte", ours[0], token_rows.grad + leaf(dwte), KERNEL_FP32)
    if positions:
        assert_close("dwpe", ours[1], position_rows.grad + leaf(dwpe), KERNEL_FP32)
        places = scratch(B * T, C, dtype=FP32), scratch(B * T, dtype=np.int32), gradient(dwpe)
        values, indices, sparse_dwpe = launch(encoder_backward_sparse, *places, *batch, shift=shift)
        values, indices = map(device.to_host, (values, indices))
        (sparse_dwte,) = launch(add_sparse, gradient(dwte), fp32(values), indices, B * T, C, shift=shift)
        assert_close("dwte by its rows", sparse_dwte, token_rows.grad + leaf(dwte), KERNEL_FP32)
        assert np.array_equal(device.to_host(sparse_dwpe), device.to_host(ours[1]))
        assert sorted(indices[indices >= 0]) == sorted(set(tokens.ravel()))


@pytest.mark.parametrize("positions", [True, False])
@shapes(
    (2, 8, 64, 50), (1, 5, 7, 11), (3, 33, 130, 40), (1, 1, 1, 1),
    (3, 17, 64, 1), (3, 17, 13, 1),  # one token everywhere
    B=(1, 4), T=(1, 20), C=(1, 150), V=(1, 60),
)  # fmt: skip
def test_encoder_equals_embedding_of_tokens_and_where_there_are_any_positions(positions, B, T, C, V):
    check(np.random.default_rng(V).integers(0, V, (B, T), dtype=np.int32), C, V, positions)


@pytest.mark.parametrize("C", [64, 13])
@pytest.mark.parametrize("positions", [True, False])
def test_the_embedding_is_dropped(C, positions):
    rng = np.random.default_rng(C)
    B, T, V = 3, 9, 20
    tokens, wte, wpe = rng.integers(0, V, (B, T), dtype=np.int32), normal(rng, V, C), normal(rng, T, C)
    dropout = Dropout(words(0.3), 0)
    (out,) = launch(encoder_forward, write(B, T, C), tokens, wte, wpe if positions else None, B, T, C, dropout)
    assert_close("dropped", out, (wte[tokens] + wpe * positions) * factors(dropout, B, T, C).numpy(), KERNEL_FP32)


def test_encoder_backward_adds_to_the_rows_of_duplicated_tokens_and_to_no_others():
    check(np.array([[5, 0, 5, 2, 2, 5, 9]], dtype=np.int32), C=33, V=10)
