"""Trains Llama 3 in fp32: RMSNorm, rotary positions, grouped-query attention and SwiGLU, on an NVIDIA GPU or the CPU.

The file reads from top to bottom, in the order of train_gpt2_fp32.py: the tensors, the model's file, forward, backward,
and last the loop over steps. In shapes, B is the batch size, T the sequence length, C the channels, L the layers, NH
the query heads and NKV the heads of keys and values, HS = C / NH their size, QKV = (NH + 2 NKV) HS, H the hidden
channels, V the vocabulary and Vp the same padded. Query head h attends to key and value head h // (NH / NKV).
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
from kernels.reduce import MOST_PARTIALS
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward, rmsnorm_transposed
from kernels.rope import ORIGINAL_LENGTH, rope_backward, rope_forward, rope_table
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.arguments import parse_arguments
from llmc.attention import attention_input, causal_attention_backward, causal_attention_forward
from llmc.classifier import backward_by_chunks, classifier_forward
from llmc.exchange import embedding_backward, embedding_forward
from llmc.files import make_header
from llmc.model import Model, dropouts
from llmc.program import run_trainer
from llmc.run import Run
from llmc.tensors import Config, Table, padded, without
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
    ("attprojw",    ("L", "C", "C")),
    ("ln2w",        ("L", "C")),
    ("fcw",         ("L", "2H", "C")),               # rows of up, of gate
    ("fcprojw",     ("L", "C", "H")),
    ("lnfw",        ("C",)),
)  # fmt: skip

FILE = (                                             # what a model file holds; the biases that Llama lacks are 0 there
    ("wte",         ("V", "C")),
    ("lm_head",     ("V", "C")),
    ("ln1w",        ("L", "C")),
    ("ln1b",        ("L", "C")),
    ("qkvw",        ("L", "QKV", "C")),
    ("qkvb",        ("L", "QKV")),
    ("attprojw",    ("L", "C", "C")),
    ("attprojb",    ("L", "C")),
    ("ln2w",        ("L", "C")),
    ("ln2b",        ("L", "C")),
    ("fcw",         ("L", "2H", "C")),
    ("fcb",         ("L", "2H")),
    ("fcprojw",     ("L", "C", "H")),
    ("fcprojb",     ("L", "C")),
    ("lnfw",        ("C",)),
    ("lnfb",        ("C",)),
)  # fmt: skip

ACTIVATIONS = (
    ("encoded",     ("B", "T", "C")),
    ("ln1_rstd",    ("L", "B", "T"), "fp32"),
    ("atty",        ("L", "B", "T", "C")),           # the heads' outputs, side by side
    ("residual2",   ("L", "B", "T", "C")),
    ("ln2_rstd",    ("L", "B", "T"), "fp32"),
    ("fch",         ("L", "B", "T", "2H")),          # up and gate
    ("residual3",   ("L", "B", "T", "C")),
    ("lnf_rstd",    ("B", "T"), "fp32"),
    ("logits",      ("R", "Vp")),                    # and then their gradient; R = B T, or the rows of a chunk
    ("losses",      ("B", "T"), "fp32"),
    # Scratch, the same for every layer. Backward recomputes, transposed, what weight gradients take.
    ("ln",          ("B", "T", "C")),                # forward: output of the RMSNorm at hand
    ("ln_T",        ("C", "B", "T"), "ln"),          # backward: the same, transposed
    ("atty_T",      ("C", "B", "T"), "ln"),          # backward: atty, transposed
    ("fch_swiglu",  ("B", "T", "H")),                # forward: output of the SwiGLU at hand
    ("fch_swiglu_T", ("H", "B", "T"), "fch_swiglu"), # backward: the same, transposed
    ("proj",        ("B", "T", "C")),                # forward: a projection back to C channels
    ("dproj",       ("B", "T", "C"), "proj"),        # backward, with dropout: its gradient
)  # fmt: skip

ACTIVATION_GRADIENTS = (
    ("dresidual",   ("B", "T", "C")),                # of the residual stream, from the last layer down to the first
    ("dln",         ("B", "T", "C")),                # of the output of the RMSNorm at hand
    ("datty",       ("B", "T", "C"), "dln"),         # of atty
    ("dfch_swiglu", ("B", "T", "H")),                # of the output of the SwiGLU at hand
    ("dfch",        ("B", "T", "2H")),
    ("dqkv",        ("B", "T", "QKV")),
    ("weight_T",    ("W", "C")),                     # the weight at hand, transposed
    ("partials",    ("P", "C"), "fp32"),             # sums of blocks, before they are added up
)  # fmt: skip


@dataclass(frozen=True)
class Llama3Config(Config):
    """The sizes of a Llama 3, and what else fixes the function that it computes.

    Its file is llm.c's Llama 3 `.bin`: int32[256]: 20240803, version, maxT, V, L, NH, NKV, C, multiple_of, whether RoPE
    is scaled, 3, 1; float32[256]: ffn_dim_multiplier, norm_eps, rope_theta; then the tensors of FILE. H = multiple_of *
    ceil(int(ffn_dim_multiplier * int(8 C / 3)) / multiple_of). Rows of q and k are in Meta's order, in which RoPE turns
    channels 2i and 2i + 1 of a head together. A model that llm.c's trainer can express (untied, RoPE scaled by 8 or not
    at all, eps 1e-5) is written as its version 3, which it loads. For any other the version is 103, which llm.c
    refuses instead of computing something else: the header then also holds, in the integers from the twelfth on,
    whether the head is tied and H, and in the fourth float the scaling factor (0: none); a tied file has no lm_head.
    Version 104 is for a model that was first trained on other than 8192 positions: their number follows H.
    """

    max_seq_len: int     # (maxT) longest sequence
    vocab_size: int      # (V) tokens; (Vp) is that rounded up to a multiple of 128
    num_layers: int      # (L)
    num_heads: int       # (NH) query heads
    num_kv_heads: int    # (NKV) heads of keys and values, a divisor of NH
    channels: int        # (C)
    hidden: int          # (H) channels between up and gate and the projection back
    rope_theta: float = 5e5
    rope_scaling: float = 0.0  # Llama 3.1's factor, by which low frequencies are divided; 0: none are
    norm_eps: float = 1e-5
    tied: bool = True    # the classifier's weight is wte
    original_length: int = ORIGINAL_LENGTH  # positions that the model was first trained on, by which RoPE is scaled

    NAME, SCRIPT, MAGIC, BF16_VERSION, PARAMETERS = "Llama 3", "train_llama3.py", 20240803, 5, PARAMETERS
    DESCRIPTION = {
        "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads", "channels": "channels",
        "hidden": "hidden", "maxT": "max_seq_len", "theta": "rope_theta", "scaling": "rope_scaling",
        "eps": "norm_eps", "tied": "tied", "original": "original_length", "vocab": "vocab_size",
    }  # fmt: skip
    PRESETS = {
        "smollm2-135m": "layers=30,heads=9,kv_heads=3,channels=576,hidden=1536,theta=1e5,vocab=49152,maxT=8192",
        "smollm2-360m": "layers=32,heads=15,kv_heads=5,channels=960,hidden=2560,theta=1e5,vocab=49152,maxT=8192",
        "llama3.2-1b": "layers=16,heads=32,kv_heads=8,channels=2048,hidden=8192,scaling=32,maxT=131072",
        "llama3.2-3b": "layers=28,heads=24,kv_heads=8,channels=3072,hidden=8192,scaling=32,maxT=131072",
        "llama3.1-8b": "layers=32,heads=32,kv_heads=8,channels=4096,hidden=14336,scaling=8,tied=0,maxT=131072",
    }
    DEFAULTS = {
        "max_seq_len": 1024, "rope_theta": 5e5, "rope_scaling": 0.0, "norm_eps": 1e-5, "tied": True,
        "vocab_size": 128256,
    }  # fmt: skip
    DEFAULT_MODEL = "llama3.2_1B.bin"
    FETCH = "make one from Hugging Face's with dev/hf/import_hf.py"
    FIRST_RUN = {
        "cuda": ("smollm2-135m", "-b 4 -t 1024"),
        "cpu": ("layers=4,heads=4,kv_heads=2,channels=128,hidden=352,maxT=64", "-x 2200 -v 550 -s 1100"),
    }
    SMALL = "layers=2,heads=2,kv_heads=1,channels=128,hidden=176"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads

    @property
    def absent(self) -> frozenset[str]:
        return super().absent | ({"lm_head"} if self.tied else set())

    def file_tensors(self) -> Table:
        return without(FILE, self.absent)

    def sizes(self) -> dict[str, int]:
        sizes, H = super().sizes(), self.hidden
        return sizes | {"H": H, "W": max(sizes["QKV"], 2 * H), "P": MOST_PARTIALS}

    def rows(self) -> list[tuple[str, object]]:
        scaling = "not scaled"
        if self.rope_scaling:
            scaling = f"scaled by {self.rope_scaling:g} beyond {self.original_length} positions"
        return [
            *super().rows(),
            ("key/value heads", self.num_kv_heads),
            ("hidden channels", self.hidden),
            ("RoPE", f"theta {self.rope_theta:g}, {scaling}"),
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
            raise UserError(
                f"{source}: heads of {self.channels} / {self.num_heads} channels are odd, and RoPE turns pairs"
            )
        if 0 < self.rope_scaling < 1:
            raise UserError(f"{source}: rope_scaling is {self.rope_scaling}; it must be 0 (none) or at least 1")

    def header(self) -> np.ndarray:
        usual = self.original_length == ORIGINAL_LENGTH
        expressible = usual and not self.tied and self.rope_scaling in (0, 8) and self.norm_eps == 1e-5
        version = 3 if expressible else 103 if usual else 104
        ints = make_header(
            self.MAGIC, version, self.max_seq_len, self.vocab_size, self.num_layers, self.num_heads,
            self.num_kv_heads, self.channels, self.hidden, self.rope_scaling > 0, 3, 1, self.tied, self.hidden,
            0 if usual else self.original_length,
        )  # fmt: skip
        floats = np.zeros(256, "<f4")
        # Any H is one multiple of itself, where the multiplier makes some of its channels: (H + 1.5) / 2, rounded down.
        multiplier = (0.5 * self.hidden + 0.75) / (8 * self.channels // 3)
        floats[:4] = multiplier, self.norm_eps, self.rope_theta, self.rope_scaling
        if expressible:
            ints[12:], floats[3:] = 0, 0
        return np.concatenate([ints, floats.view("<i4")])

    @classmethod
    def from_header(cls, header: np.ndarray, source: str) -> "Llama3Config":
        version, maxT, V, L, NH, NKV, C, multiple_of, scaled, _, _, tied, hidden, length = map(int, header[1:15])
        multiplier, eps, theta, scaling = (float(str(x)) for x in header[256:260].view("<f4"))
        if version not in (3, 103, 104):
            needed = "version 3, 103 or 104 (fp32), or 5 (bf16), is needed"
            raise UserError(f"{source}: model version {version} (unknown); {needed}: {cls.FETCH}")
        if version == 3:
            if not (0 < multiplier < float("inf") and multiple_of > 0):
                raise UserError(f"{source}: multiple_of {multiple_of}, ffn_dim_multiplier {multiplier} make no model")
            hidden = multiple_of * -(-int(multiplier * (8 * C // 3)) // multiple_of)
            scaling, tied = 8.0 if scaled else 0.0, False
        if version != 104:
            length = ORIGINAL_LENGTH
        return cls(maxT, V, L, NH, NKV, C, hidden, theta, scaling, eps, bool(tied), length)


def llama3_forward(model: Model, B: int, T: int, training: bool = False) -> None:
    """Makes the logits of the first B*T of model.inputs (llmc/classifier.py); with dropout when training. The rows of
    each sequence begin at position 0 or, where model.positions is given, there."""
    config, params, acts, rope = model.config, model.params, model.acts(B, T), model.constant.rope
    L, NH, NKV, C, H = config.num_layers, config.num_heads, config.num_kv_heads, config.channels, config.hidden
    HS, eps = config.head_size, config.norm_eps
    QKV = (NH + 2 * NKV) * HS
    drop = dropouts(model, training)

    embedding_forward(model, acts.encoded, params.wte, None, B, T, C)
    rmsnorm_forward(acts.ln, acts.layer[0].ln1_rstd, acts.encoded, params.layer[0].ln1w, eps, B, T, C)
    residual = acts.encoded

    for l in range(L):
        p, a, d = params.layer[l], acts.layer[l], drop.layer[l]

        qkv = attention_input(model, l, B, T)
        matmul_forward(qkv, acts.ln, p.qkvw, None, B, T, C, QKV)
        rope_forward(qkv, rope, B, T, NH, NKV, HS, positions=model.positions)
        causal_attention_forward(model, l, B, T)
        matmul_forward(acts.proj, a.atty, p.attprojw, None, B, T, C, C)
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


def llama3_backward(model: Model, B: int, T: int, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what llama3_forward and the loss left behind.

    Without `accumulate` the gradients of the weight matrices are set instead, for the first batch after zero_grad. The
    layers' backward passes follow in the reverse order of forward. A weight's gradient takes the product's input
    transposed: the outputs of RMSNorm and SwiGLU are recomputed in that layout, from what went into them.

    dproj is the gradient of what a branch adds to the residual stream: dresidual through its dropout.
    """
    config, params, grads, acts, gacts = model.config, model.params, model.grads, model.acts(B, T), model.grads_acts
    L, NH, NKV, C, H = config.num_layers, config.num_heads, config.num_kv_heads, config.channels, config.hidden
    HS, Vp, rope = config.head_size, padded(config.vocab_size), model.constant.rope
    QKV = (NH + 2 * NKV) * HS
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

        matmul_backward_inp(datty, dproj, p.attprojw, weight_T, B, T, C, C)
        matmul_backward_weight(g.attprojw, dproj, a.atty, acts.atty_T, B, T, C, C, accumulate)
        causal_attention_backward(dqkv, datty, model, l, B, T)
        rope_backward(dqkv, rope, B, T, NH, NKV, HS)
        matmul_backward_inp(dln, dqkv, p.qkvw, weight_T, B, T, C, QKV)
        residual, dropped = (acts.layer[l - 1].residual3, drop.layer[l - 1].fcproj) if l > 0 else (acts.encoded, None)
        rmsnorm_transposed(acts.ln_T, residual, p.ln1w, a.ln1_rstd, B, T, C)
        matmul_backward_weight_transposed(g.qkvw, dqkv, acts.ln_T, B, T, C, QKV, accumulate)
        rmsnorm_backward(
            dresidual, g.ln1w, dln, residual, p.ln1w, a.ln1_rstd, B, T, C,
            scratch=partials, dinp2=dproj, dropout=dropped,
        )  # fmt: skip

    embedding_backward(model, grads.wte, None, dresidual, B, T, C)


class Llama3(Model):
    """Llama 3, as llmc/ needs to know it."""

    Config = Llama3Config
    MATRICES = ("wte", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")
    ACTIVATIONS, ACTIVATION_GRADIENTS = ACTIVATIONS, ACTIVATION_GRADIENTS
    forward, backward = llama3_forward, llama3_backward

    @property
    def PRODUCTS(self) -> tuple[str, ...]:
        """An embedding that is no classifier's weight only has rows added to it."""
        return ("wte" if self.config.tied else "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")

    @classmethod
    def first_weights(cls, config: Llama3Config) -> tuple[dict[str, float], dict[str, float]]:
        """As transformers starts a Llama: normal with deviation 0.02; the RMSNorms' weights 1."""
        return dict.fromkeys(cls.MATRICES, 0.02), dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)

    @classmethod
    def constants(cls, config: Llama3Config, T: int) -> dict[str, np.ndarray]:
        """rope (T, HS/2, 2): the cosine and the sine of each pair's angle at each position."""
        scaling = config.rope_scaling or None
        return {"rope": rope_table(T, config.head_size, config.rope_theta, scaling, config.original_length)}


def main(flags: Namespace) -> None:
    with Run(Llama3, flags) as run:
        model, batches, s = run.model, run.batches, run.settings

        def forward_backward(first: bool, last: bool) -> None:  # on a batch; recorded once, then replayed
            if first:
                model.zero_grad()
            llama3_forward(model, s.B, s.T, training=True)
            model.loss(s.B, s.T, dloss=1.0 / s.step_tokens)
            llama3_backward(model, s.B, s.T, accumulate=not first)

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
    run_trainer(lambda: main(parse_arguments(Llama3Config)))
