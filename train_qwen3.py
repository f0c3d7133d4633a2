"""Trains Qwen3, on an NVIDIA GPU or the CPU: Llama 3's block, with heads of a size of their own and an RMSNorm of each
head of queries and keys.

The file has the order and the letters of train_gpt2_fp32.py, which also has the loop over steps. NH are the query
heads and NKV the heads of keys and values, QK = NH + NKV, HS the size of a head, Q = NH HS, QKV = (NH + 2 NKV) HS, H
the hidden channels. Query head h attends to key and value head h // (NH / NKV).
"""

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P leaves it out
import device
from device.errors import UserError
from kernels.attention import attention_backward, attention_forward
from kernels.matmul import matmul_backward_inp, matmul_backward_weight, matmul_forward
from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward, rmsnorm_recompute
from kernels.rope import rope_table
from kernels.swiglu import matmul_swiglu_backward, matmul_swiglu_forward
from llmc.model.batch import embedding_backward, embedding_forward
from llmc.model.loss import cross_entropy_loss
from llmc.model.model import Model
from llmc.model.tensors import Config
from llmc.run.trainer import run_trainer
from train_gpt2_fp32 import train

import numpy as np

# The tensors: name, shape, options, as train_gpt2_fp32.py explains them. llmc/model/activations.py adds those of
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
    ("residual",    ("L+1", "B", "T", "C")),         # the residual stream before each layer, and after the last
    ("stats",       ("L+1", "B", "T"), "fp32"),      # of the norm of each residual: rstd alone
    ("qkvproj",     ("L", "B", "T", "QKV")),         # queries, keys and values as they are projected
    ("atty",        ("L", "B", "T", "Q")),           # the heads' outputs, side by side
    ("residual2",   ("L", "B", "T", "C")),           # between attention and MLP
    ("stats2",      ("L", "B", "T"), "fp32"),        # rstd of its norm
    ("fch",         ("L", "B", "T", "2H")),          # up and gate
    ("logits",      ("chunk", "Vp")),                # and then their gradient; chunk: B T rows, or --logit-rows
    ("losses",      ("B", "T"), "fp32"),
    ("qkv",         ("B", "T", "QKV")),              # from qkvproj, q and k normalised and rotated; backward again
    ("qk_rstd",     ("B", "T", "QK"), "fp32"),       # of each head of q and k
    ("ln",          ("B", "T", "C"), "recomputed"),  # output of the norm before attention, and of the last norm
    ("ln2",         ("B", "T", "C"), "ln", "recomputed"),  # output of the norm before the MLP
    ("swiglu",      ("B", "T", "H"), "recomputed"),  # output of SwiGLU
)  # fmt: skip

GRADIENTS = (
    ("dresidual",   ("B", "T", "C")),                # of the residual stream, from the last layer down to the first
    ("dln",         ("B", "T", "C")),                # of ln, or of ln2
    ("datty",       ("B", "T", "Q")),                # of atty
    ("dswiglu",     ("B", "T", "H")),                # of swiglu
    ("dfch",        ("B", "T", "2H")),               # of fch
    ("dqkv",        ("B", "T", "QKV")),              # of qkv
    ("dqkvproj",    ("B", "T", "QKV"), "dqkv"),      # of qkvproj
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
    """From the tokens to the last norm's output, acts.ln[L]. Where the tensors in acts lie decides what is kept."""
    params, eps, B, T, (L, C, *_, H) = model.params, model.config.norm_eps, batch.B, batch.T, model.sizes

    embedding_forward(acts.residual[0], batch, params.wte, None, B, T, C)
    rmsnorm_forward(acts.ln[0], acts.stats[0], acts.residual[0], params.norm[0], eps, B, T, C)
    for l in range(L):
        qwen3_layer_forward(model, acts, batch, l)
        p, a, n = params.layer[l], acts.layer[l], l + 1
        matmul_forward(acts.residual[n], a.swiglu, p.fcprojw, None, B, T, H, C, a.residual2)
        rmsnorm_forward(acts.ln[n], acts.stats[n], acts.residual[n], params.norm[n], eps, B, T, C)


def qwen3_layer_forward(model: Model, acts, batch, l: int) -> None:
    """Runs layer l from a.residual and a.ln up to a.swiglu. This leaves in `a` all that its backward pass reads."""
    params, rope, B, T, (_, C, NH, NKV, HS, H) = model.params, model.constant.rope, batch.B, batch.T, model.sizes
    p, a, eps = params.layer[l], acts.layer[l], model.config.norm_eps

    matmul_forward(a.qkvproj, a.ln, p.qkvw, None, B, T, C, (NH + 2 * NKV) * HS)
    qk_norm_forward(
        a.qkv, a.qk_rstd, a.qkvproj, (p.qnormw, p.knormw), rope, eps, B, T, NH, NKV, HS, batch.positions
    )
    attention_forward(a.atty, a.attention, a.qkv, B, T, NH, NKV, HS)
    matmul_forward(a.residual2, a.atty, p.attprojw, None, B, T, NH * HS, C, a.residual)
    rmsnorm_forward(a.ln2, a.stats2, a.residual2, p.norm2, eps, B, T, C)

    matmul_swiglu_forward(a.swiglu, a.fch, a.ln2, p.fcw, B, T, C, H)


def qwen3_layer_recompute(model: Model, acts, batch, l: int) -> None:
    """With --recompute: runs layer l again, from a.residual, because other layers have overwritten its activations."""
    p, a, B, T, C = model.params.layer[l], acts.layer[l], batch.B, batch.T, model.config.channels

    rmsnorm_forward(a.ln, a.stats, a.residual, p.norm, model.config.norm_eps, B, T, C)
    qwen3_layer_forward(model, acts, batch, l)


def qwen3_backward(model: Model, acts, batch, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what forward and loss left in acts. The loss has added
    its part of the head's. In a step's first batch, without accumulate, sets those of the layers' matrices instead.
    Goes from the last layer to the first, and recomputes the outputs of RMSNorm and SwiGLU for the weights' gradients.
    Qwen3's qkv is recomputed, too, from qkvproj: to keep both would take Qwen3-0.6B 0.9 GB more at B 2, T 1024.
    """
    params, grads, B, T, (L, C, NH, NKV, HS, H) = model.params, model.grads, batch.B, batch.T, model.sizes
    rope, dresidual, dln = model.constant.rope, acts.dresidual, acts.dln

    device.fill_zero(dresidual)
    for l in reversed(range(L)):
        p, g, a, n = params.layer[l], grads.layer[l], acts.layer[l], l + 1
        rmsnorm_backward(dresidual, grads.norm[n], dln, acts.residual[n], params.norm[n], acts.stats[n], B, T, C)
        acts.recompute_layer(model, acts, batch, l)  # does nothing if each layer keeps its own activations

        matmul_swiglu_backward(a.dfch, a.swiglu_recomputed, a.dswiglu, dresidual, p.fcprojw, a.fch, B, T, H, C)
        matmul_backward_weight(g.fcprojw, dresidual, a.swiglu_recomputed, B, T, H, C, accumulate)
        matmul_backward_inp(dln, a.dfch, p.fcw, B, T, C, 2 * H)
        rmsnorm_recompute(a.ln2_recomputed, a.residual2, p.norm2, a.stats2, B, T, C)
        matmul_backward_weight(g.fcw, a.dfch, a.ln2_recomputed, B, T, C, 2 * H, accumulate)
        rmsnorm_backward(dresidual, g.norm2, dln, a.residual2, p.norm2, a.stats2, B, T, C)

        matmul_backward_inp(a.datty, dresidual, p.attprojw, B, T, NH * HS, C)
        matmul_backward_weight(g.attprojw, dresidual, a.atty, B, T, NH * HS, C, accumulate)
        qk_norm_forward(
            a.qkv, a.qk_rstd, a.qkvproj, (p.qnormw, p.knormw), rope, model.config.norm_eps, B, T, NH, NKV, HS
        )  # fmt: skip
        attention_backward(a.dqkv, a.datty, a.atty, a.attention, a.qkv, B, T, NH, NKV, HS)
        qk_norm_backward(
            a.dqkvproj, (g.qnormw, g.knormw), a.dqkv, a.qkvproj, (p.qnormw, p.knormw), a.qk_rstd, rope,
            B, T, NH, NKV, HS,
        )  # fmt: skip
        matmul_backward_inp(dln, a.dqkvproj, p.qkvw, B, T, C, (NH + 2 * NKV) * HS)
        rmsnorm_recompute(a.ln_recomputed, a.residual, p.norm, a.stats, B, T, C)
        matmul_backward_weight(g.qkvw, a.dqkvproj, a.ln_recomputed, B, T, C, (NH + 2 * NKV) * HS, accumulate)
    rmsnorm_backward(dresidual, grads.norm[0], dln, acts.residual[0], params.norm[0], acts.stats[0], B, T, C)
    embedding_backward(grads.wte, None, dresidual, batch, B, T, C)


class Qwen3(Model):
    """Qwen3, as llmc/ needs to know it."""

    Config = Qwen3Config
    ACTIVATIONS, GRADIENTS, SIZES = ACTIVATIONS, GRADIENTS, ("L", "C", "NH", "NKV", "HS", "H")
    LINEAR = {"qkvw": ("ln", "dqkvproj"), "fcw": ("ln2", "dfch"), "fcprojw": ("swiglu", None)}
    forward, loss, backward = qwen3_forward, cross_entropy_loss, qwen3_backward
    layer_recompute = qwen3_layer_recompute

    @staticmethod
    def group_parameters(tensors, config: Qwen3Config) -> None:
        for t in tensors.layer:
            t.norm, t.norm2 = t.ln1w, t.ln2w
        tensors.norm = [*(t.norm for t in tensors.layer), tensors.lnfw]

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
