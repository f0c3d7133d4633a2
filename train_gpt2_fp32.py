"""Trains GPT-2 in fp32: llm.c's train_gpt2_fp32.cu in Python, on an NVIDIA GPU or on the CPU.

The file reads from top to bottom: the tensors, the model, forward, backward, update, and last the life of a run. The
layers are in kernels/, each a .cu file with its launchers beside it. In shapes, B is the batch size, T the sequence
length, C the channels, L the layers, NH the heads, HS = C / NH, V the vocabulary and Vp the same padded, and maxT the
longest sequence the model takes.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace

from llmc import device  # first: it sets what NumPy must find in the environment

import numpy as np  # isort: skip

from kernels.adamw import adamw
from kernels.attention import attention_backward, attention_forward
from kernels.classifier import fused_classifier
from kernels.encoder import encoder_backward, encoder_forward, sort_by_token
from kernels.flash_attention import flash_attention_backward, flash_attention_forward, supported
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_forward, layernorm_transposed
from kernels.matmul import (
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_forward,
)
from kernels.reduce import MOST_PARTIALS, global_norm
from llmc.arguments import parse_arguments
from llmc.checkpoint import (
    GPT2Config,
    check_checkpoint_directory,
    load_checkpoint,
    newest_checkpoint,
    num_parameters,
    prune_checkpoints,
    read_model,
    save_checkpoint,
)
from llmc.dataloader import DataLoader
from llmc.errors import UserError
from llmc.evaluation import EvalLoader
from llmc.logger import Logger
from llmc.report import StepTimer, StopRequest, print_step, print_table, run_table
from llmc.sampler import Sampler, sample_softmax
from llmc.schedule import LearningRateSchedule
from llmc.tokenizer import StreamDecoder, Tokenizer, find_tokenizer

# The tensors, each a named view into one buffer of its kind. A tensor whose shape begins with L has one part a layer.

PARAMETERS = (                                     # in the order of the model file
    ("wte",       ("Vp", "C")),                    # token embedding, and the weight of the classifier
    ("wpe",       ("maxT", "C")),                  # position embedding
    ("ln1w",      ("L", "C")),
    ("ln1b",      ("L", "C")),
    ("qkvw",      ("L", "3C", "C")),
    ("qkvb",      ("L", "3C")),
    ("attprojw",  ("L", "C", "C")),
    ("attprojb",  ("L", "C")),
    ("ln2w",      ("L", "C")),
    ("ln2b",      ("L", "C")),
    ("fcw",       ("L", "4C", "C")),
    ("fcb",       ("L", "4C")),
    ("fcprojw",   ("L", "C", "4C")),
    ("fcprojb",   ("L", "C")),
    ("lnfw",      ("C",)),
    ("lnfb",      ("C",)),
)  # fmt: skip

MATRICES = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")  # what weight decay applies to
PRODUCTS = ("wte", "qkvw", "attprojw", "fcw", "fcprojw")         # whose gradient begins as a matrix product

ACTIVATIONS = (
    ("encoded",   ("B", "T", "C")),
    ("ln1_mean",  ("L", "B", "T")),
    ("ln1_rstd",  ("L", "B", "T")),
    ("atty",      ("L", "B", "T", "C")),           # the heads' outputs, side by side
    ("residual2", ("L", "B", "T", "C")),
    ("ln2_mean",  ("L", "B", "T")),
    ("ln2_rstd",  ("L", "B", "T")),
    ("fch",       ("L", "B", "T", "4C")),          # before its bias and GELU
    ("residual3", ("L", "B", "T", "C")),
    ("lnf_mean",  ("B", "T")),
    ("lnf_rstd",  ("B", "T")),
    ("logits",    ("B", "T", "Vp")),               # and then their gradient
    ("losses",    ("B", "T")),
    # Every layer uses these again. Backward makes the first two anew, transposed, rather than have them kept.
    ("ln",        ("B", "T", "C")),                # output of the layernorm at hand
    ("fch_gelu",  ("B", "T", "4C")),
    ("proj",      ("B", "T", "C")),                # a projection back to C channels, before its bias
)  # fmt: skip

FLASH_ACTIVATIONS = (
    ("qkv",       ("L", "B", "T", "3C")),
    ("lse",       ("L", "B", "NH", "T")),          # log of the softmax's denominator
)  # fmt: skip

MATRIX_ACTIVATIONS = (
    ("qkvr",      ("L", "3C", "B", "T")),          # q, k, v: (3, B, NH, T, HS)
    ("att",       ("L", "B", "NH", "T", "T")),
    ("qkv",       ("B", "T", "3C")),
)  # fmt: skip

ACTIVATION_GRADIENTS = (
    ("dresidual", ("B", "T", "C")),                # of the residual stream, from the last layer down to the first
    ("dbtc",      ("B", "T", "C")),
    ("dbt4c",     ("B", "T", "4C")),
    ("weight_T",  ("4C", "C")),                    # the weight at hand, transposed
    ("partials",  ("P", "4C")),                    # sums of blocks, before they are added up
    ("norm",      ("2",)),                         # of all gradients, and the factor that clips them
)  # fmt: skip

FLASH_GRADIENTS = (
    ("dsum",      ("B", "NH", "T")),
)  # fmt: skip

MATRIX_GRADIENTS = (
    ("dqkvr",     ("3C", "B", "T")),
    ("datt",      ("B", "NH", "T", "T")),
)  # fmt: skip

ALIGNMENT = 64  # floats; every activation starts on a 256-byte boundary


def tensor_sizes(config: GPT2Config, B: int, T: int) -> dict[str, int]:
    """What the symbols in the tables stand for."""
    C = config.channels
    return {
        "Vp": config.padded_vocab_size, "maxT": config.max_seq_len, "L": config.num_layers, "NH": config.num_heads,
        "C": C, "3C": 3 * C, "4C": 4 * C, "B": B, "T": T, "P": MOST_PARTIALS, "2": 2,
    }  # fmt: skip


def layout(table: tuple, sizes: dict[str, int], align: int) -> tuple[dict[str, tuple[int, tuple]], int]:
    """For each tensor its place in the buffer and its shape, and the length of the buffer, in floats."""
    places, end = {}, 0
    for name, symbols in table:
        shape = tuple(sizes[symbol] for symbol in symbols)
        start = -(-end // align) * align
        places[name] = start, shape
        end = start + int(np.prod(shape, dtype=np.int64))
    return places, end


def name_tensors(buffer, table: tuple, sizes: dict[str, int], align: int = ALIGNMENT) -> SimpleNamespace:
    """The tensors of a table as views into a flat fp32 buffer: `.wte`, and with a part for each layer both `.qkvw`
    (all layers) and `.layer[l].qkvw`."""
    places, _ = layout(table, sizes, align)
    tensors = {name: buffer[at : at + int(np.prod(shape))].reshape(shape) for name, (at, shape) in places.items()}
    layered = [name for name, symbols in table if symbols[0] == "L"]
    layers = [SimpleNamespace(**{name: tensors[name][l] for name in layered}) for l in range(sizes["L"])]
    return SimpleNamespace(**tensors, layer=layers)


def parameter_ranges(config: GPT2Config, names: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """The parameters as few consecutive ranges: (start, end, whether these are tensors of the given names)."""
    places, _ = layout(PARAMETERS, tensor_sizes(config, 1, 1), align=1)
    ranges = []
    for name, (start, shape) in places.items():
        end, named = start + int(np.prod(shape, dtype=np.int64)), name in names
        if ranges and ranges[-1][2] == named:
            start = ranges.pop()[0]
        ranges.append((start, end, named))
    return ranges


class GPT2:
    """A model with room for batches of up to (B, T): its six buffers, and the tensors in them.

    params_memory, grads_memory, m_memory, v_memory: (num_parameters,) fp32, the parameters in the file's order, their
    gradients and AdamW's moments; acts_memory, grads_acts_memory: the activations and their gradients. A model for
    inference alone has no gradients and moments. attention: "flash", "softmax" or "relu".

    Raises UserError where the device has too little memory.
    """

    def __init__(self, config: GPT2Config, B: int, T: int, attention: str = "softmax", inference: bool = False):
        self.config, self.B, self.T, self.attention = config, B, T, attention
        flash = attention == "flash"
        self.acts_table = ACTIVATIONS + (FLASH_ACTIVATIONS if flash else MATRIX_ACTIVATIONS)
        self.grads_acts_table = ACTIVATION_GRADIENTS + (FLASH_GRADIENTS if flash else MATRIX_GRADIENTS)
        sizes = tensor_sizes(config, B, T)
        n = num_parameters(config)
        lengths = {"parameters": n, "activations": layout(self.acts_table, sizes, ALIGNMENT)[1]}
        if not inference:
            lengths |= {"gradients": n, "AdamW m": n, "AdamW v": n}
            lengths["activation gradients"] = layout(self.grads_acts_table, sizes, ALIGNMENT)[1]
        self.megabytes = {name: round(4 * length / 2**20) for name, length in lengths.items()}
        free, _ = device.memory()
        if 4 * sum(lengths.values()) > free:
            raise UserError(
                f"the model at B={B}, T={T} needs {sum(self.megabytes.values())} MiB of memory, and {free >> 20} MiB "
                f"are free on {device.name()}: lower -b or -t, or choose a smaller model (-e)"
            )
        buffers = {name: device.empty((length,)) for name, length in lengths.items()}
        self.params_memory = buffers["parameters"]
        self.acts_memory = buffers["activations"]
        self.params = name_tensors(self.params_memory, PARAMETERS, sizes, align=1)
        # The batch: tokens, what follows each, and for the embedding's gradient what sort_by_token makes of them.
        self.batch = device.zeros((4, B * T), np.int32)
        self.inputs, self.targets, self.order, self.count = self.batch
        self.views_of = {}
        if inference:
            return
        self.grads_memory, self.m_memory, self.v_memory = (
            buffers[name] for name in ("gradients", "AdamW m", "AdamW v")
        )
        self.grads_acts_memory = buffers["activation gradients"]
        self.grads = name_tensors(self.grads_memory, PARAMETERS, sizes, align=1)
        self.grads_acts = name_tensors(self.grads_acts_memory, self.grads_acts_table, sizes)
        device.fill_zero(self.m_memory)
        device.fill_zero(self.v_memory)

    def acts(self, B: int, T: int) -> SimpleNamespace:
        """The activations as they lie in the buffer for a batch of (B, T), made at the first request."""
        if (B, T) not in self.views_of:
            sizes = tensor_sizes(self.config, B, T)
            self.views_of[B, T] = name_tensors(self.acts_memory, self.acts_table, sizes)
        return self.views_of[B, T]


def gpt2_build_from_checkpoint(path: str, B: int, T: int, attention: str, inference: bool = False) -> GPT2:
    """The model in an llm.c `.bin`. Raises UserError as `read_model` does."""
    config, params = read_model(path)
    model = GPT2(config, B, T, attention, inference)
    device.copy_in(model.params_memory, params)
    device.synchronize()
    return model


def random_parameters(config: GPT2Config, seed: int) -> np.ndarray:
    """GPT-2's initial weights, fp32 (num_parameters,): normal with deviation 0.02, the projections back into the
    residual stream smaller by sqrt(2L); biases 0, layernorm weights 1, and 0 for the padding of the vocabulary."""
    params = np.zeros(num_parameters(config), np.float32)
    tensors = name_tensors(params, PARAMETERS, tensor_sizes(config, 1, 1), align=1)
    random = np.random.default_rng(seed)
    for name in MATRICES:
        tensor = getattr(tensors, name)
        deviation = 0.02 / np.sqrt(2 * config.num_layers) if name in ("attprojw", "fcprojw") else 0.02
        random.standard_normal(out=tensor, dtype=np.float32)
        tensor *= np.float32(deviation)
    tensors.wte[config.vocab_size :] = 0
    for tensor in (tensors.ln1w, tensors.ln2w, tensors.lnfw):
        tensor.fill(1)
    return params


def gpt2_build_from_random(config: GPT2Config, B: int, T: int, attention: str, seed: int) -> GPT2:
    """A model with GPT-2's initial weights."""
    model = GPT2(config, B, T, attention)
    device.copy_in(model.params_memory, random_parameters(config, seed))
    device.synchronize()
    return model


def choose_attention(kind: str, config: GPT2Config) -> str:
    """What "auto" stands for: flash attention where it is fast, else softmax. Raises UserError where a choice cannot
    be had."""
    fits = supported(config.channels, config.num_heads)
    if kind == "flash" and not fits:
        head_size = config.channels // config.num_heads
        raise UserError(f"-a flash takes heads of 64 or 128 channels, this model's have {head_size}: use -a softmax")
    if kind == "flash" and device.kind() == "cuda" and not device.tf32():
        raise UserError(
            "-a flash computes in TF32: it needs a GPU of compute capability 8.0 or later, and no -f 0; use -a softmax"
        )
    if kind == "auto":
        return "flash" if fits and device.kind() == "cuda" and device.tf32() else "softmax"
    return kind


def gpt2_forward(model: GPT2, B: int, T: int) -> None:
    """Sets the logits, acts(B, T).logits (B,T,Vp), from the first B*T of model.inputs."""
    config, params, acts, flash = model.config, model.params, model.acts(B, T), model.attention == "flash"
    L, NH, C, Vp = config.num_layers, config.num_heads, config.channels, config.padded_vocab_size

    encoder_forward(acts.encoded, model.inputs, params.wte, params.wpe, B, T, C)
    p, a = params.layer[0], acts.layer[0]
    layernorm_forward(acts.ln, a.ln1_mean, a.ln1_rstd, acts.encoded, p.ln1w, p.ln1b, B, T, C)
    residual = acts.encoded

    for l in range(L):
        p, a = params.layer[l], acts.layer[l]

        if flash:
            matmul_forward(a.qkv, acts.ln, p.qkvw, p.qkvb, B, T, C, 3 * C)
            flash_attention_forward(a.atty, a.lse, a.qkv, B, T, C, NH)
        else:
            matmul_forward(acts.qkv, acts.ln, p.qkvw, p.qkvb, B, T, C, 3 * C)
            attention_forward(a.atty, a.qkvr, a.att, acts.proj, acts.qkv, B, T, C, NH, model.attention == "relu")
        matmul_forward(acts.proj, a.atty, p.attprojw, None, B, T, C, C)
        fused_residual_forward(
            a.residual2, acts.ln, a.ln2_mean, a.ln2_rstd, residual, acts.proj, p.attprojb, p.ln2w, p.ln2b, B, T, C
        )

        matmul_forward(a.fch, acts.ln, p.fcw, None, B, T, C, 4 * C)
        gelu_forward(acts.fch_gelu, a.fch, p.fcb, B * T, 4 * C)
        matmul_forward(acts.proj, acts.fch_gelu, p.fcprojw, None, B, T, 4 * C, C)
        if l + 1 < L:
            mean, rstd = acts.layer[l + 1].ln1_mean, acts.layer[l + 1].ln1_rstd
            weight, bias = params.layer[l + 1].ln1w, params.layer[l + 1].ln1b
        else:
            mean, rstd, weight, bias = acts.lnf_mean, acts.lnf_rstd, params.lnfw, params.lnfb
        fused_residual_forward(
            a.residual3, acts.ln, mean, rstd, a.residual2, acts.proj, p.fcprojb, weight, bias, B, T, C
        )
        residual = a.residual3

    matmul_forward(acts.logits, acts.ln, params.wte, None, B, T, C, Vp)


def gpt2_loss(model: GPT2, B: int, T: int, dloss: float) -> None:
    """Sets acts(B, T).losses (B,T) from the logits and model.targets, and the logits to their gradient, where `dloss`
    is the gradient of each single loss."""
    acts, config = model.acts(B, T), model.config
    fused_classifier(acts.logits, acts.losses, dloss, model.targets, B, T, config.vocab_size, config.padded_vocab_size)


def gpt2_zero_grad(model: GPT2) -> None:
    """Zeroes the gradients to which backward adds. Those of the weight matrices it sets, unless told to accumulate."""
    for start, end, product in parameter_ranges(model.config, PRODUCTS):
        if not product:
            device.fill_zero(model.grads_memory[start:end])


def gpt2_backward(model: GPT2, B: int, T: int, accumulate: bool = False) -> None:
    """Adds the gradients of all parameters to model.grads, from what gpt2_forward and gpt2_loss left behind.

    Without `accumulate` the gradients of the weight matrices are set instead, for the first batch after gpt2_zero_grad.
    The layers' backward passes follow in the reverse order of forward. Weight gradients take the product's input
    transposed: outputs of layernorm and GELU are made again so, from what went into them.
    """
    config, params, grads, acts, gacts = model.config, model.params, model.grads, model.acts(B, T), model.grads_acts
    L, NH, C, Vp = config.num_layers, config.num_heads, config.channels, config.padded_vocab_size
    flash = model.attention == "flash"
    dresidual, dbtc, dbt4c, partials = gacts.dresidual, gacts.dbtc, gacts.dbt4c, gacts.partials
    dqkv, weight_T, transposed, gelu_transposed = dbt4c, gacts.weight_T, acts.ln, acts.fch_gelu

    residual = acts.layer[L - 1].residual3
    matmul_backward_inp(dbtc, acts.logits, params.wte, None, B, T, C, Vp)
    device.fill_zero(dresidual)
    layernorm_backward(
        dresidual, grads.lnfw, grads.lnfb, grads.layer[L - 1].fcprojb, partials,
        dbtc, residual, params.lnfw, acts.lnf_mean, acts.lnf_rstd, B, T, C,
    )  # fmt: skip
    layernorm_transposed(transposed, residual, params.lnfw, params.lnfb, acts.lnf_mean, acts.lnf_rstd, B, T, C)
    matmul_backward_weight(grads.wte, acts.logits, None, transposed, B, T, C, Vp, accumulate)

    for l in reversed(range(L)):
        p, g, a = params.layer[l], grads.layer[l], acts.layer[l]

        matmul_backward_inp(dbt4c, dresidual, p.fcprojw, weight_T, B, T, 4 * C, C)
        gelu_backward(dbt4c, g.fcb, gelu_transposed, partials, a.fch, p.fcb, B * T, 4 * C)
        matmul_backward_weight(g.fcprojw, dresidual, None, gelu_transposed, B, T, 4 * C, C, accumulate)
        matmul_backward_inp(dbtc, dbt4c, p.fcw, weight_T, B, T, C, 4 * C)
        layernorm_backward(
            dresidual, g.ln2w, g.ln2b, g.attprojb, partials, dbtc, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, B, T, C
        )
        layernorm_transposed(transposed, a.residual2, p.ln2w, p.ln2b, a.ln2_mean, a.ln2_rstd, B, T, C)
        matmul_backward_weight(g.fcw, dbt4c, None, transposed, B, T, C, 4 * C, accumulate)

        matmul_backward_inp(dbtc, dresidual, p.attprojw, weight_T, B, T, C, C)
        matmul_backward_weight(g.attprojw, dresidual, a.atty, transposed, B, T, C, C, accumulate)
        if flash:
            flash_attention_backward(dqkv, gacts.dsum, dbtc, a.atty, a.lse, a.qkv, B, T, C, NH)
        else:
            relu = model.attention == "relu"
            attention_backward(dqkv, gacts.dqkvr, gacts.datt, acts.proj, dbtc, a.qkvr, a.att, B, T, C, NH, relu)
        matmul_backward_bias(g.qkvb, partials, dqkv, B, T, 3 * C)
        matmul_backward_inp(dbtc, dqkv, p.qkvw, weight_T, B, T, C, 3 * C)
        residual, dbias_before = (
            (acts.layer[l - 1].residual3, grads.layer[l - 1].fcprojb) if l > 0 else (acts.encoded, None)
        )
        layernorm_backward(
            dresidual, g.ln1w, g.ln1b, dbias_before, partials, dbtc, residual, p.ln1w, a.ln1_mean, a.ln1_rstd, B, T, C
        )
        layernorm_transposed(transposed, residual, p.ln1w, p.ln1b, a.ln1_mean, a.ln1_rstd, B, T, C)
        matmul_backward_weight(g.qkvw, dqkv, None, transposed, B, T, C, 3 * C, accumulate)

    encoder_backward(grads.wte, grads.wpe, dresidual, model.inputs, model.order, model.count, B, T, C)


def gpt2_update(
    model: GPT2,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    t: int,
    grad_clip: float = 0.0,
) -> None:
    """One AdamW step on all parameters; t counts steps from 1. weight_decay applies to the matrices alone.

    grad_clip: the gradients are scaled down to this norm if theirs is larger, grads_acts.norm[0]; 0 leaves them alone.
    """
    n = model.grads_memory.size
    grad_scale = None
    if grad_clip > 0:
        gacts = model.grads_acts
        global_norm(gacts.norm, gacts.partials, model.grads_memory, n, grad_clip)
        grad_scale = gacts.norm[1:]
    for start, end, decayed in parameter_ranges(model.config, MATRICES) if weight_decay else [(0, n, False)]:
        params, grads, m, v = (
            memory[start:end] for memory in (model.params_memory, model.grads_memory, model.m_memory, model.v_memory)
        )
        adamw(
            params, grads, m, v, grad_scale, end - start,
            learning_rate, beta1, beta2, eps, weight_decay if decayed else 0.0, t,
        )  # fmt: skip


class Batches:
    """Carries batches to the device and their losses back, while the device still works on earlier ones.

    The page-locked arrays exist twice, for two steps of `count` batches in flight: one may be filled again when the
    losses of the step before last have been read.
    """

    def __init__(self, model: GPT2, loader: DataLoader | EvalLoader, count: int = 1):
        self.model, self.loader = model, loader
        self.batches = device.pinned((2, count, 4, model.B, model.T), np.int32)
        self.losses = device.pinned((2, count, model.B, model.T), np.float32)

    def send(self, step: int, i: int) -> None:
        """The loader's next batch, to model.batch: batch i of a step."""
        batch = self.batches[step % 2, i]
        self.loader.next_batch(batch[0], batch[1])
        batch[2:] = np.reshape(sort_by_token(batch[0]), (2, self.model.B, self.model.T))
        device.copy_in(self.model.batch, batch)

    def fetch_losses(self, step: int, i: int) -> None:
        device.copy_out(self.losses[step % 2, i], self.model.acts(self.model.B, self.model.T).losses)

    def mean_loss(self, step: int) -> float:
        """The mean over a step's batches, once the device has finished it."""
        return float(self.losses[step % 2].mean(dtype=np.float64))

    def run(self, forward_loss: Callable[[], None]) -> np.ndarray:
        """The losses (B,T) of the next batch, by itself."""
        self.send(0, 0)
        forward_loss()
        self.fetch_losses(0, 0)
        device.synchronize()
        return self.losses[0, 0]


def validate(batches: Batches, forward_loss: Callable[[], None], num_batches: int) -> float:
    """The mean loss over the first num_batches of the validation data."""
    batches.loader.reset()
    return sum(batches.run(forward_loss).mean(dtype=np.float64) for _ in range(num_batches)) / num_batches


def evaluate(batches: Batches, forward_loss: Callable[[], None]) -> float:
    """The share of multiple-choice questions whose right completion has the lowest mean loss."""
    questions = batches.loader
    questions.reset()
    correct = sum(questions.count_correct(batches.run(forward_loss)) for _ in range(questions.num_batches))
    return correct / questions.num_examples


def generate(model: GPT2, tokenizer: Tokenizer | None, sampler: Sampler, count: int) -> None:
    """Prints `count` sampled tokens as they come, starting from end-of-text; as numbers where there is no tokenizer."""
    V = model.config.vocab_size
    tokens = [min(tokenizer.eot if tokenizer else 50256, V - 1)]
    decoder = StreamDecoder(tokenizer) if tokenizer else None
    print("generating:\n---")
    for _ in range(count):
        context = np.array(tokens[-model.T :], np.int32)
        logits = next_logits(model, context)
        tokens.append(sample_softmax(logits, sampler.random_f32()))
        print(decoder.push(tokens[-1]) if decoder else f"{tokens[-1]} ", end="", flush=True)
    print((decoder.flush() if decoder else "") + "\n---")


def next_logits(model: GPT2, context: np.ndarray) -> np.ndarray:
    """The logits (V,) of the token that follows context, int32 (t,), t <= model.T."""
    t = len(context)
    device.copy_in(model.inputs, context)
    gpt2_forward(model, 1, t)
    return device.to_host(model.acts(1, t).logits[0, t - 1, : model.config.vocab_size])


def build_model(args: Namespace, tokenizer: Tokenizer | None) -> tuple[GPT2, dict | None]:
    """The model that the flags ask for, and where a run is resumed, the state of its checkpoint."""
    checkpoint = newest_checkpoint(args.checkpoint_dir) if args.resume else None
    if args.resume and checkpoint is None:
        print(f"no checkpoint in {args.checkpoint_dir} yet: starting from the beginning")
    if checkpoint is not None:
        config, params, m, v, state = load_checkpoint(checkpoint)
    elif args.random_model is not None:
        config = args.random_model.config(tokenizer.vocab_size if tokenizer else 50257)
    else:
        config, params = read_model(args.model)
    if args.T > config.max_seq_len:
        raise UserError(f"-t {args.T} is above the model's longest sequence, {config.max_seq_len}: lower -t")
    args.attention = choose_attention(args.attention, config)
    if checkpoint is None and args.random_model is not None:
        return gpt2_build_from_random(config, args.B, args.T, args.attention, args.seed), None
    model = GPT2(config, args.B, args.T, args.attention)
    device.copy_in(model.params_memory, params)
    if checkpoint is not None:
        device.copy_in(model.m_memory, m)
        device.copy_in(model.v_memory, v)
    device.synchronize()
    return model, state if checkpoint is not None else None


def main() -> None:
    args = parse_arguments()
    device.use(args.device)
    device.use_tf32(args.tf32)
    B, T = args.B, args.T

    # What the run is made of. All that can be wrong with flags and files comes out here, before anything is written.
    tokenizer_path = find_tokenizer(args.data)
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path else None
    model, state = build_model(args, tokenizer)
    config = model.config
    if tokenizer and tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"{tokenizer_path} has {tokenizer.vocab_size} tokens and the model {args.model} {config.vocab_size}: "
            "use data (-i) and a model (-e) of the same tokenizer"
        )
    train_loader = DataLoader(args.data, "train", B, T, config.vocab_size, args.shuffle_seed)
    val_loader = DataLoader(args.val_data, "val", B, T, config.vocab_size)
    batch_tokens = args.total_batch_size or B * T
    accumulation = batch_tokens // (B * T)
    steps = train_loader.num_tokens // batch_tokens if args.max_steps is None else args.max_steps
    if steps == 0 and args.max_steps is None:
        raise UserError(
            f"-d {batch_tokens} is more than the {train_loader.num_tokens} tokens of {args.data}, so an epoch has no "
            "step: lower -d, or set the number of steps with -x"
        )
    val_batches = min(val_loader.num_batches, args.val_max_batches)
    schedule = LearningRateSchedule(args.schedule, args.learning_rate, args.warmup, steps, args.final_fraction)
    sampler = Sampler(args.seed)
    first_step = 0
    if state is not None:
        first_step, sampler.state = state["step"], state["sampler"]
        if first_step > steps:
            raise UserError(f"the checkpoint in {args.checkpoint_dir} is of step {first_step} of {steps}: raise -x")
        train_loader.load_state(state["loader"])
    train_batches, val_batch = Batches(model, train_loader, accumulation), Batches(model, val_loader)
    questions = Batches(model, EvalLoader(args.hellaswag, B, T, config.vocab_size)) if args.hellaswag else None
    norms = device.pinned((2, 2), np.float32)
    if args.checkpoint_dir:
        check_checkpoint_directory(args.checkpoint_dir)
    device.compile_all()
    logger = Logger(args.log, first_step)
    print_table(run_table(args, model, tokenizer_path, train_loader, val_loader, val_batches, steps, first_step))

    # What a step does, for a GPU to record once and replay.
    def train(accumulate: bool) -> None:
        if not accumulate:
            gpt2_zero_grad(model)
        gpt2_forward(model, B, T)
        gpt2_loss(model, B, T, dloss=1.0 / batch_tokens)
        gpt2_backward(model, B, T, accumulate)

    def forward_loss() -> None:
        gpt2_forward(model, B, T)
        gpt2_loss(model, B, T, dloss=1.0 / batch_tokens)

    train_first, train_next = device.record(lambda: train(False)), device.record(lambda: train(True))
    forward_loss = device.record(forward_loss)

    timer, stop = StepTimer(), StopRequest()
    running = None  # the step that the device still works on: step, when launched, event at its end, learning rate

    def finish_running_step() -> None:
        nonlocal running
        if running is None:
            return
        step, started, end, learning_rate = running
        ms = timer.add(started, end.wait())
        running, loss = None, train_batches.mean_loss(step)
        norm = float(norms[step % 2, 0]) if args.grad_clip else None
        print_step(step + 1, steps, loss, norm, learning_rate, ms, timer.average(20), batch_tokens, config, T)
        logger.log_train(step, loss)

    for step in range(first_step, steps + 1):
        last, stopping = step == steps, stop.requested  # who is told to stop may soon be killed: saving comes first
        sampler_state = sampler.state  # a run that is resumed here samples again what this one is about to

        if not stopping and (last or step % args.val_every == 0):
            finish_running_step()
            loss = validate(val_batch, forward_loss, val_batches)
            print(f"val loss {loss:.6f}", flush=True)
            logger.log_val(step, loss)
            if questions:
                accuracy = evaluate(questions, forward_loss)
                print(f"HellaSwag accuracy {accuracy:.4f} of {questions.loader.num_examples}", flush=True)
                logger.log_eval(step, accuracy)
        due = last or args.sample_every and step > 0 and step % args.sample_every == 0
        if not stopping and args.sample_tokens and due:
            finish_running_step()
            generate(model, tokenizer, sampler, args.sample_tokens)
        save = last or stopping or args.checkpoint_every and step % args.checkpoint_every == 0
        if args.checkpoint_dir and save and step > first_step:
            finish_running_step()
            params, m, v = (device.to_host(x) for x in (model.params_memory, model.m_memory, model.v_memory))
            state = {"loader": train_loader.state(), "sampler": sampler_state}
            print(f"saved {save_checkpoint(args.checkpoint_dir, step, config, params, m, v, state)}", flush=True)
            prune_checkpoints(args.checkpoint_dir, args.keep)
        if last or stopping:
            finish_running_step()
            break

        started = time.perf_counter()
        learning_rate = schedule.get_learning_rate(step)
        for i in range(accumulation):
            train_batches.send(step, i)
            train_first() if i == 0 else train_next()
            train_batches.fetch_losses(step, i)
        gpt2_update(model, learning_rate, 0.9, 0.999, 1e-8, args.weight_decay, step + 1, args.grad_clip)
        if args.grad_clip:
            device.copy_out(norms[step % 2], model.grads_acts.norm)
        launched = step, started, device.event(), learning_rate
        finish_running_step()  # the one before, while the device works on this one
        running = launched
        if device.kind() == "cpu":
            finish_running_step()  # it is over already

    if stopping:
        print(f"stopped by {stop.name} after {step} of {steps} steps")
    print(f"total average iteration time: {timer.average():.6f} ms")
    logger.close()


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # samples may have characters that the terminal lacks
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except MemoryError as error:
        print(f"error: out of memory ({error}): lower -b or -t", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before the first step; from then on StopRequest has it
        print("interrupted before the first step", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
