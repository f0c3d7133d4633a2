"""Trains Pythia in fp32: attention and MLP side by side on one residual stream, rotary positions in a part of a head.

The file reads from top to bottom, in the order of train_gpt2_fp32.py: the tensors, the model's file, forward, backward,
and last the training loop. In shapes, B is the batch size, T the sequence length, C the channels, L the layers, NH the
heads, HS = C / NH their size, R the rotary channels of a head, V the vocabulary and Vp the same padded. A block is
x = x + attention(ln1(x)) + mlp(ln2(x)), as in GPT-NeoX; with tied_norm the MLP reads ln1(x) too, as in GPT-J; where it
is sequential, it is GPT-2's.
"""

from dataclasses import dataclass
from math import inf, sqrt

from llmc import device  # first: it sets what NumPy must find in the environment

import numpy as np  # isort: skip

from kernels.attention import attention_backward, attention_forward
from kernels.classifier import cross_entropy_loss
from kernels.dropout import dropouts
from kernels.encoder import encoder_backward, encoder_forward
from kernels.flash_attention import choose_attention, flash_attention_backward, flash_attention_forward
from kernels.gelu import gelu_backward, gelu_forward
from kernels.matmul import (
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_backward_weight_transposed,
    matmul_forward,
)
from kernels.reduce import MOST_PARTIALS
from kernels.rope import rope_backward, rope_forward, rope_table
from kernels.stream import norm_backward, norm_forward, norm_transposed
from kernels.training import train_step
from llmc.arguments import parse_arguments
from llmc.errors import UserError
from llmc.files import PYTHIA_MODEL
from llmc.model import Model
from llmc.program import run_program
from llmc.run import Run
from llmc.tensors import Config, Table, padded

# The tensors, each a named view into one buffer of its kind. A tensor whose shape begins with L has one part a layer.
# A third word names an earlier tensor, no longer needed, whose place this one takes.

PARAMETERS = (                                       # in the order of the model file
    ("wte",        ("Vp", "C")),                     # token embedding
    ("lm_head",    ("Vp", "C")),                     # the weight of the classifier
    ("ln1w",       ("L", "C")),
    ("ln1b",       ("L", "C")),                      # LayerNorm's alone, as are ln2b and lnfb
    ("qkvw",       ("L", "3C", "C")),                # rows of q, of k, of v
    ("qkvb",       ("L", "3C")),
    ("attprojw",   ("L", "C", "C")),
    ("attprojb",   ("L", "C")),
    ("ln2w",       ("L", "C")),                      # where the norm is not tied, as ln2b
    ("ln2b",       ("L", "C")),
    ("fcw",        ("L", "4C", "C")),
    ("fcb",        ("L", "4C")),
    ("fcprojw",    ("L", "C", "4C")),
    ("fcprojb",    ("L", "C")),
    ("lnfw",       ("C",)),
    ("lnfb",       ("C",)),
)  # fmt: skip

ACTIVATIONS = (
    ("encoded",    ("B", "T", "C")),
    ("ln1_mean",   ("L", "B", "T")),                 # in a parallel block of both norms. Means are LayerNorm's alone
    ("ln1_rstd",   ("L", "B", "T")),
    ("atty",       ("L", "B", "T", "C")),            # the heads' outputs, side by side
    ("residual2",  ("L", "B", "T", "C")),            # between attention and MLP: in a sequential block alone,
    ("ln2_mean",   ("L", "B", "T")),                 # as what belongs to its norm
    ("ln2_rstd",   ("L", "B", "T")),
    ("fch",        ("L", "B", "T", "4C")),           # before its bias and GELU
    ("residual3",  ("L", "B", "T", "C")),
    ("lnf_mean",   ("B", "T")),
    ("lnf_rstd",   ("B", "T")),
    ("losses",     ("B", "T")),
    # Scratch, the same for every layer. Backward recomputes, transposed, what weight gradients take, and keeps its
    # gradients where the outputs of forward were that nothing needs any more.
    ("wide",       ("B", "T", "W")),                 # room for each of the next three
    ("logits",     ("B", "T", "Vp"), "wide"),        # and then their gradient
    ("dfch",       ("B", "T", "4C"), "wide"),        # of the GELU's output, which becomes that of its input
    ("dqkv",       ("B", "T", "3C"), "wide"),
    ("ln1",        ("B", "T", "C")),                 # forward: output of the norm at hand, in front of the attention
    ("datty",      ("B", "T", "C"), "ln1"),          # backward: of atty
    ("dln1",       ("B", "T", "C"), "ln1"),          # backward: of ln1
    ("ln2",        ("B", "T", "C")),                 # forward: output of the norm at hand, in front of the MLP
    ("dln2",       ("B", "T", "C"), "ln2"),          # backward: of ln2; where the norm is tied, of ln1 by both readers
    ("attproj",    ("B", "T", "C")),                 # forward: the attention's projection, before its bias
    ("dattproj",   ("B", "T", "C"), "attproj"),      # backward, with dropout: of the same
    ("dencoded",   ("B", "T", "C"), "attproj"),      # backward, with dropout: of encoded
    ("fch_gelu",   ("B", "T", "4C")),                # forward: output of the GELU at hand
    ("fch_gelu_T", ("4C", "B", "T"), "fch_gelu"),    # backward: the same, transposed
    ("ln_T",       ("C", "B", "T"), "fch_gelu"),     # backward: ln1 or ln2, transposed
    ("atty_T",     ("C", "B", "T"), "fch_gelu"),     # backward: atty, transposed
    ("fcproj",     ("B", "T", "C")),                 # forward: the MLP's projection, before its bias
    ("dfcproj",    ("B", "T", "C"), "fcproj"),       # backward, with dropout: of the same
)  # fmt: skip

FLASH_ACTIVATIONS = (
    ("qkv",        ("L", "B", "T", "3C")),           # q and k rotated
    ("lse",        ("L", "B", "NH", "T")),           # log of the softmax's denominator
)  # fmt: skip

MATRIX_ACTIVATIONS = (
    ("qkvr",       ("L", "3C", "B", "T")),           # q, k, v: (3, B, NH, T, HS), q and k rotated
    ("att",        ("L", "B", "NH", "T", "T")),
    ("qkv",        ("B", "T", "3C"), "wide"),        # scratch: q, k, v before they are permuted
    ("atty_r",     ("B", "NH", "T", "HS"), "attproj"),   # forward: the heads' outputs, one head after another
    ("datty_r",    ("B", "NH", "T", "HS"), "fch_gelu"),  # backward: their gradients
)  # fmt: skip

ACTIVATION_GRADIENTS = (
    ("dresidual",  ("B", "T", "C")),                 # of the residual stream, from the last layer down to the first
    ("scratch",    ("S",)),                          # room for each of the next two
    ("weight_T",   ("4C", "C"), "scratch"),          # the weight at hand, transposed
    ("partials",   ("P", "6C"), "scratch"),          # sums of blocks, before they are added up
)  # fmt: skip

FLASH_GRADIENTS = (
    ("dsum",       ("B", "NH", "T")),                # of datty * atty over a head's channels
)  # fmt: skip

MATRIX_GRADIENTS = (
    ("dqkvr",      ("3C", "B", "T")),
    ("datt",       ("B", "NH", "T", "T")),
)  # fmt: skip


@dataclass(frozen=True)
class PythiaConfig(Config):
    """The sizes of a Pythia, and what else fixes the function that it computes.

    Its file is our own (Config.header): int32[256]: 20230403, version 1, maxT, V, L, NH, C, norm (0 layer, 1 rms),
    tied_norm, parallel, gelu (0 tanh, 1 erf); float64[128]: rotary, theta, eps; then those of PARAMETERS that the model
    has, the vocabulary padded. Rows of q and k are in the order in which RoPE turns channels 2i and 2i + 1 of a head.
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

    NAME, SCRIPT, MAGIC, HEADER_BYTES = "Pythia", "train_pythia_fp32.py", PYTHIA_MODEL, 2048
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
    }
    DEFAULTS = {"max_seq_len": 2048, "vocab_size": 50304}
    CHOICES = {"norm": ("layer", "rms"), "gelu": ("tanh", "erf")}
    DEFAULT_MODEL = "pythia_160M.bin"
    FETCH = "make one from Hugging Face's with dev/import_hf.py, or start from random weights with -e pythia-160m"

    def present(self, table: Table) -> Table:
        """The rows of a table that this model has."""
        absent = {"ln1b", "ln2b", "lnfb", "ln1_mean", "ln2_mean", "lnf_mean"} if self.norm == "rms" else set()
        absent |= {"ln2w", "ln2b"} if self.tied_norm else set()
        absent |= {"residual2", "ln2_mean", "ln2_rstd"} if self.parallel else set()
        return tuple(row for row in table if row[0] not in absent)

    def parameters(self) -> Table:
        return self.present(PARAMETERS)

    @property
    def rotary_channels(self) -> int:
        return int(self.rotary * (self.channels // self.num_heads))

    def sizes(self) -> dict[str, int]:
        C, NH, Vp, P = self.channels, self.num_heads, padded(self.vocab_size), MOST_PARTIALS
        return {
            "Vp": Vp, "L": self.num_layers, "NH": NH, "HS": C // NH, "C": C, "3C": 3 * C, "4C": 4 * C, "6C": 6 * C,
            "W": max(Vp, 4 * C), "P": P, "S": max(4 * C * C, 6 * C * P),
        }  # fmt: skip

    def rows(self) -> list[tuple[str, object]]:
        R, HS = self.rotary_channels, self.channels // self.num_heads
        norm = {"layer": "LayerNorm", "rms": "RMSNorm"}[self.norm] + (", one for both" if self.tied_norm else "")
        return [
            ("layers/heads/channels", f"{self.num_layers}, {self.num_heads}, {self.channels}"),
            ("RoPE", f"{R} channels of {HS}, theta {self.rope_theta:g}"),
            ("attention and MLP", f"{'parallel' if self.parallel else 'sequential'}, {norm}, GELU by {self.gelu}"),
        ]

    def check(self, source: str) -> None:
        super().check(source)
        if not (0 < self.rotary <= 1 and self.rotary_channels >= 2 and self.rotary_channels % 2 == 0):
            raise UserError(
                f"{source}: rotary {self.rotary:g} of a head of {self.channels} / {self.num_heads} channels must be an "
                "even number of them, as RoPE turns pairs, and at least 2"
            )
        if not (0 < self.rope_theta < inf and 0 < self.norm_eps < inf):
            raise UserError(f"{source}: rope_theta {self.rope_theta} and norm_eps {self.norm_eps} must be positive")
        if self.tied_norm and not self.parallel:
            raise UserError(f"{source}: tied_norm needs parallel: a sequential block's two norms read different things")


def pythia_forward(model: Model, B: int, T: int, training: bool = False) -> None:
    """Sets the logits, acts(B, T).logits (B,T,Vp), from the first B*T of model.inputs; with dropout when training."""
    config, params, acts, parallel = model.config, model.params, model.acts(B, T), model.config.parallel
    L, NH, C, Vp = config.num_layers, config.num_heads, config.channels, padded(config.vocab_size)
    HS, R, flash, relu = C // NH, config.rotary_channels, model.attention == "flash", model.attention == "relu"
    drop = dropouts(model, training)

    encoder_forward(acts.encoded, model.inputs, params.wte, None, B, T, C, drop.encoded)
    norm_forward(model, acts, 0, drop, B, T)

    for l in range(L):
        p, a = params.layer[l], acts.layer[l]

        qkv = a.qkv if flash else acts.qkv
        matmul_forward(qkv, acts.ln1, p.qkvw, p.qkvb, B, T, C, 3 * C)
        rope_forward(qkv, model.constant.rope, B, T, NH, NH, HS, R)
        if flash:
            flash_attention_forward(a.atty, a.lse, qkv, B, T, C, NH, NH)
        else:
            attention_forward(a.atty, a.qkvr, a.att, acts.atty_r, qkv, B, T, C, NH, NH, relu)
        matmul_forward(acts.attproj, a.atty, p.attprojw, None, B, T, C, C)
        if not parallel:
            norm_forward(model, acts, 2 * l + 1, drop, B, T)

        matmul_forward(a.fch, acts.ln1 if config.tied_norm else acts.ln2, p.fcw, None, B, T, C, 4 * C)
        gelu_forward(acts.fch_gelu, a.fch, p.fcb, B * T, 4 * C, config.gelu == "erf")
        matmul_forward(acts.fcproj, acts.fch_gelu, p.fcprojw, None, B, T, 4 * C, C)
        norm_forward(model, acts, l + 1 if parallel else 2 * l + 2, drop, B, T)

    matmul_forward(acts.logits, acts.ln1, params.lm_head, None, B, T, C, Vp)


def pythia_backward(model: Model, B: int, T: int, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what pythia_forward and the loss left behind.

    Without `accumulate` the gradients of the weight matrices are set instead, for the first batch after zero_grad. The
    layers' backward passes follow in the reverse order of forward. A weight's gradient takes the product's input
    transposed: the outputs of norms and GELU are recomputed in that layout, from what went into them.
    """
    config, params, grads, acts, gacts = model.config, model.params, model.grads, model.acts(B, T), model.grads_acts
    L, NH, C, Vp = config.num_layers, config.num_heads, config.channels, padded(config.vocab_size)
    HS, R, flash, relu = C // NH, config.rotary_channels, model.attention == "flash", model.attention == "relu"
    dresidual, dfch, dqkv, datty, dln1, dln2 = gacts.dresidual, acts.dfch, acts.dqkv, acts.datty, acts.dln1, acts.dln2
    weight_T, partials, drop = gacts.weight_T, gacts.partials, dropouts(model, training=True)
    parallel, tied = config.parallel, config.tied_norm
    dencoded, dattproj, dfcproj = (
        (acts.dencoded, acts.dattproj, acts.dfcproj) if model.dropout else (dresidual, dresidual, dresidual)
    )
    last = L if parallel else 2 * L

    matmul_backward_inp(dln1, acts.logits, params.lm_head, None, B, T, C, Vp)
    norm_transposed(model, acts, last, False, B, T)
    matmul_backward_weight_transposed(grads.lm_head, acts.logits, acts.ln_T, B, T, C, Vp, accumulate)
    device.fill_zero(dresidual)
    norm_backward(model, acts, last, drop, dln1, None, B, T)

    for l in reversed(range(L)):
        p, g, a = params.layer[l], grads.layer[l], acts.layer[l]
        in_front, of_mlp = (l, l) if parallel else (2 * l, 2 * l + 1)

        matmul_backward_inp(dfch, dfcproj, p.fcprojw, weight_T, B, T, 4 * C, C)
        gelu_backward(dfch, g.fcb, acts.fch_gelu_T, partials, a.fch, p.fcb, B * T, 4 * C, config.gelu == "erf")
        matmul_backward_weight_transposed(g.fcprojw, dfcproj, acts.fch_gelu_T, B, T, 4 * C, C, accumulate)
        matmul_backward_inp(dln2, dfch, p.fcw, weight_T, B, T, C, 4 * C)
        norm_transposed(model, acts, of_mlp, parallel and not tied, B, T)
        matmul_backward_weight_transposed(g.fcw, dfch, acts.ln_T, B, T, C, 4 * C, accumulate)
        if not parallel:
            norm_backward(model, acts, of_mlp, drop, dln2, None, B, T)

        matmul_backward_inp(datty, dattproj, p.attprojw, weight_T, B, T, C, C)
        matmul_backward_weight(g.attprojw, dattproj, a.atty, acts.atty_T, B, T, C, C, accumulate)
        if flash:
            flash_attention_backward(dqkv, None, gacts.dsum, datty, a.atty, a.lse, a.qkv, B, T, C, NH, NH)
        else:
            attention_backward(
                dqkv, gacts.dqkvr, gacts.datt, acts.datty_r, datty, a.qkvr, a.att, B, T, C, NH, NH, relu
            )
        rope_backward(dqkv, model.constant.rope, B, T, NH, NH, HS, R)
        matmul_backward_bias(g.qkvb, partials, dqkv, B, T, 3 * C)
        matmul_backward_inp(dln2 if tied else dln1, dqkv, p.qkvw, weight_T, B, T, C, 3 * C, accumulate=tied)
        norm_transposed(model, acts, in_front, False, B, T)
        matmul_backward_weight_transposed(g.qkvw, dqkv, acts.ln_T, B, T, C, 3 * C, accumulate)
        dout0, dout1 = (dln2, None) if tied else (dln1, dln2 if parallel else None)
        norm_backward(model, acts, in_front, drop, dout0, dout1, B, T)

    encoder_backward(grads.wte, None, dencoded, model.inputs, model.order, model.count, B, T, C)


class Pythia(Model):
    """Pythia, as llmc/ needs to know it."""

    Config = PythiaConfig
    MATRICES = ("wte", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")
    PRODUCTS = ("lm_head", "qkvw", "attprojw", "fcw", "fcprojw")  # an embedding alone only has rows added to it
    choose_attention = staticmethod(choose_attention)
    forward, loss, backward, train_step = pythia_forward, cross_entropy_loss, pythia_backward, train_step

    @property
    def BY_FLASH(self) -> tuple[Table, Table]:
        return self.config.present(ACTIVATIONS + FLASH_ACTIVATIONS), ACTIVATION_GRADIENTS + FLASH_GRADIENTS

    @property
    def BY_MATRICES(self) -> tuple[Table, Table]:
        return self.config.present(ACTIVATIONS + MATRIX_ACTIVATIONS), ACTIVATION_GRADIENTS + MATRIX_GRADIENTS

    @classmethod
    def first_weights(cls, config: PythiaConfig) -> tuple[dict[str, float], dict[str, float]]:
        """As the originals started: normal with deviation sqrt(2 / 5C), the projections back into the residual stream
        with 2 / (L sqrt(C)); the norms' weights 1, biases 0."""
        deviations = dict.fromkeys(cls.MATRICES, sqrt(2 / (5 * config.channels)))
        deviations["attprojw"] = deviations["fcprojw"] = 2 / (config.num_layers * sqrt(config.channels))
        return deviations, dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)

    @classmethod
    def constants(cls, config: PythiaConfig, T: int) -> dict[str, np.ndarray]:
        """rope (T, R/2, 2): cosine and sine of the angle by which each pair of channels turns at each position."""
        return {"rope": rope_table(T, config.rotary_channels, config.rope_theta)}


def main() -> None:
    run = Run(Pythia, parse_arguments(PythiaConfig))
    train_step = run.model.train_step(run.batches, run.args.weight_decay, run.args.grad_clip)
    for step in run:  # which validates, samples, logs and saves where that is due, and ends when it is told to
        train_step(step, run.learning_rate(step))


if __name__ == "__main__":
    run_program(main, interrupted="interrupted before the first step")  # from then on the run has Ctrl-C
