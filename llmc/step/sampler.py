"""The xorshift64* generator. kernels/sampling.cu has the same generator on the device, and draws tokens with it.

Vigna describes xorshift64* in "An experimental exploration of Marsaglia's xorshift generators, scrambled" (2016). The
shifts and the multiplier are llm.c's, so equal seeds give equal coins.
"""

MASK64 = 2**64 - 1
MULTIPLIER = 0x2545F4914F6CDD1D
APART = 0x9E3779B97F4A7C15  # between the seeds of samples: 2**64 divided by the golden ratio


class Sampler:
    """A generator. Its state, in 1 .. 2**64 - 1, can be read, and set in another generator that then continues."""

    def __init__(self, seed: int = 1337) -> None:
        self.state = seed & MASK64 or MULTIPLIER  # xorshift never leaves 0

    def random_u32(self) -> int:
        """A number in 0 .. 2**32 - 1."""
        self.state ^= self.state >> 12
        self.state ^= self.state << 25 & MASK64
        self.state ^= self.state >> 27
        return (self.state * MULTIPLIER & MASK64) >> 32

    def random_f32(self) -> float:
        """A number in [0, 1). It is a multiple of 2**-24, so it is exact in fp32."""
        return (self.random_u32() >> 8) / 2**24


def samplers_of(seed: int, count: int) -> list[Sampler]:
    """A generator for each of `count` samples of a prompt. The first is Sampler(seed)."""
    return [Sampler(seed + i * APART) for i in range(count)]
