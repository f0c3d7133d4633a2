"""The classifier: logits, softmax, cross-entropy and their gradients. Its kernel, in classifier.cu, does
everything between the two products."""

import device
from kernels.fp16.products import gemm
from kernels.launches import describe, random_tokens
from kernels.matmul import matmul_backward_weight, matmul_forward

import numpy as np

cu = device.source(__file__)


def classifier(
    losses, logits, inp, weight, targets, B: int, T: int, C: int, V: int,
    *, dloss=None, dinp=None, dweight=None, accumulate: bool = False,
) -> None:  # fmt: skip
    """losses (B,T) = cross-entropy of inp (B,T,C) @ weight (Vp,C)^T over the first V of Vp entries. targets (B,T),
    int32. A target below 0 is not learned: its loss is 0, and so are its gradients.

    With dloss, the gradient of each loss, a number or fp32 (1,) on the device: dinp (B,T,C) = the gradient of inp,
    which must not overlap inp, and dweight (Vp,C) += that of weight; or = without accumulate.

    logits (R,Vp) is room for the logits of R positions, which become their own gradient. A chunk of R positions goes
    from logits to gradients before the next one takes their place. With R = B*T the whole batch is one chunk.
    """
    R, Vp = logits.shape
    inp, losses, targets = inp.reshape(-1, C), losses.reshape(-1), targets.reshape(-1)
    for start in range(0, B * T, R):
        end = min(start + R, B * T)
        N, chunk = end - start, logits[: end - start]
        matmul_forward(chunk, inp[start:end], weight, None, 1, N, C, Vp)
        fused_classifier(chunk, losses[start:end], dloss, targets[start:end], 1, N, V, Vp)
        if dloss is not None:  # not matmul_backward_inp, which for many rows would copy this large weight, transposed
            gemm(dinp.reshape(-1, C)[start:end], chunk, weight, N, C, Vp)
            matmul_backward_weight(dweight, chunk, inp[start:end], 1, N, C, Vp, accumulate or start > 0)


def fused_classifier(logits, losses, dloss, targets, B: int, T: int, V: int, Vp: int) -> None:
    """losses (B,T) = cross-entropy of each row of logits (B,T,Vp) over its first V entries; targets (B,T) int32.

    dloss is the gradient of each loss, a number or fp32 (1,) on the device. The kernel overwrites logits with their
    gradient. The padding gets 0, a row whose loss is not finite gets NaN, and one whose target is below 0, which is not
    learned, gets 0 and a loss of 0. If dloss is None, logits stay as they are. Vp is a multiple of cu.width.
    """
    # The reductions and CUDA itself need a part of the shared memory. On an H200 blocks of 512 threads took 14% longer,
    # blocks of 256 took 55% longer. On an H100, where rows are too long for half of the memory, two blocks with a half
    # each took 4 to 15% longer than one: they read more of the row twice.
    width = cu.width
    step_dloss = device.constant((dloss,), np.float32) if np.isscalar(dloss) else dloss
    cached = min(Vp, (device.shared_memory - 2048) // (device.floatX.itemsize * width) * width)
    cu.launch(
        "fused_classifier_kernel",
        (B * T,),
        (cu.block(1024),),
        (logits, losses, step_dloss, targets, V, Vp, cached),
        shared_mem=device.floatX.itemsize * cached,
    )


describe(
    fused_classifier, "B=2 T=4 V=1000 Vp=1024", "logits: B,T,Vp; losses*: B,T",
    lambda size, a: {"dloss": 1.0, "targets": device.asarray(random_tokens(size.V, size.B, size.T))},
    hard="V=2500 Vp=2560", needs="V <= Vp; Vp % 8 == 0", twice={"fused_classifier": "logits"})
