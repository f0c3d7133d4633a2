"""Trains Llama 3 in fp32: RMSNorm, rotary positions, grouped-query attention and SwiGLU, on an NVIDIA GPU or the CPU.

The file has the order and the letters of train_gpt2_fp32.py, which also has the loop over steps. NH are the query
heads and NKV the heads of keys and values, HS = C / NH their size, QKV = (NH + 2 NKV) HS, H the hidden channels. Query
head h attends to key and value head h // (NH / NKV).
"""

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P leaves it out
import device
from device.errors import UserError
from kernels.attention import attention_backward, attention_forward
from kernels.matmul import matmul_backward_inp, matmul_backward_weight, matmul_forward
from kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward, rmsnorm_recompute
from kernels.rope import ORIGINAL_LENGTH, rope_backward, rope_forward, rope_table
from kernels.swiglu import matmul_swiglu_backward, matmul_swiglu_forward
from llmc.files.files import make_header
from llmc.model.batch import embedding_backward, embedding_forward
from llmc.model.loss import cross_entropy_loss
from llmc.model.model import Model
from llmc.model.tensors import Config, Table, without
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
    ("residual",    ("L+1", "B", "T", "C")),         # the residual stream before each layer, and after the last
    ("stats",       ("L+1", "B", "T"), "fp32"),      # of the norm of each residual: rstd alone
    ("atty",        ("L", "B", "T", "C")),           # the heads' outputs, side by side
    ("residual2",   ("L", "B", "T", "C")),           # between attention and MLP
    ("stats2",      ("L", "B", "T"), "fp32"),        # rstd of its norm
    ("fch",         ("L", "B", "T", "2H")),          # up and gate
    ("logits",      ("chunk", "Vp")),                # and then their gradient; chunk: B T rows, or --logit-rows
    ("losses",      ("B", "T"), "fp32"),
    ("ln",          ("B", "T", "C"), "recomputed"),  # output of the norm before attention, and of the last norm
    ("ln2",         ("B", "T", "C"), "ln", "recomputed"),  # output of the norm before the MLP
    ("swiglu",      ("B", "T", "H"), "recomputed"),  # output of SwiGLU
)  # fmt: skip

GRADIENTS = (
    ("dresidual",   ("B", "T", "C")),                # of the residual stream, from the last layer down to the first
    ("dln",         ("B", "T", "C")),                # of ln, or of ln2
    ("datty",       ("B", "T", "C"), "dln"),         # of atty
    ("dswiglu",     ("B", "T", "H")),                # of swiglu
    ("dfch",        ("B", "T", "2H")),               # of fch
    ("dqkv",        ("B", "T", "QKV")),              # of qkv
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
        "tiny": "layers=4,heads=4,kv_heads=2,channels=128,hidden=352,maxT=64",
    }
    DEFAULTS = {"max_seq_len": 1024, "vocab_size": 128256}
    DEFAULT_MODEL = "llama3.2_1B.bin"
    FETCH = "make one from Hugging Face's with dev/hf/import_hf.py"

    @property
    def absent(self) -> frozenset[str]:
        return super().absent | ({"lm_head"} if self.tied else set())

    def file_tensors(self) -> Table:
        return without(FILE, self.absent)

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"H": self.hidden}

    def check(self, source: str) -> None:
        super().check(source)
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


def llama3_forward(model: Model, acts, batch) -> None:
    """From the tokens to the last norm's output, acts.ln[L]. Where the tensors in acts lie decides what is kept."""
    params, eps, B, T, (L, C, *_, H) = model.params, model.config.norm_eps, batch.B, batch.T, model.sizes

    embedding_forward(acts.residual[0], batch, params.wte, None, B, T, C)
    rmsnorm_forward(acts.ln[0], acts.stats[0], acts.residual[0], params.norm[0], eps, B, T, C)
    for l in range(L):
        llama3_layer_forward(model, acts, batch, l)
        p, a, n = params.layer[l], acts.layer[l], l + 1
        matmul_forward(acts.residual[n], a.swiglu, p.fcprojw, None, B, T, H, C, a.residual2)
        rmsnorm_forward(acts.ln[n], acts.stats[n], acts.residual[n], params.norm[n], eps, B, T, C)


def llama3_layer_forward(model: Model, acts, batch, l: int) -> None:
    """Runs layer l from a.residual and a.ln up to a.swiglu. This leaves in `a` all that its backward pass reads."""
    params, rope, B, T, (_, C, NH, NKV, HS, H) = model.params, model.constant.rope, batch.B, batch.T, model.sizes
    p, a, eps = params.layer[l], acts.layer[l], model.config.norm_eps

    matmul_forward(a.qkv, a.ln, p.qkvw, None, B, T, C, (NH + 2 * NKV) * HS)
    rope_forward(a.qkv, rope, B, T, NH, NKV, HS, positions=batch.positions)
    attention_forward(a.atty, a.attention, a.qkv, B, T, NH, NKV, HS)
    matmul_forward(a.residual2, a.atty, p.attprojw, None, B, T, C, C, a.residual)
    rmsnorm_forward(a.ln2, a.stats2, a.residual2, p.norm2, eps, B, T, C)

    matmul_swiglu_forward(a.swiglu, a.fch, a.ln2, p.fcw, B, T, C, H)


def llama3_layer_recompute(model: Model, acts, batch, l: int) -> None:
    """With --recompute: runs layer l again, from a.residual, because other layers have overwritten its activations."""
    p, a, B, T, C = model.params.layer[l], acts.layer[l], batch.B, batch.T, model.config.channels

    rmsnorm_forward(a.ln, a.stats, a.residual, p.norm, model.config.norm_eps, B, T, C)
    llama3_layer_forward(model, acts, batch, l)


def llama3_backward(model: Model, acts, batch, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what forward and loss left in acts. The loss has added
    its part of the head's. In a step's first batch, without accumulate, sets those of the layers' matrices instead.
    Goes from the last layer to the first. Recomputes the outputs of RMSNorm and SwiGLU for the weights' gradients."""
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

        matmul_backward_inp(a.datty, dresidual, p.attprojw, B, T, C, C)
        matmul_backward_weight(g.attprojw, dresidual, a.atty, B, T, C, C, accumulate)
        attention_backward(a.dqkv, a.datty, a.atty, a.attention, a.qkv, B, T, NH, NKV, HS)
        rope_backward(a.dqkv, rope, B, T, NH, NKV, HS)
        matmul_backward_inp(dln, a.dqkv, p.qkvw, B, T, C, (NH + 2 * NKV) * HS)
        rmsnorm_recompute(a.ln_recomputed, a.residual, p.norm, a.stats, B, T, C)
        matmul_backward_weight(g.qkvw, a.dqkv, a.ln_recomputed, B, T, C, (NH + 2 * NKV) * HS, accumulate)
    rmsnorm_backward(dresidual, grads.norm[0], dln, acts.residual[0], params.norm[0], acts.stats[0], B, T, C)
    embedding_backward(grads.wte, None, dresidual, batch, B, T, C)


class Llama3(Model):
    """Llama 3, as llmc/ needs to know it."""

    Config = Llama3Config
    ACTIVATIONS, GRADIENTS, SIZES = ACTIVATIONS, GRADIENTS, ("L", "C", "NH", "NKV", "HS", "H")
    LINEAR = {"qkvw": ("ln", None), "fcw": ("ln2", "dfch"), "fcprojw": ("swiglu", None)}
    forward, loss, backward = llama3_forward, cross_entropy_loss, llama3_backward
    layer_recompute = llama3_layer_recompute

    @staticmethod
    def group_parameters(tensors, config: Llama3Config) -> None:
        for t in tensors.layer:
            t.norm, t.norm2 = t.ln1w, t.ln2w
        tensors.norm = [*(t.norm for t in tensors.layer), tensors.lnfw]

    @classmethod
    def first_weights(cls, config: Llama3Config) -> tuple[dict[str, float], dict[str, float]]:
        """As transformers starts a Llama: normal with deviation 0.02; the RMSNorms' weights 1."""
        return dict.fromkeys(config.matrices, 0.02), dict.fromkeys(("ln1w", "ln2w", "lnfw"), 1.0)

    @classmethod
    def constants(cls, config: Llama3Config, T: int) -> dict[str, np.ndarray]:
        """rope (T, HS/2, 2): the cosine and the sine of each pair's angle at each position."""
        scaling = config.rope_scaling or None
        return {"rope": rope_table(T, config.head_size, config.rope_theta, scaling, config.original_length)}


if __name__ == "__main__":
    run_trainer(train, Llama3)
