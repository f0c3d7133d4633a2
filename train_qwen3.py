"""Trains Qwen3, on an NVIDIA GPU or the CPU: Llama 3's block, with heads of a size of their own and an RMSNorm of each
head of queries and keys.

The file reads from top to bottom, in the order of train_gpt2_fp32.py: the tensors, the model's file, forward, backward,
and last the loop over steps. In shapes, B is the batch size, T the sequence length, C the channels, L the layers, NH
the query heads and NKV the heads of keys and values, QK = NH + NKV, HS the size of a head, Q = NH HS, QKV =
(NH + 2 NKV) HS, H the hidden channels, V the vocabulary and Vp the same padded. Query head h attends to key and value
head h // (NH / NKV).
"""

from argparse import Namespace
from dataclasses import dataclass

import device
from device.errors import UserError
from kernels.matmul import (
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_backward_weight_transposed,
    matmul_forward,
)
from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.reduce import MOST_PARTIALS
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward, rmsnorm_transposed
from kernels.rope import rope_table
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.arguments import parse_arguments
from llmc.attention import causal_attention_backward, causal_attention_forward
from llmc.classifier import backward_by_chunks, classifier_forward
from llmc.exchange import embedding_backward, embedding_forward
from llmc.model import Model, dropouts
from llmc.program import run_trainer
from llmc.run import Run
from llmc.tensors import Config, padded
from llmc.update import adamw_update

import numpy as np

# The tensors, each a named view into one buffer of its kind. A tensor whose shape begins with L has one part a layer.
# A third word names an earlier tensor, no longer needed, whose place this one takes.
# The tensors inside attention are in llmc/attention.py.

PARAMETERS = (
    ("wte",         ("Vp", "C")),                    # token embedding, and where `tied` the weight of the classifier
    ("lm_head",     ("Vp", "C")),                    # where not tied: the weight of the classifier
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
    ("encoded",     ("B", "T", "C")),
    ("ln1_rstd",    ("L", "B", "T"), "fp32"),
    ("qkvproj",     ("L", "B", "T", "QKV")),         # queries, keys and values as they are projected
    ("atty",        ("L", "B", "T", "Q")),           # the heads' outputs, side by side
    ("residual2",   ("L", "B", "T", "C")),
    ("ln2_rstd",    ("L", "B", "T"), "fp32"),
    ("fch",         ("L", "B", "T", "2H")),          # up and gate
    ("residual3",   ("L", "B", "T", "C")),
    ("lnf_rstd",    ("B", "T"), "fp32"),
    ("logits",      ("R", "Vp")),                    # and then their gradient; R = B T, or the rows of a chunk
    ("losses",      ("B", "T"), "fp32"),
    # Scratch, the same for every layer. Backward recomputes, transposed, what weight gradients take.
    ("qkv",         ("B", "T", "QKV")),              # qkvproj with q and k normalised and rotated; backward: once more
    ("qk_rstd",     ("B", "T", "QK"), "fp32"),       # of each head of q and k
    ("ln",          ("B", "T", "C")),                # forward: output of the RMSNorm at hand
    ("ln_T",        ("C", "B", "T"), "ln"),          # backward: the same, transposed
    ("atty_T",      ("Q", "B", "T")),                # backward: atty, transposed
    ("fch_swiglu",  ("B", "T", "H")),                # forward: output of the SwiGLU at hand
    ("fch_swiglu_T", ("H", "B", "T"), "fch_swiglu"), # backward: the same, transposed
    ("proj",        ("B", "T", "C")),                # forward: a projection back to C channels
    ("dproj",       ("B", "T", "C"), "proj"),        # backward, with dropout: its gradient
)  # fmt: skip

ACTIVATION_GRADIENTS = (
    ("dresidual",   ("B", "T", "C")),                # of the residual stream, from the last layer down to the first
    ("dln",         ("B", "T", "C")),                # of the output of the RMSNorm at hand
    ("datty",       ("B", "T", "Q")),                # of atty
    ("dfch_swiglu", ("B", "T", "H")),                # of the output of the SwiGLU at hand
    ("dfch",        ("B", "T", "2H")),
    ("dqkv",        ("B", "T", "QKV")),              # of qkv, then of qkvproj
    ("weight_T",    ("W", "C")),                     # the weight at hand, transposed
    ("partials",    ("P", "S"), "fp32"),             # sums of blocks, before they are added up
)  # fmt: skip


@dataclass(frozen=True)
class Qwen3Config(Config):
    """The sizes of a Qwen3, and what else fixes the function that it computes.

    Its file is our own (Config.header): int32[256]: 20250505 (the day of Qwen3's report), version 1, maxT, V, L, NH,
    NKV, C, H, HS, tied; float64[128]: theta, eps; then those of PARAMETERS that the model has, the vocabulary padded.
    Rows of q and k, and the weights of their norms, are in the order in which RoPE turns channels 2i and 2i + 1 of a
    head.
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

    NAME, SCRIPT, MAGIC, PARAMETERS = "Qwen3", "train_qwen3.py", 20250505, PARAMETERS
    DESCRIPTION = {
        "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads", "channels": "channels",
        "hidden": "hidden", "head_size": "head_size", "maxT": "max_seq_len", "theta": "rope_theta", "eps": "norm_eps",
        "tied": "tied", "vocab": "vocab_size",
    }  # fmt: skip
    PRESETS = {
        "qwen3-0.6b": "layers=28,heads=16,kv_heads=8,channels=1024,hidden=3072,maxT=40960",
        "qwen3-1.7b": "layers=28,heads=16,kv_heads=8,channels=2048,hidden=6144,maxT=40960",
        "qwen3-4b": "layers=36,heads=32,kv_heads=8,channels=2560,hidden=9728,maxT=40960",
    }
    DEFAULTS = {"max_seq_len": 1024, "vocab_size": 151936}
    DEFAULT_MODEL = "qwen3_0.6B.bin"
    FETCH = "make one from Hugging Face's with dev/hf/import_hf.py"
    FIRST_RUN = {
        "cuda": ("qwen3-0.6b", "-b 2 -t 1024"),
        "cpu": ("layers=4,heads=4,kv_heads=2,channels=128,hidden=352,head_size=32,maxT=64", "-x 2200 -v 550 -s 1100"),
    }
    SMALL = "layers=2,heads=2,kv_heads=1,channels=128,hidden=176,head_size=64"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads

    @property
    def absent(self) -> frozenset[str]:
        return super().absent | ({"lm_head"} if self.tied else set())

    def sizes(self) -> dict[str, int]:
        sizes, H, HS = super().sizes(), self.hidden, self.head_size
        return sizes | {
            "H": H, "QK": self.num_heads + self.num_kv_heads, "W": max(sizes["QKV"], 2 * H), "P": MOST_PARTIALS,
            "S": max(self.channels, 2 * HS),
        }  # fmt: skip

    def rows(self) -> list[tuple[str, object]]:
        return [
            *super().rows(),
            ("key/value heads", self.num_kv_heads),
            ("head size", self.head_size),
            ("hidden channels", self.hidden),
            ("RoPE", f"theta {self.rope_theta:g}"),
            ("classifier", "tied to the embedding" if self.tied else "its own weight"),
        ]

    def check(self, source: str) -> None:
        super().check(source)
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{source}: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly: "
                "kv_heads must divide heads"
            )
        if self.head_size % 2:
            raise UserError(f"{source}: heads of {self.head_size} channels are odd, and RoPE turns pairs")


def qwen3_forward(model: Model, B: int, T: int, training: bool = False) -> None:
    """Makes the logits of the first B*T of model.inputs (llmc/classifier.py); with dropout when training. The rows of
    each sequence begin at position 0 or, where model.positions is given, there."""
    config, params, acts, rope = model.config, model.params, model.acts(B, T), model.constant.rope
    L, NH, NKV, C, H = config.num_layers, config.num_heads, config.num_kv_heads, config.channels, config.hidden
    HS, eps = config.head_size, config.norm_eps
    Q, QKV = NH * HS, (NH + 2 * NKV) * HS
    drop = dropouts(model, training)

    embedding_forward(model, acts.encoded, params.wte, None, B, T, C)
    rmsnorm_forward(acts.ln, acts.layer[0].ln1_rstd, acts.encoded, params.layer[0].ln1w, eps, B, T, C)
    residual = acts.encoded

    for l in range(L):
        p, a, d = params.layer[l], acts.layer[l], drop.layer[l]

        matmul_forward(a.qkvproj, acts.ln, p.qkvw, None, B, T, C, QKV)
        qk_norm_forward(
            acts.qkv, acts.qk_rstd, a.qkvproj, p.qnormw, p.knormw, rope, eps, B, T, NH, NKV, HS, model.positions
        )
        causal_attention_forward(model, l, B, T)
        matmul_forward(acts.proj, a.atty, p.attprojw, None, B, T, Q, C)
        fused_residual_rmsnorm_forward(
            a.residual2, acts.ln, a.ln2_rstd, residual, acts.proj, p.ln2w, eps, B, T, C, dropout=d.attproj
        )

        matmul_forward(a.fch, acts.ln, p.fcw, None, B, T, C, 2 * H)
        swiglu_forward(acts.fch_swiglu, a.fch, B * T, H)
        matmul_forward(acts.proj, acts.fch_swiglu, p.fcprojw, None, B, T, H, C)
        if l + 1 < L:
            rstd, weight = acts.layer[l + 1].ln1_rstd, params.layer[l + 1].ln1w
        else:
            rstd, weight = acts.lnf_rstd, params.lnfw
        fused_residual_rmsnorm_forward(
            a.residual3, acts.ln, rstd, a.residual2, acts.proj, weight, eps, B, T, C, dropout=d.fcproj
        )
        residual = a.residual3

    classifier_forward(model, acts.ln, params.wte if config.tied else params.lm_head, B, T)


def qwen3_backward(model: Model, B: int, T: int, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what qwen3_forward and the loss left behind.

    Without `accumulate` the gradients of the weight matrices are set instead, for the first batch after zero_grad. The
    layers' backward passes follow in the reverse order of forward. A weight's gradient takes the product's input
    transposed: the outputs of RMSNorm and SwiGLU are recomputed in that layout, from what went into them. qkv is
    recomputed too, from qkvproj: to keep both would take Qwen3-0.6B 0.9 GB more at B 2, T 1024.

    dproj is the gradient of what a branch adds to the residual stream: dresidual through its dropout.
    """
    config, params, grads, acts, gacts = model.config, model.params, model.grads, model.acts(B, T), model.grads_acts
    L, NH, NKV, C, H = config.num_layers, config.num_heads, config.num_kv_heads, config.channels, config.hidden
    HS, eps, Vp, rope = config.head_size, config.norm_eps, padded(config.vocab_size), model.constant.rope
    Q, QKV = NH * HS, (NH + 2 * NKV) * HS
    dresidual, dln, datty, dqkv = gacts.dresidual, gacts.dln, gacts.datty, gacts.dqkv
    dfch, dfch_swiglu, weight_T, partials = gacts.dfch, gacts.dfch_swiglu, gacts.weight_T, gacts.partials
    drop = dropouts(model, training=True)
    dproj = acts.dproj if model.dropout else dresidual
    head, dhead = (params.wte, grads.wte) if config.tied else (params.lm_head, grads.lm_head)

    residual = acts.layer[L - 1].residual3
    if model.logit_rows:
        backward_by_chunks(model, dln, dhead, B, T, accumulate)
    else:
        matmul_backward_inp(dln, acts.logits, head, None, B, T, C, Vp)
        rmsnorm_transposed(acts.ln_T, residual, params.lnfw, acts.lnf_rstd, B, T, C)
        matmul_backward_weight_transposed(dhead, acts.logits, acts.ln_T, B, T, C, Vp, accumulate)
    device.fill_zero(dresidual)
    rmsnorm_backward(
        dresidual, grads.lnfw, dln, residual, params.lnfw, acts.lnf_rstd, B, T, C,
        scratch=partials, dinp2=dproj, dropout=drop.layer[L - 1].fcproj,
    )  # fmt: skip

    for l in reversed(range(L)):
        p, g, a = params.layer[l], grads.layer[l], acts.layer[l]

        matmul_backward_inp(dfch_swiglu, dproj, p.fcprojw, weight_T, B, T, H, C)
        swiglu_backward(dfch, acts.fch_swiglu_T, dfch_swiglu, a.fch, B * T, H)
        matmul_backward_weight_transposed(g.fcprojw, dproj, acts.fch_swiglu_T, B, T, H, C, accumulate)
        matmul_backward_inp(dln, dfch, p.fcw, weight_T, B, T, C, 2 * H)
        rmsnorm_transposed(acts.ln_T, a.residual2, p.ln2w, a.ln2_rstd, B, T, C)
        matmul_backward_weight_transposed(g.fcw, dfch, acts.ln_T, B, T, C, 2 * H, accumulate)
        rmsnorm_backward(
            dresidual, g.ln2w, dln, a.residual2, p.ln2w, a.ln2_rstd, B, T, C,
            scratch=partials, dinp2=dproj, dropout=drop.layer[l].attproj,
        )  # fmt: skip

        matmul_backward_inp(datty, dproj, p.attprojw, weight_T, B, T, Q, C)
        matmul_backward_weight(g.attprojw, dproj, a.atty, acts.atty_T, B, T, Q, C, accumulate)
        qk_norm_forward(acts.qkv, acts.qk_rstd, a.qkvproj, p.qnormw, p.knormw, rope, eps, B, T, NH, NKV, HS)
        causal_attention_backward(dqkv, datty, model, l, B, T)
        qk_norm_backward(
            dqkv, g.qnormw, g.knormw, a.qkvproj, p.qnormw, p.knormw, acts.qk_rstd, rope, B, T, NH, NKV, HS,
            scratch=partials,
        )  # fmt: skip
        matmul_backward_inp(dln, dqkv, p.qkvw, weight_T, B, T, C, QKV)
        residual, dropped = (acts.layer[l - 1].residual3, drop.layer[l - 1].fcproj) if l > 0 else (acts.encoded, None)
        rmsnorm_transposed(acts.ln_T, residual, p.ln1w, a.ln1_rstd, B, T, C)
        matmul_backward_weight_transposed(g.qkvw, dqkv, acts.ln_T, B, T, C, QKV, accumulate)
        rmsnorm_backward(
            dresidual, g.ln1w, dln, residual, p.ln1w, a.ln1_rstd, B, T, C,
            scratch=partials, dinp2=dproj, dropout=dropped,
        )  # fmt: skip

    embedding_backward(model, grads.wte, None, dresidual, B, T, C)


class Qwen3(Model):
    """Qwen3, as llmc/ needs to know it."""

    Config = Qwen3Config
    MATRICES = ("wte", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")
    ACTIVATIONS, ACTIVATION_GRADIENTS = ACTIVATIONS, ACTIVATION_GRADIENTS
    forward, backward = qwen3_forward, qwen3_backward

    @property
    def PRODUCTS(self) -> tuple[str, ...]:
        """An embedding that is no classifier's weight only has rows added to it."""
        return ("wte" if self.config.tied else "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")

    @classmethod
    def first_weights(cls, config: Qwen3Config) -> tuple[dict[str, float], dict[str, float]]:
        """As transformers starts a Qwen3: normal with deviation 0.02; the RMSNorms' weights 1."""
        norms = "ln1w", "qnormw", "knormw", "ln2w", "lnfw"
        return dict.fromkeys(cls.MATRICES, 0.02), dict.fromkeys(norms, 1.0)

    @classmethod
    def constants(cls, config: Qwen3Config, T: int) -> dict[str, np.ndarray]:
        """rope (T, HS/2, 2): the cosine and the sine of each pair's angle at each position."""
        return {"rope": rope_table(T, config.head_size, config.rope_theta)}


def main(flags: Namespace) -> None:
    with Run(Qwen3, flags) as run:
        model, batches, s = run.model, run.batches, run.settings

        def forward_backward(first: bool, last: bool) -> None:  # on a batch; recorded once, then replayed
            if first:
                model.zero_grad()
            qwen3_forward(model, s.B, s.T, training=True)
            model.loss(s.B, s.T, dloss=1.0 / s.step_tokens)
            qwen3_backward(model, s.B, s.T, accumulate=not first)

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
    run_trainer(lambda: main(parse_arguments(Qwen3Config)))
