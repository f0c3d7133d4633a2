"""Drawing the next token of each sequence: the launcher of sampling.cu."""

import device
from device import ceil_div
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)


def sample(
    tokens, positions, states, logits, B: int, V: int, Vp: int, context: int,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, drawn=None,
) -> None:  # fmt: skip
    """For each of B sequences: tokens[b] = an index drawn from softmax(logits[b, :V] / temperature), logits (B,Vp). The
    generator (llmc/step/sampler.py) with state states[b], uint64, gives the coin, and its state advances. positions[b]
    goes up by 1, to context - 1 at most. tokens and positions are int32.

    If top_k is above 0, only the top_k largest logits are drawn. If top_p is below 1, only the likeliest of these are
    drawn that together have the share top_p. Logits that tie with the last of them are drawn, too. Temperature 0, or
    one that is 0 in fp32, takes the largest logit.

    If drawn, int32 (B,), is given, it gets the tokens, too, but -1 where a logit is NaN or infinity, or all are
    -infinity. There the token is one of the V and means nothing.
    """
    smallest = np.finfo(np.float32).smallest_normal
    heat = np.float32(temperature)
    if heat:
        heat = max(heat, smallest)  # its reciprocal is finite
    share = max(np.float32(top_p), smallest)  # of 0 the kernel would draw from all
    args = tokens, positions, states, logits, V, Vp, heat, min(top_k, V), share, context, drawn
    block = cu.block(min(1024, 32 * ceil_div(V, 32 * cu.width)))  # each thread has a vector or more
    cu.launch("sample_kernel", (B,), (block,), args)


for variant, top_p in ("", 1.0), ("top_p", 0.5):
    describe(sample, "B=2 V=1000 Vp=1024 context=8 top_k=0", "logits: B,Vp",
             lambda size, a, top_p=top_p: {
                 "tokens": device.zeros((size.B,), np.int32), "positions": device.zeros((size.B,), np.int32),
                 "states": device.asarray(np.arange(1, size.B + 1, dtype=np.uint64)), "top_p": top_p},
             variant, hard="B=1 V=5003 Vp=5120 top_k=7", needs="V <= Vp; Vp % 16 == 0")
