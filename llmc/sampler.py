"""Drawing the next token: the xorshift64* generator, and sampling from logits.

xorshift64* is Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled" (2016); the shifts and
the multiplier are llm.c's, so equal seeds give equal coins.
"""

import numpy as np

MASK64 = 2**64 - 1
MULTIPLIER = 0x2545F4914F6CDD1D


class Sampler:
    """A generator. Its state, in 1 .. 2**64 - 1, can be read and set to carry on elsewhere."""

    def __init__(self, seed: int = 1337) -> None:
        self.state = seed & MASK64 or MULTIPLIER  # xorshift never leaves 0

    def random_u32(self) -> int:
        """A number in 0 .. 2**32 - 1."""
        self.state ^= self.state >> 12
        self.state ^= self.state << 25 & MASK64
        self.state ^= self.state >> 27
        return (self.state * MULTIPLIER & MASK64) >> 32

    def random_f32(self) -> float:
        """A number in [0, 1), a multiple of 2**-24 and so exact in fp32."""
        return (self.random_u32() >> 8) / 2**24


def sample_softmax(logits: np.ndarray, coin: float) -> int:
    """Draws an index with probability softmax(logits), logits fp32 (V,): the first whose cumulative sum is above the
    coin.

    The coin, in [0, 1), is scaled by the sum instead of dividing every term by it.
    """
    cumulative = np.cumsum(np.exp(logits.astype(np.float64) - logits.max()))
    return min(int(np.searchsorted(cumulative, coin * cumulative[-1], side="right")), logits.size - 1)


def sample(logits: np.ndarray, coin: float, temperature: float = 1.0, top_k: int | None = None) -> int:
    """Draws an index from softmax(logits / temperature), logits fp32 (V,), among the top_k largest where that is given.

    Temperature 0, or what is 0 in fp32, takes the largest logit. Logits that tie with the k-th largest all stay in.
    """
    if np.float32(temperature) == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.size:
        threshold = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits >= threshold, logits, -np.inf)
    with np.errstate(over="ignore"):  # by a small temperature; -inf is right
        return sample_softmax((logits - logits.max()) / temperature, coin)
