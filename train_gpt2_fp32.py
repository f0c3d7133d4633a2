"""Trains GPT-2 in fp32: llm.c's train_gpt2_fp32.cu in Python, on an NVIDIA GPU or on the CPU.

The file reads from top to bottom: the tensors, the sizes, forward, backward, the first weights, and last the loop over
steps. The layers are in kernels/, each a .cu file with its launchers beside it; what is the same for every model, such
as the loss, is in llmc/. In shapes, B is the batch size, T the sequence length, C the channels, L the layers, NH the
heads, HS = C / NH, V the vocabulary and Vp the same padded, and maxT the longest sequence the model takes.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import astuple, dataclass
from math import sqrt

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P leaves it out
import device
from device.errors import UserError
from kernels.attention import attention_backward, attention_forward
from kernels.gelu import matmul_gelu_backward, matmul_gelu_forward
from kernels.layernorm import layernorm_backward, layernorm_forward, layernorm_recompute
from kernels.matmul import matmul_backward_bias, matmul_backward_inp, matmul_backward_weight, matmul_forward
from llmc.data.batches import Batches
from llmc.files.files import make_header
from llmc.model.batch import embedding_backward, embedding_forward
from llmc.model.loss import cross_entropy_loss
from llmc.model.model import Model
from llmc.model.tensors import Config, padded
from llmc.run.run import Report, Run
from llmc.run.trainer import run_trainer
from llmc.step.training import Training
from llmc.step.update import adamw_update

import numpy as np

# The tensors: name, shape, options. A shape that begins with L has a part for each layer, or with --recompute one that
# all layers share; with L+1, one more, for the last norm. Any other tensor exists once. Options: "fp32": fp32 in every
# precision; "head": the classifier's weight; an earlier tensor's name: this one takes its memory when that tensor is no
# longer needed; "recomputed": backward computes it again, into the same memory, as NAME_recomputed, in the layout that
# a weight's gradient wants. llmc/model/activations.py adds attention's: qkv, and a.attention, what backward needs.

PARAMETERS = (                                       # in the order of the model file; their gradients likewise
    ("wte",        ("Vp", "C"), "head"),             # token embedding, and the weight of the classifier
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
    ("residual",   ("L+1", "B", "T", "C")),          # the residual stream before each layer, and after the last
    ("stats",      ("L+1", "2", "B", "T"), "fp32"),  # mean and rstd of the norm of each residual
    ("atty",       ("L", "B", "T", "C")),            # the heads' outputs, side by side
    ("residual2",  ("L", "B", "T", "C")),            # between attention and MLP
    ("stats2",     ("L", "2", "B", "T"), "fp32"),    # mean and rstd of its norm
    ("fch",        ("L", "B", "T", "4C")),           # before its bias and GELU
    ("logits",     ("chunk", "Vp")),                 # and then their gradient; chunk: B T rows, or --logit-rows
    ("losses",     ("B", "T"), "fp32"),
    ("ln",         ("B", "T", "C"), "recomputed"),   # output of the norm before attention, and of the last norm
    ("ln2",        ("B", "T", "C"), "ln", "recomputed"),  # output of the norm before the MLP
    ("gelu",       ("B", "T", "4C"), "recomputed"),  # output of GELU
)  # fmt: skip

GRADIENTS = (                                        # of activations; acts has them, too
    ("dresidual",  ("B", "T", "C")),                 # of the residual stream, from the last layer down to the first
    ("dln",        ("B", "T", "C")),                 # of ln, or of ln2
    ("datty",      ("B", "T", "C"), "dln"),          # of atty
    ("dgelu",      ("B", "T", "4C")),                # of gelu
    ("dfch",       ("B", "T", "4C"), "dgelu"),       # of fch
    ("dqkv",       ("B", "T", "3C"), "dgelu"),       # of qkv
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
    DESCRIPTION = {"layers": "num_layers", "heads": "num_heads", "channels": "channels", "maxT": "max_seq_len"}
    PRESETS = {
        "d12": "layers=12,heads=12,channels=768",
        "d6": "layers=6,heads=6,channels=384",
        "d24": "layers=24,heads=16,channels=1024",
        "d36": "layers=36,heads=20,channels=1280",
        "d48": "layers=48,heads=25,channels=1600",
        "tiny": "layers=4,heads=4,channels=128",
    }
    DEFAULTS = {"max_seq_len": 1024, "vocab_size": 50257}
    DEFAULT_MODEL, DEFAULT_TOKENIZER = "gpt2_124M.bin", "gpt2_tokenizer.bin"
    FETCH = "fetch it with dev/download_starter_pack.sh"

    def header(self) -> np.ndarray:
        return make_header(self.MAGIC, 3, *astuple(self), padded(self.vocab_size))

    @classmethod
    def from_header(cls, header: np.ndarray, source: str) -> "GPT2Config":
        version, maxT, V, L, NH, C, Vp = map(int, header[1:8])
        if version != 3:  # the caller has turned 5 into 3
            raise UserError(f"{source}: model version {version}; 3 (fp32) or 5 (bf16) is needed: {cls.FETCH}")
        if Vp != padded(V):
            raise UserError(f"{source}: padded_vocab_size is {Vp}; for vocab_size {V} it must be {padded(V)}")
        return cls(maxT, V, L, NH, C)


# The passes. p, g and a have a layer's parameters, their gradients, and its activations. Its norm before attention has
# p.norm (weight, bias), a.stats (mean, rstd) and a.ln, the output; its norm before the MLP p.norm2, a.stats2 and a.ln2.
# In params.norm, acts.stats and acts.ln, number l is layer l's first norm, number L the last norm. acts.ln[0] to
# acts.ln[L] are the same memory. A launcher's outputs come first. Attention gets NH twice: it is GQA's NKV, too.


def gpt2_forward(model: Model, acts, batch) -> None:
    """From the tokens to the last norm's output, acts.ln[L]. Where the tensors in acts lie decides what is kept."""
    params, residual, B, T, (L, C, _, _) = model.params, acts.residual, batch.B, batch.T, model.sizes

    embedding_forward(residual[0], batch, params.wte, params.wpe, B, T, C)
    layernorm_forward(acts.ln[0], acts.stats[0], residual[0], params.norm[0], B, T, C)
    for l in range(L):
        gpt2_layer_forward(model, acts, batch, l)
        p, a, n = params.layer[l], acts.layer[l], l + 1
        matmul_forward(residual[n], a.gelu, p.fcprojw, p.fcprojb, B, T, 4 * C, C, a.residual2)
        layernorm_forward(acts.ln[n], acts.stats[n], residual[n], params.norm[n], B, T, C)


def gpt2_layer_forward(model: Model, acts, batch, l: int) -> None:
    """Runs layer l from a.residual and a.ln up to a.gelu. This leaves in `a` all that its backward pass reads."""
    p, a, B, T, (_, C, NH, HS) = model.params.layer[l], acts.layer[l], batch.B, batch.T, model.sizes

    matmul_forward(a.qkv, a.ln, p.qkvw, p.qkvb, B, T, C, 3 * C)
    attention_forward(a.atty, a.attention, a.qkv, B, T, NH, NH, HS)
    matmul_forward(a.residual2, a.atty, p.attprojw, p.attprojb, B, T, C, C, a.residual)
    layernorm_forward(a.ln2, a.stats2, a.residual2, p.norm2, B, T, C)
    matmul_gelu_forward(a.gelu, a.fch, a.ln2, p.fcw, p.fcb, B, T, C, 4 * C)


def gpt2_layer_recompute(model: Model, acts, batch, l: int) -> None:
    """With --recompute: runs layer l again, from a.residual, because other layers have overwritten its activations."""
    p, a, B, T, C = model.params.layer[l], acts.layer[l], batch.B, batch.T, model.config.channels
    layernorm_forward(a.ln, a.stats, a.residual, p.norm, B, T, C)
    gpt2_layer_forward(model, acts, batch, l)


def gpt2_backward(model: Model, acts, batch, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what forward and loss have left in acts. The loss has
    set acts.dln, the gradient of acts.ln[L], and added its part of wte's. Without accumulate, in a step's first batch,
    this sets the gradients of the layers' matrices. It recomputes the outputs of layernorm and GELU for these."""
    params, grads, B, T, (L, C, NH, HS) = model.params, model.grads, batch.B, batch.T, model.sizes
    dresidual, dln = acts.dresidual, acts.dln

    device.fill_zero(dresidual)  # layernorm_backward adds to it
    for l in reversed(range(L)):
        p, g, a, n = params.layer[l], grads.layer[l], acts.layer[l], l + 1
        layernorm_backward(  # the column sums of dresidual are also the gradient of the projection's bias, dbias2
            dresidual, grads.norm[n], dln, acts.residual[n], params.norm[n], acts.stats[n], B, T, C, dbias2=g.fcprojb
        )
        acts.recompute_layer(model, acts, batch, l)  # does nothing if each layer keeps its own activations

        matmul_gelu_backward(  # dfch in place of dgelu
            a.dfch, g.fcb, a.gelu_recomputed, a.dgelu, dresidual, p.fcprojw, a.fch, p.fcb, B, T, 4 * C, C
        )
        matmul_backward_weight(g.fcprojw, dresidual, a.gelu_recomputed, B, T, 4 * C, C, accumulate)
        matmul_backward_inp(dln, a.dfch, p.fcw, B, T, C, 4 * C)
        layernorm_recompute(a.ln2_recomputed, a.residual2, p.norm2, a.stats2, B, T, C)
        matmul_backward_weight(g.fcw, a.dfch, a.ln2_recomputed, B, T, C, 4 * C, accumulate)
        layernorm_backward(dresidual, g.norm2, dln, a.residual2, p.norm2, a.stats2, B, T, C, dbias2=g.attprojb)

        matmul_backward_inp(a.datty, dresidual, p.attprojw, B, T, C, C)
        matmul_backward_weight(g.attprojw, dresidual, a.atty, B, T, C, C, accumulate)
        attention_backward(a.dqkv, a.datty, a.atty, a.attention, a.qkv, B, T, NH, NH, HS)
        matmul_backward_bias(g.qkvb, a.dqkv, B, T, 3 * C)
        matmul_backward_inp(dln, a.dqkv, p.qkvw, B, T, C, 3 * C)
        layernorm_recompute(a.ln_recomputed, a.residual, p.norm, a.stats, B, T, C)
        matmul_backward_weight(g.qkvw, a.dqkv, a.ln_recomputed, B, T, C, 3 * C, accumulate)
    layernorm_backward(dresidual, grads.norm[0], dln, acts.residual[0], params.norm[0], acts.stats[0], B, T, C)
    embedding_backward(grads.wte, grads.wpe, dresidual, batch, B, T, C)


class GPT2(Model):
    """GPT-2, as llmc/ needs to know it."""

    Config = GPT2Config
    ACTIVATIONS, GRADIENTS, SIZES = ACTIVATIONS, GRADIENTS, ("L", "C", "NH", "HS")
    LINEAR = {"qkvw": ("ln", None), "fcw": ("ln2", "dfch"), "fcprojw": ("gelu", None)}  # Model says what it is
    forward, loss, backward = gpt2_forward, cross_entropy_loss, gpt2_backward
    layer_recompute = gpt2_layer_recompute

    @staticmethod
    def group_parameters(tensors, config: GPT2Config) -> None:
        for t in tensors.layer:
            t.norm, t.norm2 = (t.ln1w, t.ln1b), (t.ln2w, t.ln2b)
        tensors.norm = [*(t.norm for t in tensors.layer), (tensors.lnfw, tensors.lnfb)]

    @classmethod
    def first_weights(cls, config: GPT2Config) -> tuple[dict[str, float], dict[str, float]]:
        """Normal with deviation 0.02, for projections into the residual stream 0.02 / sqrt(2L); layernorm weights 1."""
        deviations = dict.fromkeys(config.matrices, 0.02)
        deviations["attprojw"] = deviations["fcprojw"] = 0.02 / sqrt(2 * config.num_layers)
        return deviations, dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)


def training_step(training: Training, batches: Batches, stopped: Callable[[], bool] | None = None) -> Callable:
    """Returns train_step(step, learning_rate), which trains for one step, counted from 0. It returns False, and changes
    no parameter, if `stopped()` before a batch is sent. By default a batch that cannot be read raises UserError."""
    model, acts, batch, exchange = training.model, training.acts, batches.device_batch, training.exchange

    @exchange.record
    def forward_backward(first: bool, last: bool) -> None:  # one batch, replayed as a CUDA graph
        if first:
            model.zero_grad()                                 # of what backward adds to
        model.forward(acts, batch)
        model.loss(acts, batch, dloss=batch.dloss, accumulate=not first)
        model.backward(acts, batch, accumulate=not first)

    def train_step(step: int, learning_rate: float) -> bool:
        for i in range(batches.count):                        # this rank's batches
            batches.read(step, i)
            if (stopped or batches.stopped)():                # all ranks get the same answer
                return False
            batches.send(step, i)
            forward_backward(first=i == 0, last=i + 1 == batches.count)
            batches.fetch_losses(step, i)
        adamw_update(model, training.adamw, exchange, learning_rate, step + 1)
        return True

    return train_step


def train(kind: type[Model], flags: Namespace, report: Report | None = None) -> None:
    """Trains a model of this kind as the flags say. Calls report(step, figures) for each step (doc/python.md)."""
    with Run(kind, flags, report) as run:                     # device, ranks, model, data, a checkpoint to go on from
        s, train_step = run.settings, training_step(run.training, run.batches, run.stop_requested)
        for step in range(s.first_step, s.steps + 1):         # the last round saves, validates, samples, and ends
            position = run.position()                         # where a run that is resumed goes on
            if s.saves(step):
                run.save(step, position)
            if s.validates(step):
                run.save_best(step, position, run.validate(step))
            if s.samples(step):
                run.sample(step)
            if step == s.steps:
                break
            if not train_step(step, s.learning_rate(step)):
                run.stop_before(step, position)
                break
            run.report(step, position)                        # of the step before, while the device works on this one


if __name__ == "__main__":
    run_trainer(train, GPT2)
