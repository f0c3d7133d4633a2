"""Texts, and what a model says follows them."""

from collections.abc import Callable

import device
from kernels.encoder import encoder_forward
from llmc.step.generation import Writer
from llmc.step.sampler import Sampler
from oracle import sample

import numpy as np


def random_texts(config, B: int, T: int) -> np.ndarray:
    return np.random.default_rng([B, T]).integers(0, config.vocab_size, (B, T), dtype=np.int32)


def forward_from(writer: Writer, texts, starts, lengths) -> np.ndarray:
    """The logits (B,V) of what follows tokens starts[b] to starts[b] + lengths[b] - 1 of each text."""
    cache, B, T = writer.cache, len(texts), max(lengths)
    acts, batch = cache.views(T)
    inputs = np.zeros((B, T), np.int32)
    for b, (text, start, length) in enumerate(zip(texts, starts, lengths, strict=True)):
        inputs[b, :length] = text[start : start + length]
    device.copy_in(batch.inputs, inputs)
    device.copy_in(cache.positions, np.array(starts, np.int32))
    device.copy_in(cache.last, np.array([b * T + length - 1 for b, length in enumerate(lengths)], np.int32))
    cache.model.forward(acts, batch)
    encoder_forward(acts.last, cache.last, acts.ln[-1], None, B, 1, acts.last.shape[-1])
    writer.draw(acts, acts.last)
    device.synchronize()
    return device.to_floats(acts.logits)[:, : cache.model.config.vocab_size]


def recomputed(
    logits_after: Callable[[list[int]], np.ndarray], text: list[int], count: int, sampler: Sampler, T: int,
    end: int | None = None, **how,
) -> list[int]:  # fmt: skip
    """The tokens that follow a text, each drawn from logits that are computed anew from all that the model sees: of a
    text longer than T the last half of T, and more as they come. They stop before the token `end`."""
    seen, found = list(text), []
    while len(found) < count:
        if len(seen) > T:
            seen = seen[-max(1, T // 2) :]
        token = sample(logits_after(seen), sampler.random_f32(), **how)
        if token == end:
            break
        seen.append(token)
        found.append(token)
    return found
