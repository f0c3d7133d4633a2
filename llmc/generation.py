"""Text from a model, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import device
from llmc.classifier import logits_after
from llmc.model import Model
from llmc.sampler import Sampler, sample_softmax
from llmc.tokenizer import StreamDecoder, Tokenizer

import numpy as np


def next_logits(model: Model, context: np.ndarray) -> np.ndarray:
    """The logits (V,) of the token that follows context, int32 (t,), t <= model.T."""
    t = len(context)
    device.copy_in(model.inputs, context)
    model.forward(1, t)
    return device.to_floats(logits_after(model, t))


def continuation(model: Model, tokens: list[int], count: int, draw: Callable[[np.ndarray], int]) -> Iterator[int]:
    """The `count` tokens that follow `tokens`, each drawn from the logits (V,) as soon as it is asked for. Of all that
    stands before it, the model sees the last model.T."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(draw(next_logits(model, np.array(tokens[-model.T :], np.int32))))
        yield tokens[-1]


def print_sample(
    model: Model, tokenizer: Tokenizer | None, sampler: Sampler, count: int, stopped: Callable[[], bool] = lambda: False
) -> str:
    """Prints `count` sampled tokens as they come, from the beginning of a text; as numbers where there is no
    tokenizer. Fewer where `stopped`. Returns the text."""
    first = min(tokenizer.bos if tokenizer else model.config.DEFAULTS["vocab_size"] - 1, model.config.vocab_size - 1)
    decoder = StreamDecoder(tokenizer) if tokenizer else None
    text = ""
    print("generating:\n---")
    for token in continuation(model, [first], count, lambda logits: sample_softmax(logits, sampler.random_f32())):
        piece = decoder.push(token) if decoder else f"{token} "
        text += piece
        print(piece, end="", flush=True)
        if stopped():
            break
    rest = decoder.flush() if decoder else ""
    print(rest + "\n---")
    return text + rest
