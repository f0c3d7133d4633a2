"""A model that writes text, and its text, a token at a time."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import device
from kernels.encoder import encoder_forward
from kernels.matmul import matmul_forward
from kernels.sampling import sample
from llmc.data.tokenizer import StreamDecoder, Tokenizer
from llmc.files.model_file import conversion, read_model
from llmc.model.activations import Cache
from llmc.model.model import Model
from llmc.model.weights import load_weights
from llmc.step.sampler import Sampler

import numpy as np

NOT_FINITE = -1  # in the place of a token that cannot be drawn
STEPS_AHEAD = 1  # that a GPU gets before the host has seen the tokens of the previous one


def model_for_inference(kind: type[Model], path: str | Path, T: int) -> Model:
    """The model in a `.bin`, without gradients, for texts of up to T tokens. Raises UserError as `read_model` does. If
    its weights are converted, stderr says so."""
    config, tensors = read_model(path, kind.Config)
    model = kind(config, T, inference=True)
    quantized = f"{path}: large weights of the layers become e4m3, the others bf16" if model.fp8 else ""
    if converted := quantized or conversion(path, kind.Config):
        print(converted, file=sys.stderr, flush=True)
    load_weights(model, None, tensors)
    return model


class Writer:
    """Continues the texts of a cache. A step writes one token of each text.

    A step is forward on one row of each text, and the draw, which writes the token where the next step reads it. It is
    recorded once and serves all positions. The host only receives the tokens. temperature, top_k and top_p are those
    of kernels/sampling.py.
    """

    def __init__(self, cache: Cache, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
        self.cache, self.drawing = cache, (temperature, top_k, top_p)
        self.states, self.drawn = device.zeros((cache.B,), np.uint64), device.zeros((cache.B,), np.int32)
        self.buffers = [device.pinned((cache.B,), np.int32) for _ in range(STEPS_AHEAD + 1)]  # of a step's tokens each
        self.next_token = device.record(self.forward_and_draw)

    def forward_and_draw(self) -> None:
        acts, batch = self.cache.token
        self.cache.model.forward(acts, batch)
        self.draw(acts, acts.ln[-1])

    def draw(self, acts, rows) -> None:
        """Draws the tokens that follow these rows (B,C) of the last norm's output. The next step reads them."""
        cache, model = self.cache, self.cache.model
        (Vp, C), V = model.params.head.shape, model.config.vocab_size
        matmul_forward(acts.logits, rows, model.params.head, None, cache.B, 1, C, Vp)
        arrays = cache.token[1].inputs, cache.positions, self.states, acts.logits
        sample(*arrays, cache.B, V, Vp, cache.context, *self.drawing, drawn=self.drawn)

    def read(self, texts: list[list[int]], kept: int = 0) -> None:
        """Runs forward on texts, of at most `context` tokens each, and draws the tokens that follow. kept: the first
        tokens of each that the cache has already; the text has more. If a text is shorter than the longest one, rows
        after its end are computed, too. Its next tokens overwrite them in the cache."""
        texts = [text[kept:] for text in texts]
        cache, B, T = self.cache, self.cache.B, max(map(len, texts))
        acts, batch = cache.views(T)
        lengths, inputs = np.array([len(text) for text in texts], np.int32), np.zeros((B, T), np.int32)
        for row, text in zip(inputs, texts, strict=True):
            row[: len(text)] = text
        begins, ends = np.full(B, kept, np.int32), kept + lengths - 1
        last = np.arange(B, dtype=np.int32) * T + lengths - 1
        for array, values in ((batch.inputs, inputs), (cache.positions, begins), (cache.last, last)):
            device.copy_in(array, values)
        cache.model.forward(acts, batch)
        device.copy_in(cache.positions, ends)
        encoder_forward(acts.last, cache.last, acts.ln[-1], None, B, 1, acts.last.shape[-1])  # copies these rows
        self.draw(acts, acts.last)
        device.synchronize()  # until now the device may have read the arrays on the host

    def tokens(
        self, texts: list[list[int]], samplers: list[Sampler], count: int, finished: list[bool] | None = None,
        kept: int = 0,
    ) -> Iterator[list[int]]:  # fmt: skip
        """Yields the next `count` tokens of each of B texts: in each step a list with one token for each text. A text
        has at least one token. The samplers advance with each list. The caller may set finished[b] if it needs no more
        tokens of text b. When all are set, the iterator ends. The token of a text is NOT_FINITE, and those after it
        mean nothing, if its logits are not finite. kept: of `read`, for the first time.

        A text has room for `context` tokens. If it gets longer, the model keeps its last context // 2 tokens, and
        computes them again.
        """
        room, buffers = self.cache.context, self.buffers
        finished = [False] * self.cache.B if finished is None else finished
        seen = [list(text) for text in texts]  # by the model
        coming: deque = deque()  # an event for each step, after which its tokens are in their buffer
        lengths: list[int] = []  # of each text in the cache, for the next step
        given = 0
        states = np.array([sampler.state for sampler in samplers], np.uint64)
        device.copy_in(self.states, states)
        device.synchronize()
        for step in range(count):
            while given < min(count, step + 1 + STEPS_AHEAD * device.has_streams):
                full = any(n == room and not done for n, done in zip(lengths, finished, strict=False))
                if (full or not lengths) and coming:
                    break  # first the host must know all tokens
                if full or not lengths:
                    seen = [text[:1] if done else text if len(text) <= room else text[-max(1, room // 2) :]
                            for text, done in zip(seen, finished, strict=True)]  # fmt: skip
                    lengths = [len(text) for text in seen]
                    self.read(seen, kept if given == 0 else 0)
                else:
                    self.next_token()
                    lengths = [min(n + 1, room) for n in lengths]
                device.copy_out(buffers[given % len(buffers)], self.drawn)
                coming.append(device.event())
                given += 1
            coming.popleft().wait()
            drawn = buffers[step % len(buffers)].tolist()
            for text, token, sampler in zip(seen, drawn, samplers, strict=True):
                text.append(max(token, 0))
                sampler.random_u32()
            yield drawn
            if all(finished):
                return


def print_sample(
    writer: Writer, tokenizer: Tokenizer | None, sampler: Sampler, count: int,
    stopped: Callable[[], bool] = lambda: False,
) -> str:  # fmt: skip
    """Prints `count` sampled tokens as they come, from the beginning of a text; as numbers if there is no tokenizer.
    Ends early before a token that ends a text, if `stopped`, and after a line if the logits are not finite. Returns the
    text."""
    config = writer.cache.model.config
    first = min(tokenizer.bos if tokenizer else config.DEFAULTS["vocab_size"] - 1, config.vocab_size - 1)
    decoder = StreamDecoder(tokenizer) if tokenizer else None
    text = ""
    print("generating:\n---")
    for (token,) in writer.tokens([[first]], [sampler], count):
        if token == NOT_FINITE:
            print("\nthe model's logits are not finite", end="")
            break
        if tokenizer and token in tokenizer.ends:
            break
        piece = decoder.push(token) if decoder else f"{token} "
        text += piece
        print(piece, end="", flush=True)
        if stopped():
            break
    rest = decoder.flush() if decoder else ""
    print(rest + "\n---")
    return text + rest
