"""Rotary position embedding: the table of angles and the launchers of rope.cu."""

import device
from device import ceil_div
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)

# Llama 3.1's scaling of the frequencies, for contexts that are longer than the model's first ones. For Llama 3 those
# had ORIGINAL_LENGTH tokens.
LOW, HIGH, ORIGINAL_LENGTH = 1.0, 4.0, 8192

FEW_ROWS = 16  # with more, blocks of 64 threads keep a GPU busy


def rope_table(
    T: int, R: int, theta: float, scaling_factor: float | None = None, original_length: int = ORIGINAL_LENGTH
) -> np.ndarray:
    """fp32 (T, R/2, 2): cosine and sine of position * frequency_i, with frequency_i = theta^(-2i/R). R is the number of
    channels of a head that are rotated.

    A scaling_factor divides the frequencies that make fewer than LOW turns in original_length positions. Those that
    make more than HIGH turns stay, and between the two there is a linear transition.
    """
    frequencies = theta ** (-np.arange(0, R, 2) / R)
    if scaling_factor is not None:
        turns = original_length * frequencies / (2 * np.pi)
        kept = np.clip((turns - LOW) / (HIGH - LOW), 0.0, 1.0)
        frequencies = (1 - kept) * frequencies / scaling_factor + kept * frequencies
    angles = np.outer(np.arange(T), frequencies)  # in float64: at position 100,000 an fp32 angle is off by 0.004
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def rope_forward(
    qkv, table, B: int, T: int, NH: int, NKV: int, HS: int, R: int | None = None, positions=None
) -> None:
    """Rotates, in place, the NH query and the NKV key heads of qkv (B,T,NH+2*NKV,HS). The value heads stay as they are.

    R: how many channels of each head are rotated, the first ones; by default all HS. table is `rope_table` of R, for as
    many positions as there are. Row t of sequence b is at position t; or at positions[b] + t, if positions, int32 (B,),
    is given.
    """
    launch(qkv, table, positions, 1.0, B, T, NH, NKV, HS, R or HS)


def rope_backward(dqkv, table, B: int, T: int, NH: int, NKV: int, HS: int, R: int | None = None) -> None:
    """Rotates the gradients of queries and keys in dqkv (B,T,NH+2*NKV,HS) back, in place: rope_forward's inverse."""
    launch(dqkv, table, None, -1.0, B, T, NH, NKV, HS, R or HS)


def launch(qkv, table, positions, direction: float, B: int, T: int, NH: int, NKV: int, HS: int, R: int) -> None:
    """Launches the kernel that forward and backward share, in blocks of some 64 threads. A thread has several heads. If
    rows are few, a block has so many threads that all heads are loaded at once."""
    vectors, threads = min(64, ceil_div(R, cu.width)), 64
    if B * T <= FEW_ROWS:  # on an H100 a token of Llama 3.2 1B takes 1.159 ms, not 1.172
        threads = max(threads, min(cu.block(1024), vectors * ceil_div((NH + NKV) * cu.width, 16)))
    args = qkv, table, positions, np.float32(direction), NH + NKV, NH + 2 * NKV, HS, R
    cu.launch("rope_kernel", (T, B), (vectors, threads // vectors), args)


def angles(size, a) -> dict:
    return {"table": device.asarray(rope_table(size.T, size.HS, 1e4))}


for launcher, name in (rope_forward, "qkv"), (rope_backward, "dqkv"):
    describe(launcher, "B=2 T=16 NH=4 NKV=2 HS=32", f"{name}: B,T,NH+2*NKV,HS", angles, needs="HS % 2 == 0",
             moved={"rope": lambda a: 2 * a.qkv.nbytes * a.heads // a.all_heads})  # of queries and keys, in place
