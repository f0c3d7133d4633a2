"""Token and position embeddings: the launchers of encoder.cu."""

from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def encoder_forward(out, inp, wte, wpe, B: int, T: int, C: int) -> None:
    """out (B,T,C) = wte[inp] + wpe[t]; inp (B,T) int32 token ids, wte (Vp,C), wpe (maxT,C).

    wpe None: out = wte[inp], for a model whose positions are not embedded.
    """
    positions = 8
    cu.encoder_forward_kernel(
        (ceil_div(B * T, positions),), (cu.warp_size, positions), (out, inp, wte, wpe, B * T, T, C)
    )


def encoder_backward(dwte, dwpe, dout, inp, order, count, B: int, T: int, C: int) -> None:
    """dwte (Vp,C) += rows of dout (B,T,C) summed by token; dwpe (maxT,C) += dout summed over B.

    dwpe is None where there was no wpe. order and count (B*T) int32 are `sort_by_token` of inp (B,T).
    """
    columns = cu.block(min(256, ceil_div(C, 4)))
    cu.wte_backward_kernel((B * T,), (columns, cu.block(4)), (dwte, dout, inp, order, count, C))
    if dwpe is None:
        return
    block = 128
    cu.wpe_backward_kernel((T, ceil_div(C, block)), (block,), (dwpe, dout, B, T, C))
