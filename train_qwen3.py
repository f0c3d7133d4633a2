"""Trains Qwen3, on an NVIDIA GPU or the CPU: Llama 3's block, with heads of a size of their own and an RMSNorm of each
head of queries and keys.

The file has the order and the letters of train_gpt2_fp32.py, which also has the loop over steps. NH are the query
heads and NKV the heads of keys and values, QK = NH + NKV, HS the size of a head, Q = NH HS, QKV = (NH + 2 NKV) HS, H
the hidden channels. Query head h attends to key and value head h // (NH / NKV).
"""

from dataclasses import dataclass

import device
from device.errors import UserError
from kernels.attention import attention_backward, attention_forward
from kernels.matmul import matmul_backward_inp, matmul_backward_weight, matmul_forward
from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward, rmsnorm_recompute
from kernels.rope import rope_table
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.model.batch import embedding_backward, embedding_forward
from llmc.model.loss import cross_entropy_loss
from llmc.model.model import Model
from llmc.model.tensors import Config
from llmc.run.trainer import run_trainer
from train_gpt2_fp32 import train

import numpy as np

# The tensors: name, shape, further words, as train_gpt2_fp32.py explains them. llmc/model/activations.py adds those of
# attention, such as qkv.

PARAMETERS = (
    ("wte",         ("Vp", "C"), "head"),            # token embedding, and where `tied` the weight of the classifier
    ("lm_head",     ("Vp", "C"), "head"),            # where not tied: the weight of the classifier
    ("ln1w",        ("L", "C")),
    ("qkvw",        ("L", "QKV", "C")),              # rows of q, of k, of v
    ("qnormw",      ("L", "HS")),                    # of the RMSNorm of each query head
    ("knormw",      ("L", "HS")),                    # of each key head
    ("attprojw",    ("L", "C", "Q")),
    ("ln2w",        ("L", "C")),
    ("fcw",         ("L", "2H", "C")),               # rows of up, of gate
    ("fcprojw",     ("L", "C", "H")),
    ("lnfw",        ("C",)),
)  # fmt: skip

ACTIVATIONS = (
    ("residual",    ("L+1", "B", "T", "C")),         # the residual stream in front of each layer, and behind the last
    ("norm",        ("L+1", "B", "T"), "fp32"),      # rstd of the norm of each residual
    ("qkvproj",     ("L", "B", "T", "QKV")),         # queries, keys and values as they are projected
    ("atty",        ("L", "B", "T", "Q")),           # the heads' outputs, side by side
    ("residual2",   ("L", "B", "T", "C")),           # between attention and MLP
    ("norm2",       ("L", "B", "T"), "fp32"),        # rstd of its norm
    ("fch",         ("L", "B", "T", "2H")),          # up and gate
    ("logits",      ("chunk", "Vp")),                # and then their gradient; chunk: B T rows, or --logit-rows
    ("losses",      ("B", "T"), "fp32"),
    # The same for every layer.
    ("qkv",         ("B", "T", "QKV")),              # qkvproj with q and k normalised and rotated; backward: once more
    ("qk_rstd",     ("B", "T", "QK"), "fp32"),       # of each head of q and k
    ("ln",          ("B", "T", "C")),                # forward: output of the last RMSNorm
    ("ln1",         ("B", "T", "C"), "ln", "for qkvw"),  # forward: of the one in front of attention
    ("ln2",         ("B", "T", "C"), "ln", "for fcw"),  # forward: of the one in front of the MLP
    ("ln1_again",   ("B", "T", "C"), "ln", "recomputed", "for qkvw"),  # backward: the same
    ("ln2_again",   ("B", "T", "C"), "ln", "recomputed", "for fcw"),
    ("swiglu",      ("B", "T", "H"), "for fcprojw"),  # forward: output of the SwiGLU at hand
    ("swiglu_again", ("B", "T", "H"), "swiglu", "recomputed", "for fcprojw"),
    ("proj",        ("B", "T", "C")),                # forward: a projection back to C channels
)  # fmt: skip

GRADIENTS = (
    ("dresidual",   ("B", "T", "C")),                # of the residual stream, from the last layer down to the first
    ("dln",         ("B", "T", "C")),                # of the output of the RMSNorm at hand
    ("datty",       ("B", "T", "Q")),                # of atty
    ("dswiglu",     ("B", "T", "H")),                # of the output of the SwiGLU at hand
    ("dfch",        ("B", "T", "2H"), "from fcw"),
    ("dqkv",        ("B", "T", "QKV")),              # of qkv
    ("dqkvproj",    ("B", "T", "QKV"), "dqkv", "in place", "from qkvw"),  # of qkvproj
)  # fmt: skip


@dataclass(frozen=True)
class Qwen3Config(Config):
    """The sizes of a Qwen3, and what else fixes the function that it computes.

    Its file is our own: the header of Config.header, then those of PARAMETERS that the model has, the vocabulary
    padded. Rows of q and k, and the weights of their norms, are in the order in which RoPE turns channels 2i and 2i + 1
    of a head.
    """

    max_seq_len: int     # (maxT) longest sequence
    vocab_size: int      # (V) tokens; (Vp) is that rounded up to a multiple of 128
    num_layers: int      # (L)
    num_heads: int       # (NH) query heads
    num_kv_heads: int    # (NKV) heads of keys and values, a divisor of NH
    channels: int        # (C)
    hidden: int          # (H) channels between up and gate and the projection back
    head_size: int = 128  # (HS) channels of a head, whatever C and NH are
    tied: bool = True    # the classifier's weight is wte
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    NAME, SCRIPT, MAGIC, PARAMETERS = "Qwen3", "train_qwen3.py", 20250505, PARAMETERS  # the day of Qwen3's report
    DESCRIPTION = {
        "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads", "channels": "channels",
        "hidden": "hidden", "head_size": "head_size", "maxT": "max_seq_len", "theta": "rope_theta", "eps": "norm_eps",
        "tied": "tied", "vocab": "vocab_size",
    }  # fmt: skip
    PRESETS = {
        "qwen3-0.6b": "layers=28,heads=16,kv_heads=8,channels=1024,hidden=3072,maxT=40960",
        "qwen3-1.7b": "layers=28,heads=16,kv_heads=8,channels=2048,hidden=6144,maxT=40960",
        "qwen3-4b": "layers=36,heads=32,kv_heads=8,channels=2560,hidden=9728,maxT=40960",
        "qwen3-8b": "layers=36,heads=32,kv_heads=8,channels=4096,hidden=12288,tied=0,maxT=40960",
        "tiny": "layers=4,heads=4,kv_heads=2,channels=128,hidden=352,head_size=32,maxT=64",
    }
    DEFAULTS = {"max_seq_len": 1024, "vocab_size": 151936}
    DEFAULT_MODEL = "qwen3_0.6B.bin"
    FETCH = "make one from Hugging Face's with dev/hf/import_hf.py"

    @property
    def absent(self) -> frozenset[str]:
        return super().absent | ({"lm_head"} if self.tied else set())

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"H": self.hidden, "QK": self.num_heads + self.num_kv_heads}

    def check(self, source: str) -> None:
        super().check(source)
        if self.head_size % 2:
            raise UserError(f"{source}: heads of {self.head_size} channels are odd, and RoPE turns pairs")


def qwen3_forward(model: Model, acts, batch) -> None:
    """From the tokens to the last norm's output, acts.ln. The views in acts decide what is kept."""
    params, eps, B, T, (L, C, *_, H) = model.params, model.config.norm_eps, batch.B, batch.T, model.sizes

    embedding_forward(acts.residual[0], batch, params.wte, None, B, T, C)
    rmsnorm_forward(acts.normed[0], acts.norm[0], acts.residual[0], params.norm[0], eps, B, T, C)
    for l in range(L):
        qwen3_layer_forward(model, acts, batch, l)
        p, a = params.layer[l], acts.layer[l]
        matmul_forward(acts.proj, a.swiglu, p.fcprojw, None, B, T, H, C)
        fused_residual_rmsnorm_forward(
            acts.residual[l + 1], acts.normed[l + 1], acts.norm[l + 1], a.residual2, acts.proj, params.norm[l + 1], eps,
            B, T, C,
        )  # fmt: skip


def qwen3_layer_forward(model: Model, acts, batch, l: int) -> None:
    """Runs layer l from acts.residual[l] and its norm, a.ln1, up to a.swiglu: all that its backward pass reads."""
    params, rope, B, T, (_, C, NH, NKV, HS, H) = model.params, model.constant.rope, batch.B, batch.T, model.sizes
    p, a, eps = params.layer[l], acts.layer[l], model.config.norm_eps

    matmul_forward(a.qkvproj, a.ln1, p.qkvw, None, B, T, C, (NH + 2 * NKV) * HS)
    qk_norm_forward(
        acts.qkv, acts.qk_rstd, a.qkvproj, (p.qnormw, p.knormw), rope, eps, B, T, NH, NKV, HS, batch.positions
    )
    attention_forward(a.atty, a.attention, acts.qkv, B, T, NH, NKV, HS)
    matmul_forward(acts.proj, a.atty, p.attprojw, None, B, T, NH * HS, C)
    fused_residual_rmsnorm_forward(a.residual2, a.ln2, a.norm2, acts.residual[l], acts.proj, p.ln2w, eps, B, T, C)

    matmul_forward(a.fch, a.ln2, p.fcw, None, B, T, C, 2 * H)
    swiglu_forward(a.swiglu, a.fch, B * T, H)


def qwen3_layer_recompute(model: Model, acts, batch, l: int) -> None:
    """Sets again what the backward pass of layer l reads, from acts.residual[l]. Also sets acts.normed[l] and
    acts.norm[l]."""
    params, eps, B, T, C = model.params, model.config.norm_eps, batch.B, batch.T, model.config.channels

    rmsnorm_forward(acts.normed[l], acts.norm[l], acts.residual[l], params.norm[l], eps, B, T, C)
    qwen3_layer_forward(model, acts, batch, l)


def qwen3_backward(model: Model, acts, batch, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what forward and loss left in acts. The loss has added
    its part of the head's. In a step's first batch, without accumulate, sets those of the layers' matrices instead.
    Goes from the last layer to the first, and recomputes the outputs of RMSNorm and SwiGLU that a weight's gradient
    needs.
    Qwen3's qkv is recomputed, too, from qkvproj: to keep both would take Qwen3-0.6B 0.9 GB more at B 2, T 1024.
    """
    params, grads, B, T, (L, C, NH, NKV, HS, H) = model.params, model.grads, batch.B, batch.T, model.sizes
    rope = model.constant.rope

    device.fill_zero(acts.dresidual)
    for l in reversed(range(L)):
        p, g, a = params.layer[l], grads.layer[l], acts.layer[l]
        rmsnorm_backward(
            acts.dresidual, grads.norm[l + 1], acts.dln, acts.residual[l + 1], params.norm[l + 1], acts.norm[l + 1],
            B, T, C,
        )  # fmt: skip
        acts.recompute_layer(model, acts, batch, l)  # does nothing if each layer keeps its own activations

        matmul_backward_inp(acts.dswiglu, acts.dresidual, p.fcprojw, B, T, H, C)
        swiglu_backward(a.dfch, a.swiglu_again, acts.dswiglu, a.fch, B * T, H)
        matmul_backward_weight(g.fcprojw, acts.dresidual, a.swiglu_again, B, T, H, C, accumulate)
        matmul_backward_inp(acts.dln, a.dfch, p.fcw, B, T, C, 2 * H)
        rmsnorm_recompute(a.ln2_again, a.residual2, p.ln2w, a.norm2, B, T, C)
        matmul_backward_weight(g.fcw, a.dfch, a.ln2_again, B, T, C, 2 * H, accumulate)
        rmsnorm_backward(acts.dresidual, g.ln2w, acts.dln, a.residual2, p.ln2w, a.norm2, B, T, C)

        matmul_backward_inp(acts.datty, acts.dresidual, p.attprojw, B, T, NH * HS, C)
        matmul_backward_weight(g.attprojw, acts.dresidual, a.atty, B, T, NH * HS, C, accumulate)
        qk_norm_forward(
            acts.qkv, acts.qk_rstd, a.qkvproj, (p.qnormw, p.knormw), rope, model.config.norm_eps, B, T, NH, NKV, HS
        )  # fmt: skip
        attention_backward(acts.dqkv, acts.datty, a.atty, a.attention, acts.qkv, B, T, NH, NKV, HS)
        qk_norm_backward(
            a.dqkvproj, (g.qnormw, g.knormw), acts.dqkv, a.qkvproj, (p.qnormw, p.knormw), acts.qk_rstd, rope,
            B, T, NH, NKV, HS,
        )  # fmt: skip
        matmul_backward_inp(acts.dln, a.dqkvproj, p.qkvw, B, T, C, (NH + 2 * NKV) * HS)
        rmsnorm_recompute(a.ln1_again, acts.residual[l], params.norm[l], acts.norm[l], B, T, C)
        matmul_backward_weight(g.qkvw, a.dqkvproj, a.ln1_again, B, T, C, (NH + 2 * NKV) * HS, accumulate)
    rmsnorm_backward(acts.dresidual, grads.norm[0], acts.dln, acts.residual[0], params.norm[0], acts.norm[0], B, T, C)
    embedding_backward(grads.wte, None, acts.dresidual, batch, B, T, C)


class Qwen3(Model):
    """Qwen3, as llmc/ needs to know it."""

    Config = Qwen3Config
    ACTIVATIONS, GRADIENTS, SIZES = ACTIVATIONS, GRADIENTS, ("L", "C", "NH", "NKV", "HS", "H")
    forward, loss, backward = qwen3_forward, cross_entropy_loss, qwen3_backward
    layer_recompute = qwen3_layer_recompute

    @staticmethod
    def group_parameters(tensors, config: Qwen3Config) -> None:
        tensors.norm = [t.ln1w for t in tensors.layer] + [tensors.lnfw]

    @staticmethod
    def group_activations(acts, config: Qwen3Config) -> None:
        acts.normed = [a.ln1 for a in acts.layer] + [acts.ln]

    @classmethod
    def first_weights(cls, config: Qwen3Config) -> tuple[dict[str, float], dict[str, float]]:
        """As transformers starts a Qwen3: normal with deviation 0.02; the RMSNorms' weights 1."""
        norms = "ln1w", "qnormw", "knormw", "ln2w", "lnfw"
        return dict.fromkeys(config.matrices, 0.02), dict.fromkeys(norms, 1.0)

    @classmethod
    def constants(cls, config: Qwen3Config, T: int) -> dict[str, np.ndarray]:
        """rope (T, HS/2, 2): the cosine and the sine of each pair's angle at each position."""
        return {"rope": rope_table(T, config.head_size, config.rope_theta)}


if __name__ == "__main__":
    run_trainer(train, Qwen3)
