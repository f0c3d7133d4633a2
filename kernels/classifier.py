"""Softmax, cross-entropy and their gradient in one kernel: the launcher of classifier.cu."""

import device

import numpy as np

cu = device.source(__file__)


def fused_classifier(logits, losses, dloss: float, targets, B: int, T: int, V: int, Vp: int) -> None:
    """losses (B,T) = cross-entropy of each row of logits (B,T,Vp) over its first V entries; targets (B,T) int32.

    dloss is the gradient of each loss. The kernel overwrites logits with their gradient. The padding gets 0, and a row
    whose loss is not finite gets NaN. If dloss is 0, logits stay as they are. Vp is a multiple of cu.width.
    """
    # Half of a multiprocessor's shared memory, so that one block computes while another waits for memory. The
    # reductions and CUDA itself need a part of it. On an H200 blocks of 512 threads took 14% longer, blocks of 256 took
    # 55% longer.
    width = cu.width
    cached = min(Vp, (device.shared_memory // 2 - 2048) // (device.floatX.itemsize * width) * width)
    cu.launch(
        "fused_classifier_kernel",
        (B * T,),
        (cu.block(1024),),
        (logits, losses, np.float32(dloss), targets, V, Vp, cached),
        shared_mem=device.floatX.itemsize * cached,
    )
