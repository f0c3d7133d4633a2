"""Token and position embeddings: the launchers of encoder.cu."""

from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def encoder_forward(out, inp, wte, wpe, B: int, T: int, C: int) -> None:
    """out (B,T,C) = wte[inp] + wpe[t]; inp (B,T) int32 token ids, wte (Vp,C), wpe (maxT,C)."""
    positions = 8
    cu.encoder_forward_kernel(
        (ceil_div(B * T, positions),), (device.warp_size(), positions), (out, inp, wte, wpe, B * T, T, C)
    )


def encoder_backward(dwte, dwpe, dout, inp, order, B: int, T: int, C: int) -> None:
    """dwte (Vp,C) += rows of dout (B,T,C) summed by token; dwpe (maxT,C) += dout summed over B.

    order (B*T) int32 lists the positions of inp (B,T) sorted by token, earlier positions first:
    `np.argsort(inp, axis=None, kind="stable")`.
    """
    block = 128
    columns = ceil_div(C, block)
    cu.wte_backward_kernel((B * T, columns), (block,), (dwte, dout, inp, order, B * T, C))
    cu.wpe_backward_kernel((T, columns), (block,), (dwpe, dout, B, T, C))
