"""Trains GPT-2 in fp32: llm.c's train_gpt2_fp32.cu in Python, on an NVIDIA GPU or on the CPU.

The file reads from top to bottom: the tensors, the first weights, forward, backward, and last the loop over steps. The
layers are in kernels/, each a .cu file with its launchers beside it; what is the same for every model is in llmc/. In
shapes, B is the batch size, T the sequence length, C the channels, L the layers, NH the heads, HS = C / NH, V the
vocabulary and Vp the same padded, and maxT the longest sequence the model takes.
"""

from argparse import Namespace
from dataclasses import astuple, dataclass
from math import sqrt

import device
from device.errors import UserError
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_forward, layernorm_transposed
from kernels.matmul import (
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_backward_weight_transposed,
    matmul_forward,
    projection_forward,
)
from kernels.reduce import MOST_PARTIALS
from llmc.arguments import parse_arguments
from llmc.attention import attention_input, causal_attention_backward, causal_attention_forward
from llmc.classifier import backward_by_chunks, classifier_forward
from llmc.exchange import embedding_backward, embedding_forward
from llmc.files import make_header
from llmc.model import Model, dropouts
from llmc.program import run_trainer
from llmc.run import Run
from llmc.tensors import Config, padded
from llmc.update import adamw_update

import numpy as np

# The tensors, each a named view into one buffer of its kind. A tensor whose shape begins with L has one part a layer.
# A third word names an earlier tensor, no longer needed, whose place this one takes.
# The tensors inside attention are in llmc/attention.py.

PARAMETERS = (                                       # in the order of the model file
    ("wte",        ("Vp", "C")),                     # token embedding, and the weight of the classifier
    ("wpe",        ("maxT", "C")),                   # position embedding
    ("ln1w",       ("L", "C")),
    ("ln1b",       ("L", "C")),
    ("qkvw",       ("L", "3C", "C")),
    ("qkvb",       ("L", "3C")),
    ("attprojw",   ("L", "C", "C")),
    ("attprojb",   ("L", "C")),
    ("ln2w",       ("L", "C")),
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
    ("ln1_mean",   ("L", "B", "T"), "fp32"),
    ("ln1_rstd",   ("L", "B", "T"), "fp32"),
    ("atty",       ("L", "B", "T", "C")),            # the heads' outputs, side by side
    ("residual2",  ("L", "B", "T", "C")),
    ("ln2_mean",   ("L", "B", "T"), "fp32"),
    ("ln2_rstd",   ("L", "B", "T"), "fp32"),
    ("fch",        ("L", "B", "T", "4C")),           # before its bias and GELU
    ("residual3",  ("L", "B", "T", "C")),
    ("lnf_mean",   ("B", "T"), "fp32"),
    ("lnf_rstd",   ("B", "T"), "fp32"),
    ("logits",     ("R", "Vp")),                     # and then their gradient; R = B T, or the rows of a chunk
    ("losses",     ("B", "T"), "fp32"),
    # Scratch, the same for every layer. Backward recomputes, transposed, what weight gradients take.
    ("ln",         ("B", "T", "C")),                 # forward: output of the layernorm at hand
    ("ln_T",       ("C", "B", "T"), "ln"),           # backward: the same, transposed
    ("atty_T",     ("C", "B", "T"), "ln"),           # backward: atty, transposed
    ("fch_gelu",   ("B", "T", "4C")),                # forward: output of the GELU at hand
    ("fch_gelu_T", ("4C", "B", "T"), "fch_gelu"),    # backward: the same, transposed
    ("proj",       ("B", "T", "C")),                 # forward: a projection back to C channels
    ("dproj",      ("B", "T", "C"), "proj"),         # backward, with dropout: its gradient
)  # fmt: skip

ACTIVATION_GRADIENTS = (
    ("dresidual",  ("B", "T", "C")),                 # of the residual stream, from the last layer down to the first
    ("dln",        ("B", "T", "C")),                 # of the output of the layernorm at hand
    ("datty",      ("B", "T", "C"), "dln"),          # of atty
    ("dfch",       ("B", "T", "4C")),                # of the GELU's output, which becomes that of its input
    ("dqkv",       ("B", "T", "3C"), "dfch"),
    ("weight_T",   ("4C", "C")),                     # the weight at hand, transposed
    ("partials",   ("P", "4C"), "fp32"),             # sums of blocks, before they are added up
)  # fmt: skip


@dataclass(frozen=True)
class GPT2Config(Config):
    """The sizes of a GPT-2, in the order of llm.c's header. The names in brackets are the ones used for shapes."""

    max_seq_len: int  # (maxT) longest sequence: rows of wpe
    vocab_size: int   # (V) tokens that the tokenizer knows; (Vp) is that rounded up to a multiple of 128
    num_layers: int   # (L)
    num_heads: int    # (NH)
    channels: int     # (C)

    NAME, SCRIPT, PARAMETERS = "GPT-2", "train_gpt2_fp32.py", PARAMETERS
    MAGIC, HEADER_BYTES, BF16_VERSION = 20240326, 1024, 5
    DESCRIPTION = {
        "layers": "num_layers", "heads": "num_heads", "channels": "channels", "maxT": "max_seq_len"
    }  # fmt: skip
    PRESETS = {
        "d12": "layers=12,heads=12,channels=768",
        "d6": "layers=6,heads=6,channels=384",
        "d24": "layers=24,heads=16,channels=1024",
        "d36": "layers=36,heads=20,channels=1280",
        "d48": "layers=48,heads=25,channels=1600",
    }
    DEFAULTS = {"max_seq_len": 1024, "vocab_size": 50257}
    DEFAULT_MODEL = "gpt2_124M.bin"
    FETCH = "fetch it with dev/download_starter_pack.sh"
    FIRST_RUN = {
        "cuda": ("d12", "-b 4 -t 1024"),
        "cpu": ("layers=4,heads=4,channels=128", "-x 3000 -v 500 -s 1000"),
    }
    SMALL = "layers=2,heads=2,channels=128"
    STARTER_PACK = {"cuda": "-b 4 -t 1024", "cpu": "-b 4 -t 64 -n 100 -nk 1"}

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"P": MOST_PARTIALS}

    def header(self) -> np.ndarray:
        return make_header(self.MAGIC, 3, *astuple(self), padded(self.vocab_size))

    @classmethod
    def from_header(cls, header: np.ndarray, source: str) -> "GPT2Config":
        version, *sizes, padded_vocab_size = (int(n) for n in header[1:8])
        if version != 3:
            kind = {1: "fp32 without padding", 2: "bf16 without padding"}.get(version, "unknown")
            needed = "version 3 (fp32) or 5 (bf16) is needed"
            raise UserError(f"{source}: model version {version} ({kind}); {needed}: {cls.FETCH}")
        config = cls(*sizes)
        config.check(source)
        if padded_vocab_size != padded(config.vocab_size):
            raise UserError(
                f"{source}: padded_vocab_size is {padded_vocab_size}; it must be {config.vocab_size} (vocab_size) "
                f"rounded up to a multiple of 128: {padded(config.vocab_size)}"
            )
        return config


def gpt2_forward(model: Model, B: int, T: int, training: bool = False) -> None:
    """Makes the logits of the first B*T of model.inputs (llmc/classifier.py); with dropout when training. The rows of
    each sequence begin at position 0 or, where model.positions is given, there."""
    config, params, acts = model.config, model.params, model.acts(B, T)
    L, C = config.num_layers, config.channels
    drop = dropouts(model, training)

    embedding_forward(model, acts.encoded, params.wte, params.wpe, B, T, C, drop.encoded)
    p, a = params.layer[0], acts.layer[0]
    layernorm_forward(acts.ln, a.ln1_mean, a.ln1_rstd, acts.encoded, p.ln1w, p.ln1b, B, T, C)
    residual = acts.encoded

    for l in range(L):
        p, a, d = params.layer[l], acts.layer[l], drop.layer[l]

        qkv = attention_input(model, l, B, T)
        matmul_forward(qkv, acts.ln, p.qkvw, p.qkvb, B, T, C, 3 * C)
        causal_attention_forward(model, l, B, T)
        bias = projection_forward(acts.proj, a.atty, p.attprojw, p.attprojb, B, T, C, C)
        fused_residual_forward(
            a.residual2, acts.ln, a.ln2_mean, a.ln2_rstd, residual, acts.proj, p.ln2w, p.ln2b, B, T, C,
            bias2=bias, dropout=d.attproj,
        )  # fmt: skip

        matmul_forward(a.fch, acts.ln, p.fcw, None, B, T, C, 4 * C)
        gelu_forward(acts.fch_gelu, a.fch, p.fcb, B * T, 4 * C)
        bias = projection_forward(acts.proj, acts.fch_gelu, p.fcprojw, p.fcprojb, B, T, 4 * C, C)
        if l + 1 < L:
            mean, rstd = acts.layer[l + 1].ln1_mean, acts.layer[l + 1].ln1_rstd
            weight, shift = params.layer[l + 1].ln1w, params.layer[l + 1].ln1b
        else:
            mean, rstd, weight, shift = acts.lnf_mean, acts.lnf_rstd, params.lnfw, params.lnfb
        fused_residual_forward(
            a.residual3, acts.ln, mean, rstd, a.residual2, acts.proj, weight, shift, B, T, C,
            bias2=bias, dropout=d.fcproj,
        )  # fmt: skip
        residual = a.residual3

    classifier_forward(model, acts.ln, params.wte, B, T)


def gpt2_backward(model: Model, B: int, T: int, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what gpt2_forward and the loss left behind.

    Without `accumulate` the gradients of the weight matrices are set instead, for the first batch after zero_grad. The
    layers' backward passes follow in the reverse order of forward. A weight's gradient takes the product's input
    transposed: the outputs of layernorm and GELU are recomputed in that layout, from what went into them.

    dproj is the gradient of what a branch, or the encoder, adds to the residual stream: dresidual through its dropout.
    """
    config, params, grads, acts, gacts = model.config, model.params, model.grads, model.acts(B, T), model.grads_acts
    L, C, Vp = config.num_layers, config.channels, padded(config.vocab_size)
    dresidual, dln, datty, dfch, dqkv = gacts.dresidual, gacts.dln, gacts.datty, gacts.dfch, gacts.dqkv
    weight_T, partials = gacts.weight_T, gacts.partials
    drop = dropouts(model, training=True)
    dproj = acts.dproj if model.dropout else dresidual

    residual = acts.layer[L - 1].residual3
    if model.logit_rows:
        backward_by_chunks(model, dln, grads.wte, B, T, accumulate)
    else:
        matmul_backward_inp(dln, acts.logits, params.wte, None, B, T, C, Vp)
        layernorm_transposed(acts.ln_T, residual, params.lnfw, params.lnfb, acts.lnf_mean, acts.lnf_rstd, B, T, C)
        matmul_backward_weight_transposed(grads.wte, acts.logits, acts.ln_T, B, T, C, Vp, accumulate)
    device.fill_zero(dresidual)
    layernorm_backward(
        dresidual, grads.lnfw, grads.lnfb, dln, residual, params.lnfw, acts.lnf_mean, acts.lnf_rstd, B, T, C,
        scratch=partials, dbias2=grads.layer[L - 1].fcprojb, dinp2=dproj, dropout=drop.layer[L - 1].fcproj,
    )  # fmt: skip

    for l in reversed(range(L)):
        p, g, a = params.layer[l], grads.layer[l], acts.layer[l]

        matmul_backward_inp(dfch, dproj, p.fcprojw, weight_T, B, T, 4 * C, C)
        gelu_backward(dfch, g.fcb, acts.fch_gelu_T, partials, a.fch, p.fcb, B * T, 4 * C)
        matmul_backward_weight_transposed(g.fcprojw, dproj, acts.fch_gelu_T, B, T, 4 * C, C, accumulate)
        matmul_backward_inp(dln, dfch, p.fcw, weight_T, B, T, C, 4 * C)
        layernorm_transposed(acts.ln_T, a.residual2, p.ln2w, p.ln2b, a.ln2_mean, a.ln2_rstd, B, T, C)
        matmul_backward_weight_transposed(g.fcw, dfch, acts.ln_T, B, T, C, 4 * C, accumulate)
        layernorm_backward(
            dresidual, g.ln2w, g.ln2b, dln, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, B, T, C,
            scratch=partials, dbias2=g.attprojb, dinp2=dproj, dropout=drop.layer[l].attproj,
        )  # fmt: skip

        matmul_backward_inp(datty, dproj, p.attprojw, weight_T, B, T, C, C)
        matmul_backward_weight(g.attprojw, dproj, a.atty, acts.atty_T, B, T, C, C, accumulate)
        causal_attention_backward(dqkv, datty, model, l, B, T)
        matmul_backward_bias(g.qkvb, partials, dqkv, B, T, 3 * C)
        matmul_backward_inp(dln, dqkv, p.qkvw, weight_T, B, T, C, 3 * C)
        residual, dbias_before, dropped = (
            (acts.layer[l - 1].residual3, grads.layer[l - 1].fcprojb, drop.layer[l - 1].fcproj)
            if l > 0 else (acts.encoded, None, drop.encoded)
        )  # fmt: skip
        layernorm_transposed(acts.ln_T, residual, p.ln1w, p.ln1b, a.ln1_mean, a.ln1_rstd, B, T, C)
        matmul_backward_weight_transposed(g.qkvw, dqkv, acts.ln_T, B, T, C, 3 * C, accumulate)
        layernorm_backward(
            dresidual, g.ln1w, g.ln1b, dln, residual, p.ln1w, a.ln1_mean, a.ln1_rstd, B, T, C,
            scratch=partials, dbias2=dbias_before, dinp2=dproj, dropout=dropped,
        )  # fmt: skip

    embedding_backward(model, grads.wte, grads.wpe, dproj, B, T, C)


class GPT2(Model):
    """GPT-2, as llmc/ needs to know it."""

    Config = GPT2Config
    MATRICES = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")
    PRODUCTS = ("wte", "qkvw", "attprojw", "fcw", "fcprojw")
    ACTIVATIONS, ACTIVATION_GRADIENTS = ACTIVATIONS, ACTIVATION_GRADIENTS
    forward, backward = gpt2_forward, gpt2_backward

    @classmethod
    def first_weights(cls, config: GPT2Config) -> tuple[dict[str, float], dict[str, float]]:
        """Normal with deviation 0.02, the projections back into the residual stream smaller by sqrt(2L); layernorm
        weights 1, biases 0."""
        deviations = dict.fromkeys(cls.MATRICES, 0.02)
        deviations["attprojw"] = deviations["fcprojw"] = 0.02 / sqrt(2 * config.num_layers)
        return deviations, dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)


def main(flags: Namespace) -> None:
    with Run(GPT2, flags) as run:
        model, batches, s = run.model, run.batches, run.settings

        def forward_backward(first: bool, last: bool) -> None:  # on a batch; recorded once, then replayed
            if first:
                model.zero_grad()
            gpt2_forward(model, s.B, s.T, training=True)
            model.loss(s.B, s.T, dloss=1.0 / s.step_tokens)
            gpt2_backward(model, s.B, s.T, accumulate=not first)

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
    run_trainer(lambda: main(parse_arguments(GPT2Config)))
