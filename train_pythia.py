"""Trains Pythia in fp32: attention and MLP side by side on one residual stream, rotary positions in a part of a head.

The file reads from top to bottom, in the order of train_gpt2_fp32.py: the tensors, the model's file, forward, backward,
and last the loop over steps. In shapes, B is the batch size, T the sequence length, C the channels, L the layers, NH
the heads, HS = C / NH their size, R the rotary channels of a head, V the vocabulary and Vp the same padded. A block is
x = x + attention(ln1(x)) + mlp(ln2(x)), as in GPT-NeoX; with tied_norm the MLP reads ln1(x) too, as in GPT-J; where it
is sequential, it is GPT-2's.
"""

from argparse import Namespace
from dataclasses import dataclass
from math import sqrt

import device
from device.errors import UserError
from kernels.gelu import gelu_backward, gelu_forward
from kernels.matmul import (
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_backward_weight_transposed,
    matmul_forward,
    projection_forward,
)
from kernels.parallel_residual import norm_transposed, parallel_residual_backward, parallel_residual_forward
from kernels.reduce import MOST_PARTIALS
from kernels.rope import rope_backward, rope_forward, rope_table
from llmc.arguments import parse_arguments
from llmc.attention import attention_input, causal_attention_backward, causal_attention_forward
from llmc.classifier import backward_by_chunks, classifier_forward
from llmc.exchange import embedding_backward, embedding_forward
from llmc.model import Model, dropouts
from llmc.program import run_trainer
from llmc.run import Run
from llmc.tensors import Config, padded
from llmc.update import adamw_update

import numpy as np

# The tensors, each a named view into one buffer of its kind. A tensor whose shape begins with L has one part a layer.
# A third word names an earlier tensor, no longer needed, whose place this one takes; a fourth, what is before it there.
# The tensors inside attention are in llmc/attention.py.

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
    ("ln1_mean",   ("L", "B", "T"), "fp32"),         # in a parallel block of both norms. Means are LayerNorm's alone
    ("ln1_rstd",   ("L", "B", "T"), "fp32"),
    ("atty",       ("L", "B", "T", "C")),            # the heads' outputs, side by side
    ("residual2",  ("L", "B", "T", "C")),            # between attention and MLP: in a sequential block alone,
    ("ln2_mean",   ("L", "B", "T"), "fp32"),         # as what belongs to its norm
    ("ln2_rstd",   ("L", "B", "T"), "fp32"),
    ("fch",        ("L", "B", "T", "4C")),           # before its bias and GELU
    ("residual3",  ("L", "B", "T", "C")),
    ("lnf_mean",   ("B", "T"), "fp32"),
    ("lnf_rstd",   ("B", "T"), "fp32"),
    ("losses",     ("B", "T"), "fp32"),
    # Scratch, the same for every layer. Backward recomputes, transposed, what weight gradients take, and keeps its
    # gradients where the outputs of forward were that nothing needs any more. Logits come after all layers in forward,
    # and are done with before them in backward: their place serves the layers, too.
    ("logits",     ("R", "Vp")),                     # and then their gradient; R = B T, or the rows of a chunk
    ("fch_gelu",   ("B", "T", "4C"), "logits"),      # forward: output of the GELU at hand
    ("fch_gelu_T", ("4C", "B", "T"), "logits"),      # backward: the same, transposed
    ("ln_T",       ("C", "B", "T"), "logits"),       # backward: ln1 or ln2, transposed
    ("atty_T",     ("C", "B", "T"), "logits"),       # backward: atty, transposed
    ("dfch",       ("B", "T", "4C"), "logits", "fch_gelu"), # of the GELU's output, which becomes that of its input
    ("dqkv",       ("B", "T", "3C"), "logits", "fch_gelu"),
    ("proj",       ("B", "T", "C"), "logits", "dfch"), # forward: the attention's projection
    ("dproj",      ("B", "T", "C"), "logits", "dfch"), # backward, with dropout: its gradient, at last that of encoded
    ("fcproj",     ("B", "T", "C"), "logits", "proj"), # forward: the MLP's projection
    ("dfcproj",    ("B", "T", "C"), "logits", "proj"), # backward, with dropout: of fcproj
    ("ln1",        ("B", "T", "C")),                 # forward: output of the norm before the attention, at last of lnf
    ("datty",      ("B", "T", "C"), "ln1"),          # backward: of atty
    ("dln1",       ("B", "T", "C"), "ln1"),          # backward: of ln1, at first of lnf's output
    ("ln2",        ("B", "T", "C")),                 # forward: output of the norm before the MLP
    ("lnf_T",      ("C", "B", "T"), "ln2"),          # backward: output of the last norm, transposed
    ("dln2",       ("B", "T", "C"), "ln2"),          # backward: of ln2; where the norm is tied, of ln1 by both readers
)  # fmt: skip

ACTIVATION_GRADIENTS = (
    ("dresidual",  ("B", "T", "C")),                 # of the residual stream, from the last layer down to the first
    ("weight_T",   ("4C", "C")),                     # the weight at hand, transposed
    ("partials",   ("P", "6C"), "fp32"),             # sums of blocks, before they are added up
)  # fmt: skip


@dataclass(frozen=True)
class PythiaConfig(Config):
    """The sizes of a Pythia, and what else fixes the function that it computes.

    Its file is our own (Config.header): int32[256]: 20230403 (the day of Pythia's paper), version 1, maxT, V, L, NH, C,
    norm (0 layer, 1 rms), tied_norm, parallel, gelu (0 tanh, 1 erf); float64[128]: rotary, theta, eps; then those of
    PARAMETERS that the model has, the vocabulary padded. Rows of q and k are in the order in which RoPE turns channels
    2i and 2i + 1 of a head.
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

    NAME, SCRIPT, MAGIC, PARAMETERS = "Pythia", "train_pythia.py", 20230403, PARAMETERS
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
    FETCH = "make one from Hugging Face's with dev/hf/import_hf.py"
    FIRST_RUN = {
        "cuda": ("pythia-160m", "-b 4 -t 1024"),
        "cpu": ("layers=4,heads=4,channels=128,maxT=64", "-x 2200 -v 550 -s 1100"),
    }
    SMALL = "layers=2,heads=2,channels=128"

    @property
    def absent(self) -> frozenset[str]:
        absent = super().absent
        absent |= {"ln1b", "ln2b", "lnfb", "ln1_mean", "ln2_mean", "lnf_mean"} if self.norm == "rms" else set()
        absent |= {"ln2w", "ln2b"} if self.tied_norm else set()
        return absent | ({"residual2", "ln2_mean", "ln2_rstd"} if self.parallel else set())

    @property
    def rotary_channels(self) -> int:
        return int(self.rotary * self.head_size)

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"P": MOST_PARTIALS}

    def rows(self) -> list[tuple[str, object]]:
        R, HS = self.rotary_channels, self.head_size
        norm = {"layer": "LayerNorm", "rms": "RMSNorm"}[self.norm] + (", one for both" if self.tied_norm else "")
        return [
            *super().rows(),
            ("RoPE", f"{R} channels of {HS}, theta {self.rope_theta:g}"),
            ("attention and MLP", f"{'parallel' if self.parallel else 'sequential'}, {norm}, GELU by {self.gelu}"),
        ]

    def check(self, source: str) -> None:
        super().check(source)
        R, HS = self.rotary_channels, self.head_size
        if self.rotary > 1 or R < 2 or R % 2:
            raise UserError(f"{source}: rotary {self.rotary:g} is {R} of a head's {HS} channels; it must be 2, 4, …")
        if self.tied_norm and not self.parallel:
            raise UserError(f"{source}: tied_norm needs parallel: a sequential block's two norms read different things")


def norms_before(config: PythiaConfig, acts, l: int, *tensors) -> tuple:
    """Mean and rstd of the rows in front of layer l, or behind the last, and of each of `tensors`, parameters or their
    gradients, a list of (weight, shift) of the norms there: two in front of an untied parallel layer, else one."""
    if l == config.num_layers:
        return acts.lnf_mean, acts.lnf_rstd, *([(t.lnfw, t.lnfb)] for t in tensors)
    a, layers, two = acts.layer[l], [t.layer[l] for t in tensors], config.parallel and not config.tied_norm
    return a.ln1_mean, a.ln1_rstd, *([(t.ln1w, t.ln1b), (t.ln2w, t.ln2b)][: 1 + two] for t in layers)


def pythia_forward(model: Model, B: int, T: int, training: bool = False) -> None:
    """Makes the logits of the first B*T of model.inputs (llmc/classifier.py); with dropout when training. The rows of
    each sequence begin at position 0 or, where model.positions is given, there."""
    config, params, acts = model.config, model.params, model.acts(B, T)
    L, NH, C = config.num_layers, config.num_heads, config.channels
    HS, R = config.head_size, config.rotary_channels
    drop, eps, outs = dropouts(model, training), config.norm_eps, (acts.ln1, acts.ln2)

    embedding_forward(model, acts.encoded, params.wte, None, B, T, C, drop.encoded)
    mean, rstd, norms = norms_before(config, acts, 0, params)
    parallel_residual_forward(None, outs, mean, rstd, acts.encoded, norms, eps, B, T, C, branches=[])
    residual = acts.encoded

    for l in range(L):
        p, a, d = params.layer[l], acts.layer[l], drop.layer[l]

        qkv = attention_input(model, l, B, T)
        matmul_forward(qkv, acts.ln1, p.qkvw, p.qkvb, B, T, C, 3 * C)
        rope_forward(qkv, model.constant.rope, B, T, NH, NH, HS, R, model.positions)
        causal_attention_forward(model, l, B, T)
        bias = projection_forward(acts.proj, a.atty, p.attprojw, p.attprojb, B, T, C, C)
        branches = [(acts.proj, bias, d.attproj)]
        if not config.parallel:
            parallel_residual_forward(
                a.residual2, [acts.ln2], a.ln2_mean, a.ln2_rstd, residual, [(p.ln2w, p.ln2b)], eps, B, T, C,
                branches=branches,
            )  # fmt: skip
            residual, branches = a.residual2, []

        matmul_forward(a.fch, acts.ln1 if config.tied_norm else acts.ln2, p.fcw, None, B, T, C, 4 * C)
        gelu_forward(acts.fch_gelu, a.fch, p.fcb, B * T, 4 * C, config.gelu == "erf")
        bias = projection_forward(acts.fcproj, acts.fch_gelu, p.fcprojw, p.fcprojb, B, T, 4 * C, C)
        branches.append((acts.fcproj, bias, d.fcproj))
        mean, rstd, norms = norms_before(config, acts, l + 1, params)
        parallel_residual_forward(a.residual3, outs, mean, rstd, residual, norms, eps, B, T, C, branches=branches)
        residual = a.residual3

    classifier_forward(model, acts.ln1, params.lm_head, B, T)


def pythia_backward(model: Model, B: int, T: int, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what pythia_forward and the loss left behind.

    Without `accumulate` the gradients of the weight matrices are set instead, for the first batch after zero_grad. The
    layers' backward passes follow in the reverse order of forward. A weight's gradient takes the product's input
    transposed: the outputs of norms and GELU are recomputed in that layout, from what went into them.
    """
    config, params, grads, acts, gacts = model.config, model.params, model.grads, model.acts(B, T), model.grads_acts
    L, NH, C, Vp = config.num_layers, config.num_heads, config.channels, padded(config.vocab_size)
    HS, R = config.head_size, config.rotary_channels
    dresidual, dfch, dqkv, datty, dln1, dln2 = gacts.dresidual, acts.dfch, acts.dqkv, acts.datty, acts.dln1, acts.dln2
    weight_T, partials, drop = gacts.weight_T, gacts.partials, dropouts(model, training=True)
    parallel, tied = config.parallel, config.tied_norm
    dproj, dfcproj = (acts.dproj, acts.dfcproj) if model.dropout else (dresidual, dresidual)

    def before(l: int) -> tuple:
        """The residual stream in front of layer l, or behind the last. For each branch that it was the last to take up:
        its gradient, that of its bias, and its dropout."""
        if l == 0:
            return acts.encoded, [(dproj, None, drop.encoded)]
        g, d = grads.layer[l - 1], drop.layer[l - 1]
        branches = [(dproj, g.attprojb, d.attproj), (dfcproj, g.fcprojb, d.fcproj)]
        return acts.layer[l - 1].residual3, branches if parallel else branches[1:]

    residual, branches = before(L)
    mean, rstd, norms, dnorms = norms_before(config, acts, L, params, grads)
    if model.logit_rows:
        backward_by_chunks(model, dln1, grads.lm_head, B, T, accumulate)
    else:
        matmul_backward_inp(dln1, acts.logits, params.lm_head, None, B, T, C, Vp)
        norm_transposed(acts.lnf_T, residual, norms[0], mean, rstd, B, T, C)
        matmul_backward_weight_transposed(grads.lm_head, acts.logits, acts.lnf_T, B, T, C, Vp, accumulate)
    device.fill_zero(dresidual)
    parallel_residual_backward(
        dresidual, dnorms, [dln1], residual, norms, mean, rstd, B, T, C, branches=branches, scratch=partials
    )

    for l in reversed(range(L)):
        p, g, a = params.layer[l], grads.layer[l], acts.layer[l]
        residual, branches = before(l)
        mean, rstd, norms, dnorms = norms_before(config, acts, l, params, grads)

        matmul_backward_inp(dfch, dfcproj, p.fcprojw, weight_T, B, T, 4 * C, C)
        gelu_backward(dfch, g.fcb, acts.fch_gelu_T, partials, a.fch, p.fcb, B * T, 4 * C, config.gelu == "erf")
        matmul_backward_weight_transposed(g.fcprojw, dfcproj, acts.fch_gelu_T, B, T, 4 * C, C, accumulate)
        matmul_backward_inp(dln2, dfch, p.fcw, weight_T, B, T, C, 4 * C)
        before_mlp = (residual, norms[-1], mean, rstd) if parallel else (
            a.residual2, (p.ln2w, p.ln2b), a.ln2_mean, a.ln2_rstd
        )  # fmt: skip
        norm_transposed(acts.ln_T, *before_mlp, B, T, C)
        matmul_backward_weight_transposed(g.fcw, dfch, acts.ln_T, B, T, C, 4 * C, accumulate)
        if not parallel:
            parallel_residual_backward(
                dresidual, [(g.ln2w, g.ln2b)], [dln2], a.residual2, [(p.ln2w, p.ln2b)], a.ln2_mean, a.ln2_rstd, B, T, C,
                branches=[(dproj, g.attprojb, drop.layer[l].attproj)], scratch=partials,
            )  # fmt: skip

        matmul_backward_inp(datty, dproj, p.attprojw, weight_T, B, T, C, C)
        matmul_backward_weight(g.attprojw, dproj, a.atty, acts.atty_T, B, T, C, C, accumulate)
        causal_attention_backward(dqkv, datty, model, l, B, T)
        rope_backward(dqkv, model.constant.rope, B, T, NH, NH, HS, R)
        matmul_backward_bias(g.qkvb, partials, dqkv, B, T, 3 * C)
        matmul_backward_inp(dln2 if tied else dln1, dqkv, p.qkvw, weight_T, B, T, C, 3 * C, accumulate=tied)
        norm_transposed(acts.ln_T, residual, norms[0], mean, rstd, B, T, C)
        matmul_backward_weight_transposed(g.qkvw, dqkv, acts.ln_T, B, T, C, 3 * C, accumulate)
        douts = [dln2] if tied else [dln1, dln2]
        parallel_residual_backward(
            dresidual, dnorms, douts, residual, norms, mean, rstd, B, T, C, branches=branches, scratch=partials
        )

    embedding_backward(model, grads.wte, None, dproj, B, T, C)


class Pythia(Model):
    """Pythia, as llmc/ needs to know it."""

    Config = PythiaConfig
    MATRICES = ("wte", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")
    PRODUCTS = ("lm_head", "qkvw", "attprojw", "fcw", "fcprojw")  # an embedding alone only has rows added to it
    ACTIVATIONS, ACTIVATION_GRADIENTS = ACTIVATIONS, ACTIVATION_GRADIENTS
    forward, backward = pythia_forward, pythia_backward

    @classmethod
    def first_weights(cls, config: PythiaConfig) -> tuple[dict[str, float], dict[str, float]]:
        """As the originals started: normal with deviation sqrt(2 / 5C), the projections back into the residual stream
        with 2 / (L sqrt(C)); the norms' weights 1, biases 0."""
        deviations = dict.fromkeys(cls.MATRICES, sqrt(2 / (5 * config.channels)))
        deviations["attprojw"] = deviations["fcprojw"] = 2 / (config.num_layers * sqrt(config.channels))
        return deviations, dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)

    @classmethod
    def constants(cls, config: PythiaConfig, T: int) -> dict[str, np.ndarray]:
        """rope (T, R/2, 2): the cosine and the sine of each pair's angle at each position."""
        return {"rope": rope_table(T, config.rotary_channels, config.rope_theta)}


def main(flags: Namespace) -> None:
    with Run(Pythia, flags) as run:
        model, batches, s = run.model, run.batches, run.settings

        def forward_backward(first: bool, last: bool) -> None:  # on a batch; recorded once, then replayed
            if first:
                model.zero_grad()
            pythia_forward(model, s.B, s.T, training=True)
            model.loss(s.B, s.T, dloss=1.0 / s.step_tokens)
            pythia_backward(model, s.B, s.T, accumulate=not first)

        forward_backward = run.exchange.record(forward_backward)
        for step in range(s.first_step, s.steps + 1):
            here = run.position()                      # where a run that is resumed goes on
            if s.saves(step):
                run.save(step, here)
            if s.validates(step):
                loss = run.validate(step)
                run.save_best(step, here, loss)        # with --best, where none was lower
            if s.samples(step):
                run.sample(step)
            if step == s.steps:
                break
            for i in range(s.batches):                 # of this rank
                if run.told_to_stop():                 # the same on all ranks
                    break
                batches.send(step, i)
                forward_backward(first=i == 0, last=i + 1 == s.batches)
                batches.fetch_losses(step, i)
            else:
                adamw_update(run.exchange, s.learning_rate(step), s.weight_decay, s.grad_clip, step + 1)
                run.report(step, here)                 # of the step before, while the device works on this one
                continue
            run.stop_before(step, here)                # nothing of this step has reached a parameter
            break


if __name__ == "__main__":
    run_trainer(lambda: main(parse_arguments(PythiaConfig)))
