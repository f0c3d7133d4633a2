"""Drawing the next token of each sequence: the launcher of sampling.cu."""

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__)


def sample(
    tokens, positions, states, logits, B: int, V: int, Vp: int, context: int,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
) -> None:  # fmt: skip
    """tokens[b] = an index drawn from softmax(logits[b, :V] / temperature), logits (B,Vp), for each of B sequences; by
    the coin of the generator (llmc/sampler.py) whose state is states[b], uint64, and which goes on. positions[b], int32
    as tokens, goes up by 1, to context - 1 at most.

    Drawn are the top_k largest alone, where that is above 0; of these the likeliest that together have a share top_p,
    where that is below 1; and what ties with the last of them. Temperature 0, or what is 0 in fp32, takes the largest.
    """
    heat = np.float32(temperature)
    if heat:
        heat = max(heat, np.finfo(np.float32).smallest_normal)  # its reciprocal is finite
    args = tokens, positions, states, logits, V, Vp, heat, min(top_k, V), np.float32(top_p), context
    block = cu.block(min(1024, 32 * ceil_div(V, 32 * cu.width)))  # a vector for each thread, or several
    cu.sample_kernel((B,), (block,), args)
