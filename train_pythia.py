"""Trains Pythia in fp32: attention and MLP side by side on one residual stream, rotary positions in a part of a head.

The file has the order and the letters of train_gpt2_fp32.py, which also has the loop over steps. R are the rotary
channels of a head. A block is x = x + attention(ln1(x)) + mlp(ln2(x)), as in GPT-NeoX; with tied_norm the MLP reads
ln1(x) too, as in GPT-J; where it is sequential, it is GPT-2's.
"""

import sys
from dataclasses import dataclass
from math import sqrt

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P leaves it out
import device
from device.errors import UserError
from kernels.attention import attention_backward, attention_forward
from kernels.dropout import dropout_at
from kernels.gelu import matmul_gelu_backward, matmul_gelu_forward
from kernels.matmul import matmul_backward_bias, matmul_backward_inp, matmul_backward_weight, matmul_forward
from kernels.norm import recompute_norm
from kernels.parallel_residual import branch_forward, parallel_residual_backward, parallel_residual_forward
from kernels.rope import rope_backward, rope_forward, rope_table
from llmc.model.batch import embedding_backward, embedding_forward
from llmc.model.loss import cross_entropy_loss
from llmc.model.model import Model
from llmc.model.tensors import Config
from llmc.run.trainer import run_trainer
from train_gpt2_fp32 import train

import numpy as np

# The tensors, as train_gpt2_fp32.py explains them.
PARAMETERS = (                                       # in the order of the model file
    ("wte",        ("Vp", "C")),                     # token embedding
    ("lm_head",    ("Vp", "C"), "head"),             # the weight of the classifier
    ("ln1w",       ("L", "C")),
    ("ln1b",       ("L", "C")),                      # LayerNorm only; so are ln2b and lnfb
    ("qkvw",       ("L", "3C", "C")),                # rows of q, of k, of v
    ("qkvb",       ("L", "3C")),
    ("attprojw",   ("L", "C", "C")),
    ("attprojb",   ("L", "C")),
    ("ln2w",       ("L", "C")),                      # only if the norm is not tied; so is ln2b
    ("ln2b",       ("L", "C")),
    ("fcw",        ("L", "4C", "C")),
    ("fcb",        ("L", "4C")),
    ("fcprojw",    ("L", "C", "4C")),
    ("fcprojb",    ("L", "C")),
    ("lnfw",       ("C",)),
    ("lnfb",       ("C",)),
)  # fmt: skip

ACTIVATIONS = (
    ("residual",   ("L+1", "B", "T", "C")),          # the residual stream before each layer, and after the last
    ("mean",       ("L+1", "B", "T"), "fp32"),       # of the norms of each residual; means: LayerNorm only
    ("rstd",       ("L+1", "B", "T"), "fp32"),
    ("atty",       ("L", "B", "T", "C")),            # the heads' outputs, side by side
    ("residual2",  ("L", "B", "T", "C")),            # between attention and MLP; only in a sequential block,
    ("mean2",      ("L", "B", "T"), "fp32"),         # like the statistics of its norm
    ("rstd2",      ("L", "B", "T"), "fp32"),
    ("fch",        ("L", "B", "T", "4C")),           # before its bias and GELU
    ("losses",     ("B", "T"), "fp32"),
    # Gradients use the memory of outputs that only forward needs. Logits exist only between forward and backward.
    ("logits",     ("chunk", "Vp")),                 # and then their gradient; chunk: B T rows, or --logit-rows
    ("gelu",       ("B", "T", "4C"), "logits", "recomputed"),  # output of GELU
    ("normed",     ("B", "T", "C"), "logits", "recomputed"),  # only as normed_recomputed: ln or ln2
    ("dgelu",      ("B", "T", "4C"), "logits", "gelu"),  # of gelu
    ("dfch",       ("B", "T", "4C"), "dgelu"),       # of fch
    ("dqkv",       ("B", "T", "3C"), "logits", "gelu"),  # of qkv
    ("halfway",    ("B", "T", "C"), "logits", "dfch"),  # forward, parallel block: the stream after attention
    ("dproj",      ("B", "T", "C"), "logits", "dfch"),  # backward, with dropout: of its projection; last residual[0]'s
    ("dfcproj",    ("B", "T", "C"), "logits", "dproj"),  # backward, with dropout: of the MLP's projection
    ("ln",         ("B", "T", "C")),                 # forward: output of the norm before attention; of the last norm
    ("datty",      ("B", "T", "C"), "ln"),           # of atty
    ("dln1",       ("B", "T", "C"), "ln"),           # of a layer's ln
    ("ln2",        ("B", "T", "C")),                 # forward: output of the norm before the MLP
    ("dln",        ("B", "T", "C"), "ln2"),          # of the last norm's output
    ("dln2",       ("B", "T", "C"), "ln2"),          # of ln2; where the norm is tied, of ln by both readers
)  # fmt: skip

GRADIENTS = (
    ("dresidual",  ("B", "T", "C")),                 # of the residual stream, from the last layer down to the first
)  # fmt: skip


@dataclass(frozen=True)
class PythiaConfig(Config):
    """The sizes of a Pythia, and what else fixes the function that it computes.

    Its file is our own: the header of Config.header, then those of PARAMETERS that the model has, the vocabulary
    padded. Rows of q and k are in the order in which RoPE turns channels 2i and 2i + 1 of a head.
    """

    max_seq_len: int     # (maxT) longest sequence
    vocab_size: int      # (V) tokens; (Vp) is that rounded up to a multiple of 128
    num_layers: int      # (L)
    num_heads: int       # (NH)
    channels: int        # (C)
    rotary: float = 0.25  # (R = int(rotary HS)) the share of a head's channels that RoPE turns, its first ones
    rope_theta: float = 1e4
    norm_eps: float = 1e-5
    norm: str = "layer"  # LayerNorm, or "rms": RMSNorm, without means and shifts
    tied_norm: bool = False  # one norm for both branches of a block, which must be parallel
    parallel: bool = True  # the MLP reads what the attention reads, and not what it adds
    gelu: str = "tanh"   # or "erf"

    NAME, SCRIPT, MAGIC, PARAMETERS = "Pythia", "train_pythia.py", 20230403, PARAMETERS  # the day of Pythia's paper
    DESCRIPTION = {
        "layers": "num_layers", "heads": "num_heads", "channels": "channels", "maxT": "max_seq_len",
        "rotary": "rotary", "theta": "rope_theta", "eps": "norm_eps", "norm": "norm", "tied_norm": "tied_norm",
        "parallel": "parallel", "gelu": "gelu", "vocab": "vocab_size",
    }  # fmt: skip
    PRESETS = {
        "pythia-160m": "layers=12,heads=12,channels=768",
        "pythia-14m": "layers=6,heads=4,channels=128",
        "pythia-70m": "layers=6,heads=8,channels=512",
        "pythia-410m": "layers=24,heads=16,channels=1024",
        "pythia-1b": "layers=16,heads=8,channels=2048",
        "tiny": "layers=4,heads=4,channels=128,maxT=64",
    }
    DEFAULTS = {"max_seq_len": 2048, "vocab_size": 50304}
    CHOICES = {"norm": ("layer", "rms"), "gelu": ("tanh", "erf")}
    DEFAULT_MODEL = "pythia_160M.bin"
    FETCH = "make one from Hugging Face's with dev/hf/import_hf.py"

    @property
    def absent(self) -> frozenset[str]:
        absent = {"ln1b", "ln2b", "lnfb", "mean", "mean2"} if self.norm == "rms" else set()
        absent |= {"ln2w", "ln2b"} if self.tied_norm else set()
        return frozenset(absent | ({"residual2", "mean2", "rstd2"} if self.parallel else {"halfway"}))

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"R": int(self.rotary * self.head_size)}

    def check(self, source: str) -> None:
        super().check(source)
        R, HS = self.sizes()["R"], self.head_size
        if self.rotary > 1 or R < 2 or R % 2:
            raise UserError(f"{source}: rotary {self.rotary:g} is {R} of a head's {HS} channels; it must be 2, 4, …")
        if self.tied_norm and not self.parallel:
            raise UserError(f"{source}: tied_norm needs parallel: a sequential block's two norms read different things")


def pythia_forward(model: Model, acts, batch) -> None:
    """From the tokens to the last norm's output, acts.ln[L]. Where the tensors in acts lie decides what is kept."""
    config, params, B, T, (L, C, *_) = model.config, model.params, batch.B, batch.T, model.sizes
    eps, outs = config.norm_eps, (acts.ln[0], acts.ln2)  # all layers share these two

    embedding_forward(acts.residual[0], batch, params.wte, None, B, T, C, dropout_at(batch.random, 0))
    parallel_residual_forward(outs, acts.stats[0], acts.residual[0], params.norm[0], eps, B, T, C)
    for l in range(L):
        pythia_layer_forward(model, acts, batch, l)
        p, a, n, stream = params.layer[l], acts.layer[l], l + 1, acts.layer[l].residual2
        dropouts = [dropout_at(batch.random, site + 2 * l) for site in (1, 2)]
        if config.parallel:
            stream = a.halfway
            branch_forward(stream, a.atty, p.attprojw, p.attprojb, B, T, C, C, a.residual, dropouts[0])
        branch_forward(acts.residual[n], a.gelu, p.fcprojw, p.fcprojb, B, T, 4 * C, C, stream, dropouts[1])
        parallel_residual_forward(outs, acts.stats[n], acts.residual[n], params.norm[n], eps, B, T, C)


def pythia_layer_forward(model: Model, acts, batch, l: int) -> None:
    """Runs layer l from a.residual and its norms' outputs up to a.gelu. This leaves in `a` all that backward reads."""
    config, p, a, B, T = model.config, model.params.layer[l], acts.layer[l], batch.B, batch.T
    _, C, NH, HS, R = model.sizes

    matmul_forward(a.qkv, a.ln, p.qkvw, p.qkvb, B, T, C, 3 * C)
    rope_forward(a.qkv, model.constant.rope, B, T, NH, NH, HS, R, batch.positions)
    attention_forward(a.atty, a.attention, a.qkv, B, T, NH, NH, HS)
    if not config.parallel:
        dropout = dropout_at(batch.random, 1 + 2 * l)
        branch_forward(a.residual2, a.atty, p.attprojw, p.attprojb, B, T, C, C, a.residual, dropout)
        parallel_residual_forward([a.ln2], a.stats2, a.residual2, p.norm2, config.norm_eps, B, T, C)
    matmul_gelu_forward(a.gelu, a.fch, a.ln2, p.fcw, p.fcb, B, T, C, 4 * C, config.gelu == "erf")


def pythia_layer_recompute(model: Model, acts, batch, l: int) -> None:
    """With --recompute: runs layer l again, from a.residual, because other layers have overwritten its activations."""
    p, a, B, T, C = model.params.layer[l], acts.layer[l], batch.B, batch.T, model.config.channels
    parallel_residual_forward((a.ln, a.ln2), a.stats, a.residual, p.norm, model.config.norm_eps, B, T, C)
    pythia_layer_forward(model, acts, batch, l)


def pythia_backward(model: Model, acts, batch, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what forward and loss left in acts. The loss has added
    its part of lm_head's. In a step's first batch, without accumulate, sets those of the layers' matrices instead. Goes
    from the last layer to the first, and recomputes the outputs of norms and GELU for the weights' gradients. Without
    dropout, the gradient of a branch is that of the stream."""
    params, grads, B, T, (L, C, NH, HS, R) = model.params, model.grads, batch.B, batch.T, model.sizes
    config, random, dresidual = model.config, batch.random, acts.dresidual
    dproj, dfcproj = (dresidual, dresidual) if random is None else (acts.dproj, acts.dfcproj)
    douts = [acts.dln]  # of the outputs of the norms after layer l

    device.fill_zero(dresidual)
    for l in reversed(range(L)):
        p, g, a, n = params.layer[l], grads.layer[l], acts.layer[l], l + 1
        branches = [(dfcproj, g.fcprojb, dropout_at(random, 2 + 2 * l))]
        if config.parallel:
            branches = [(dproj, g.attprojb, dropout_at(random, 1 + 2 * l)), *branches]
        parallel_residual_backward(
            dresidual, grads.norm[n], douts, acts.residual[n], params.norm[n], acts.stats[n], B, T, C, branches=branches
        )
        acts.recompute_layer(model, acts, batch, l)  # does nothing if each layer keeps its own activations

        matmul_gelu_backward(  # dfch in place of dgelu
            a.dfch, g.fcb, a.gelu_recomputed, a.dgelu, dfcproj, p.fcprojw, a.fch, p.fcb, B, T, 4 * C, C,
            config.gelu == "erf",
        )
        matmul_backward_weight(g.fcprojw, dfcproj, a.gelu_recomputed, B, T, 4 * C, C, accumulate)
        matmul_backward_inp(a.dln2, a.dfch, p.fcw, B, T, C, 4 * C)
        recompute_norm(a.normed_recomputed, a.residual2, p.norm2[0], a.stats2, B, T, C)
        matmul_backward_weight(g.fcw, a.dfch, a.normed_recomputed, B, T, C, 4 * C, accumulate)
        if not config.parallel:
            parallel_residual_backward(
                dresidual, g.norm2, [a.dln2], a.residual2, p.norm2, a.stats2, B, T, C,
                branches=[(dproj, g.attprojb, dropout_at(random, 1 + 2 * l))],
            )  # fmt: skip

        matmul_backward_inp(a.datty, dproj, p.attprojw, B, T, C, C)
        matmul_backward_weight(g.attprojw, dproj, a.atty, B, T, C, C, accumulate)
        attention_backward(a.dqkv, a.datty, a.atty, a.attention, a.qkv, B, T, NH, NH, HS)
        rope_backward(a.dqkv, model.constant.rope, B, T, NH, NH, HS, R)
        matmul_backward_bias(g.qkvb, a.dqkv, B, T, 3 * C)
        matmul_backward_inp(a.dln1, a.dqkv, p.qkvw, B, T, C, 3 * C, accumulate=config.tied_norm)
        recompute_norm(a.normed_recomputed, a.residual, p.norm[0], a.stats, B, T, C)
        matmul_backward_weight(g.qkvw, a.dqkv, a.normed_recomputed, B, T, C, 3 * C, accumulate)
        douts = [a.dln1, a.dln2]
    parallel_residual_backward(
        dresidual, grads.norm[0], douts, acts.residual[0], params.norm[0], acts.stats[0], B, T, C,
        branches=[(dproj, None, dropout_at(random, 0))],
    )  # fmt: skip
    embedding_backward(grads.wte, None, dproj, batch, B, T, C)


class Pythia(Model):
    """Pythia, as llmc/ needs to know it."""

    Config, DROPS = PythiaConfig, True
    ACTIVATIONS, GRADIENTS, SIZES = ACTIVATIONS, GRADIENTS, ("L", "C", "NH", "HS", "R")
    LINEAR = {"fcw": (None, "dfch"), "fcprojw": ("gelu", None)}
    forward, loss, backward = pythia_forward, cross_entropy_loss, pythia_backward
    layer_recompute = pythia_layer_recompute

    @staticmethod
    def group_parameters(tensors, config: PythiaConfig) -> None:
        """norm: a list of (weight, shift) of the norms there. Before an untied parallel layer there are two."""
        count = 2 if config.parallel and not config.tied_norm else 1
        for t in tensors.layer:
            t.norm = [(t.ln1w, t.ln1b), (t.ln2w, t.ln2b)][:count]
            t.norm2 = [(t.ln1w, t.ln1b) if config.tied_norm else (t.ln2w, t.ln2b)]
        tensors.norm = [*(t.norm for t in tensors.layer), [(tensors.lnfw, tensors.lnfb)]]

    @staticmethod
    def group_activations(acts, config: PythiaConfig) -> None:
        """stats: (mean, rstd). In a parallel layer both norms read one residual; a tied norm has a single output."""
        acts.stats = list(zip(acts.mean or [None] * len(acts.rstd), acts.rstd, strict=True))
        for a, stats in zip(acts.layer, acts.stats, strict=False):
            a.stats, a.stats2 = stats, (a.mean2, a.rstd2)
            if config.parallel:
                a.residual2, a.stats2 = a.residual, a.stats
            if config.tied_norm:  # both branches read the output, and add to its gradient
                a.ln2, a.dln1 = a.ln, a.dln2

    @classmethod
    def first_weights(cls, config: PythiaConfig) -> tuple[dict[str, float], dict[str, float]]:
        """As the originals started: normal with deviation sqrt(2 / 5C), the projections back into the residual stream
        with 2 / (L sqrt(C)); the norms' weights 1, biases 0."""
        deviations = dict.fromkeys(config.matrices, sqrt(2 / (5 * config.channels)))
        deviations["attprojw"] = deviations["fcprojw"] = 2 / (config.num_layers * sqrt(config.channels))
        return deviations, dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)

    @classmethod
    def constants(cls, config: PythiaConfig, T: int) -> dict[str, np.ndarray]:
        """rope (T, R/2, 2): the cosine and the sine of each pair's angle at each position."""
        return {"rope": rope_table(T, config.sizes()["R"], config.rope_theta)}


if __name__ == "__main__":
    run_trainer(train, Pythia)
