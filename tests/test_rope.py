"""rope.cu against rotations of complex numbers, and the table against transformers."""

from kernels.rope import rope_backward, rope_forward, rope_table
from oracle import KERNEL_FP32, assert_close, leaf, normal, to_numpy
from support.kernels import autograd, fp32, launch, rotated, shapes, update

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

# Heads of which an even number of channels is rotated and further ones may follow, query heads in groups that share a
# key head, and a table for more positions than there are.


@shapes(
    (2, 5, 3, 3, 32, 0, 2), (1, 3, 8, 4, 32, 0, 0), (1, 2, 2, 3, 64, 0, 1), (2, 4, 1, 1, 1, 0, 0),
    (1, 6, 2, 1, 3, 0, 5), (1, 3, 1, 7, 5, 0, 0), (1, 2, 1, 2, 131, 0, 0),
    (2, 3, 12, 1, 8, 48, 0), (1, 2, 4, 1, 4, 24, 1), (1, 3, 2, 2, 3, 2, 0), (1, 3, 2, 2, 3, 6, 0),
    (2, 2, 3, 1, 2, 3, 0),
    B=(1, 3), T=(1, 12), NKV=(1, 3), group=(1, 4), half=(1, 40), further=(0, 9), spare=(0, 3),
)  # fmt: skip
def test_rope_turns_the_pairs_of_queries_and_keys_leaves_values_alone_and_backward_is_its_gradient(
    each_type, B, T, NKV, group, half, further, spare
):
    NH, R, HS = NKV * group, 2 * half, 2 * half + further
    rng, table = np.random.default_rng([B, T, NH, HS]), fp32(rope_table(T + spare, R, 1e4))
    qkv, dout = (normal(rng, B, T, NH + 2 * NKV, HS) for _ in range(2))
    results = [launch(launcher, update(start), table, B, T, NH, NKV, HS, R)[0]
               for launcher, start in ((rope_forward, qkv), (rope_backward, dout))]  # fmt: skip
    want = autograd(lambda qkv: rotated(qkv, NKV, R), dout, qkv)
    for name, start, got, expected in zip(("turned", "dqkv"), (qkv, dout), results, want, strict=True):
        assert_close(name, got, expected, KERNEL_FP32)
        assert (to_numpy(got)[..., R:] == start[..., R:]).all()
        assert (to_numpy(got)[:, :, NH + NKV :] == start[:, :, NH + NKV :]).all()


def transformers_rope(
    HS: int, theta: float, scaling_factor: float | None = None, original_length: int = 8192
) -> LlamaRotaryEmbedding:
    kind = {"rope_type": "default"}
    if scaling_factor is not None:
        kind = {
            "rope_type": "llama3", "factor": scaling_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original_length,
        }  # fmt: skip
    config = LlamaConfig(
        hidden_size=4 * HS, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **kind},
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


MODELS = [  # HS, theta, and where RoPE is scaled, the factor and the length
    (64, 1e5), (64, 5e5, 32.0), (128, 5e5, 8.0), (128, 5e5, 32.0), (6, 1e4), (10, 5e5, 8.0), (64, 1e4, 4.0, 512),
    (32, 5e5, 8.0, 100_000),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_the_table_has_the_frequencies_of_transformers(model):
    HS = model[0]
    frequencies = transformers_rope(*model).inv_freq.double().numpy()
    table = rope_table(50, *model)
    assert table.dtype == np.float32 and table.shape == (50, HS // 2, 2)
    np.testing.assert_allclose(table[1, :, 1], np.sin(frequencies), rtol=2e-6)  # fp32 rounds theirs
    angles = np.arange(50)[:, None] * frequencies
    np.testing.assert_allclose(table, np.stack([np.cos(angles), np.sin(angles)], -1), atol=2e-5)


def test_angles_are_exact_at_far_positions():
    T, step = 131072, 777
    turns = rope_table(T, 8, 5e5, 8.0).astype(np.float64) @ [1, 1j]
    np.testing.assert_allclose(turns[step:], turns[:-step] * turns[step], atol=3e-7)  # angles add up


@pytest.mark.parametrize("model", MODELS)
def test_rope_equals_transformers_after_its_channels_are_reordered(dev, model):
    B, T, NH, NKV, HS = 2, 7, 4, 2, model[0]
    qkv = normal(np.random.default_rng(HS), B, T, NH + 2 * NKV, HS)
    (ours,) = launch(rope_forward, update(qkv), rope_table(T, *model), B, T, NH, NKV, HS)

    def in_halves(x):  # from pairs (2i, 2i+1) to pairs (i, i + HS/2)
        return x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2).transpose(1, 2)

    q, k = (in_halves(x) for x in leaf(qkv).detach().split([NH, NKV, NKV], dim=2)[:2])
    cos, sin = transformers_rope(*model)(q, torch.arange(T)[None])
    want, got = apply_rotary_pos_emb(q, k, cos, sin), torch.tensor(dev.to_host(ours))
    for name, heads, theirs in zip(("q", "k"), got.split([NH, NKV, NKV], dim=2), want, strict=False):
        assert_close(name, in_halves(heads), theirs, KERNEL_FP32)
