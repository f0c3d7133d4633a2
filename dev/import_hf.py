"""Turns a GPT-2, a Llama or a GPT-NeoX (Pythia) of Hugging Face's transformers into a model `.bin`.

    python dev/import_hf.py DIR -o model.bin                  # what save_pretrained or a download left: config.json and
    python dev/import_hf.py model.safetensors -o model.bin    # safetensors; or, for GPT-2, a safetensors file alone

Weights of 16 or 64 bits become fp32. They go into the new file one tensor at a time, so a model may be larger than the
memory. A tokenizer.json goes along: as model_tokenizer.json beside the model, and as model_tokenizer.bin, which shows
text without the tokenizers library.

All but the number of heads of a GPT-2 can be seen in the tensors themselves. Where no config.json says it, --heads
does; without either the import takes heads to be 64 channels wide, as in all four of GPT-2's sizes, and says so.
"""

import json
import os
import re
import reprlib
import sys
import time
from functools import partial
from pathlib import Path

if not __package__:  # run as a program: look in the repository, not in dev/, whose modules could hide Python's own
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dev.huggingface import PYTHIA_GELUS, config_json, named_tensors, rope_scaling
from device.errors import UserError
from kernels.rope import ORIGINAL_LENGTH
from llmc.arguments import Parser, a_path, positive
from llmc.checkpoint import new_model
from llmc.files import first_word, replacing
from llmc.program import run_program
from llmc.scripts import kind_of_magic
from llmc.tensors import Config, layout, num_parameters
from llmc.tokenizer import Tokenizer, tokenizer_files, write_tokenizer
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

# What makes a model compute something else than ours does: the setting, its default, and the values that do not.
GPT2_SETTINGS = (
    ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    ("layer_norm_epsilon", 1e-5, (1e-5,)),
    ("scale_attn_weights", True, (True,)),
    ("scale_attn_by_inverse_layer_idx", False, (False,)),
    ("add_cross_attention", False, (False,)),
    ("quantization_config", None, (None,)),
)
LLAMA_SETTINGS = (
    ("hidden_act", "silu", ("silu",)),
    ("attention_bias", False, (False,)),
    ("mlp_bias", False, (False,)),
    ("pretraining_tp", 1, (1,)),
    ("quantization_config", None, (None,)),
)
NEOX_GELUS = {theirs: ours for ours, theirs in PYTHIA_GELUS.items()} | {"gelu_new": "tanh", "gelu_fast": "tanh"}
NEOX_SETTINGS = (
    ("hidden_act", "gelu", tuple(NEOX_GELUS)),
    ("use_parallel_residual", True, (True, False)),
    ("attention_bias", True, (True,)),
    ("tie_word_embeddings", False, (False,)),
    ("quantization_config", None, (None,)),
)
LLAMA_ROPE_TYPES, NEOX_ROPE_TYPES = ("default", "llama3"), ("default",)
LLAMA3_SCALING = {  # the factor and the length may be others
    name: value for name, value in rope_scaling(8.0, ORIGINAL_LENGTH).items() if name.endswith("freq_factor")
}

PRECISIONS = ("F32", "F16", "BF16", "F64")
CLASSIFIERS = re.compile(r"(.*\.)?((score|classifier|qa_outputs|multiple_choice_head)\..*)")  # what they have as heads
BUFFERS = re.compile(r".*\.(attn|attention)\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")  # no weights, in old files

SAVE_AGAIN = "save the model again with save_pretrained"


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises UserError where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; {SAVE_AGAIN}")
    return content


def find_files(source: Path) -> list[Path]:
    """The safetensors files of a model given as such a file or a directory. Raises UserError where one is missing."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{source}: no such file or directory")
    whole, index = source / "model.safetensors", source / "model.safetensors.index.json"
    shards = sorted(source.glob("model-*-of-*.safetensors"))
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{index}: no weight_map there, which says what is in which file; {SAVE_AGAIN}")
        names = sorted(set(names.values()))
    elif shards:
        count = shards[0].stem.rpartition("-")[2]
        names = [f"model-{n:0{len(count)}}-of-{count}.safetensors" for n in range(1, int(count) + 1)]
    else:
        raise UserError(f"{source}: no model.safetensors there; save the model with save_pretrained")
    for name in names:
        if not (source / name).is_file():
            raise UserError(f"{source / name} is missing, which has a part of the model; fetch it, or {SAVE_AGAIN}")
    return [source / name for name in names]


def open_tensors(files: list[Path], prefix: str) -> dict[str, object]:
    """The tensors in safetensors files, not yet read, by name; one that was saved without its head lacks the prefix,
    which is put before it.

    Raises UserError where a file is damaged or of another kind.
    """
    tensors = {}
    for path in files:
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error})") from None
        for name in file.keys():
            if not BUFFERS.fullmatch(name):
                named = name.startswith(prefix) or name in ("lm_head.weight", "embed_out.weight")
                tensors[name if named else prefix + name] = file.get_slice(name)
    return tensors


def refuse(source: Path, name: str, value, supported: str) -> None:
    raise UserError(f"{source}: {name} is {reprlib.repr(value)} in its config.json; {supported} is supported")


def check_settings(source: Path, settings: dict, required: tuple) -> None:
    """Raises UserError for a setting with which transformers computes something else than ours does."""
    for name, default, values in required:
        if settings.get(name, default) not in values:
            supported = " or ".join("none" if value is None else str(value) for value in values)
            refuse(source, name, settings[name], supported)


def number(source: Path, settings: dict, name: str, default: float) -> float:
    """A setting that is a number. Raises UserError where it is something else."""
    value = settings.get(name, default)
    if type(value) not in (int, float) or not abs(value) < 2**127:  # what fp32 can hold
        refuse(source, name, value, "a number")
    return float(value)


def size(source: Path, settings: dict, name: str, default: int | None = None) -> int:
    """A setting that is a size. Raises UserError where it is missing or something else."""
    value = default if settings.get(name) is None else settings[name]
    if type(value) is not int or value < 1:
        refuse(source, name, value, "a whole number from 1 on")
    if value >= 1 << 31:
        refuse(source, name, value, "a whole number below 2**31")
    return value


def gpt2_config(source: Path, settings: dict, tensors: dict[str, object], heads: int | None) -> GPT2Config:
    """The sizes of a GPT-2, as its tensors show them, and its heads. Raises UserError where this is none."""
    check_settings(source, settings, GPT2_SETTINGS)
    shapes = {name: tensor.get_shape() for name, tensor in tensors.items()}
    wte, wpe = (shapes.get(f"transformer.{name}.weight", ()) for name in ("wte", "wpe"))
    if len(wte) != 2 or len(wpe) != 2:
        raise UserError(
            f"{source}: no GPT-2 (it lacks the embeddings wte.weight and wpe.weight); another model needs a config.json"
        )
    layers = [int(found[1]) for name in shapes if (found := re.match(r"transformer\.h\.(\d+)\.", name))]
    num_layers = 1 + max(layers, default=-1)
    heads = heads or size(source, settings, "n_head", default=max(1, wte[1] // 64))
    return GPT2Config(wpe[0], wte[0], num_layers, heads, wte[1])


def llama3_config(source: Path, settings: dict) -> Llama3Config:
    """The sizes of a Llama, as its config.json has them. Raises UserError where ours computes something else."""
    check_settings(source, settings, LLAMA_SETTINGS)
    size_of = partial(size, source, settings)
    C, NH = size_of("hidden_size"), size_of("num_attention_heads")
    NKV, HS = size_of("num_key_value_heads", NH), size_of("head_dim", max(1, C // NH))
    if NH % NKV:
        refuse(source, "num_key_value_heads", NKV, f"a divisor of num_attention_heads, {NH},")
    if HS != C // NH:
        refuse(source, "head_dim", HS, f"hidden_size / num_attention_heads, {C} / {NH},")
    eps = number(source, settings, "rms_norm_eps", 1e-6)
    theta, scaling, length, _ = rope(source, settings, LLAMA_ROPE_TYPES, settings.get("rope_theta", 1e4))
    return Llama3Config(
        size_of("max_position_embeddings"), size_of("vocab_size"), size_of("num_hidden_layers"), NH, NKV, C,
        size_of("intermediate_size"), theta, scaling, eps, bool(settings.get("tie_word_embeddings", False)),
        length,
    )  # fmt: skip


def pythia_config(source: Path, settings: dict) -> PythiaConfig:
    """The sizes of a GPT-NeoX, as its config.json has them. Raises UserError where ours computes something else."""
    check_settings(source, settings, NEOX_SETTINGS)
    size_of = partial(size, source, settings)
    C, hidden = size_of("hidden_size"), size_of("intermediate_size")
    if hidden != 4 * C:
        refuse(source, "intermediate_size", hidden, f"4 times hidden_size, {C},")
    theta, rotary = settings.get("rotary_emb_base", 1e4), settings.get("rotary_pct", 0.25)
    theta, _, _, rotary = rope(source, settings, NEOX_ROPE_TYPES, theta, rotary)
    return PythiaConfig(
        size_of("max_position_embeddings"), size_of("vocab_size"), size_of("num_hidden_layers"),
        size_of("num_attention_heads"), C, rotary, theta, number(source, settings, "layer_norm_eps", 1e-5),
        parallel=settings.get("use_parallel_residual", True), gelu=NEOX_GELUS[settings.get("hidden_act", "gelu")],
    )  # fmt: skip


def rope(
    source: Path, settings: dict, types: tuple[str, ...], theta: float, rotary: float | None = None
) -> tuple[float, float, int, float]:
    """RoPE's theta, scaling factor, 0 for none, the positions that a scaled model was first trained on, and the share
    of a head that RoPE turns, which is the whole unless a default, `rotary`, is given. Before transformers 5, theta and
    the share stood beside what is rope_parameters today, and that was called rope_scaling."""
    where = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    found = settings.get(where) or {}
    if not isinstance(found, dict):
        refuse(source, where, found, "an object")
    found = {"rope_theta": theta, "factor": 0.0, "partial_rotary_factor": 1 if rotary is None else rotary} | found
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in types:
        refuse(source, f"{where}.rope_type", kind, " or ".join(types))
    required = {"partial_rotary_factor": 1} if rotary is None else {}
    if kind == "llama3":
        required |= LLAMA3_SCALING
    for name, value in required.items():
        if found.get(name) != value:
            refuse(source, f"{where}.{name}", found.get(name), f"{value:g}")
    found = {f"{where}.{name}": value for name, value in found.items()}  # as messages name them
    theta, scaling, rotary = (
        number(source, found, f"{where}.{name}", 0.0) for name in ("rope_theta", "factor", "partial_rotary_factor")
    )
    if kind != "llama3":
        return theta, 0.0, ORIGINAL_LENGTH, rotary
    if scaling < 1:
        refuse(source, f"{where}.factor", scaling, "a number from 1 on")
    return theta, scaling, size(source, found, f"{where}.original_max_position_embeddings"), rotary


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of transformers' tensors for a model of these sizes."""
    starts, _ = layout(config.parameters(), config.sizes(), align=1)
    hollow = {name: np.broadcast_to(np.float32(0), shape) for name, (_, shape) in starts.items()}  # without memory
    return {name: shape for name, _, shape in named_tensors(config, hollow)}


def check_tensors(source: Path, config: Config, tensors: dict[str, object]) -> None:
    """Raises UserError where a tensor is missing, of another shape or kind, or one that the model does not have."""
    head = next(filter(None, map(CLASSIFIERS.fullmatch, sorted(tensors))), None)
    if head:
        kind = config_json(config)["architectures"][0]
        raise UserError(f"{source}: tensor {head[2]} is the head of a classifier; a language model, {kind}, is needed")
    wanted = shapes_of(config)
    for name, shape in wanted.items():
        found = tuple(tensors[name].get_shape()) if name in tensors else None
        if found != shape:
            found = f"is {found}" if found is not None else "is missing"
            raise UserError(f"{source}: tensor {name} {found}; a {config.NAME} of these sizes has it as {shape}")
        if tensors[name].get_dtype() not in PRECISIONS:
            kind = tensors[name].get_dtype()
            raise UserError(f"{source}: tensor {name} is of type {kind}; {', '.join(PRECISIONS)} are supported")
    unknown = tensors.keys() - wanted.keys() - {"lm_head.weight"}
    if unknown:
        raise UserError(f"{source}: tensor {min(unknown)} is none of {config.NAME}'s")
    if "lm_head.weight" in tensors.keys() - wanted.keys():
        name = next(iter(wanted))
        if not np.array_equal(read(tensors["lm_head.weight"]), read(tensors[name])):
            raise UserError(f"{source}: lm_head.weight is not {name}; a tied {config.NAME} has one tensor for both")


def read(tensor) -> np.ndarray:
    return tensor[:].to(torch.float32).numpy()


def write_model(path: Path, config: Config, tensors: dict[str, object]) -> None:
    """Writes the model, a tensor at a time."""
    done, total, shown = 0, num_parameters(config), time.monotonic()
    with new_model(path, config) as ours:
        for name, view, _ in named_tensors(config, ours):
            view[...] = read(tensors[name]).reshape(view.shape)
            done += view.size
            if time.monotonic() - shown > 3:
                shown = time.monotonic()
                print(f"{100 * done // total}% of {total:,} parameters", flush=True)


def take_tokenizer_along(source: Path, model: Path, vocab_size: int) -> None:
    """Puts the tokenizer.json in the directory `source`, if any, beside the model, under the names by which generate.py
    finds it; says on stderr where the .bin cannot be made of it."""
    found = source / "tokenizer.json"
    if not found.is_file():
        return
    for name, content in tokenizer_files(found, f"{model.stem}_").items():
        beside = model.with_name(name)
        with replacing(beside) as file:
            file.write(content)
        print(f"wrote {beside}")
    binary = model.with_name(f"{model.stem}_tokenizer.bin")
    try:
        tokenizer = Tokenizer.load(found)
        if not tokenizer.fits(vocab_size, own=True):
            raise UserError(f"{found} has {tokenizer.vocab_size} tokens and the model {vocab_size}")
        write_tokenizer(binary, tokenizer.tokens, tokenizer.eot)
        print(f"wrote {binary}")
    except UserError as error:
        print(f"no {binary}: {error}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Turn a GPT-2, a Llama or a GPT-NeoX of transformers into a model .bin.")
    parser.add_argument("source", type=a_path, help="a directory with config.json and safetensors, or such a file")
    parser.add_argument("-o", "--out", type=a_path, metavar="FILE", required=True, help="the .bin to write")
    parser.add_argument("--heads", type=positive, metavar="N", help="GPT-2's heads, where no config.json says it")
    args = parser.parse_args(arguments)
    if os.path.lexists(args.out) and not kind_of_magic(first_word(args.out)):
        raise UserError(f"{args.out}: there is something that is no model: name another with -o, or remove it")
    files = find_files(args.source)
    path = files[0].parent / "config.json"
    settings = read_json(path) if path.is_file() else {}
    family = settings.get("model_type", "gpt2")
    if family == "gpt2":
        tensors = open_tensors(files, "transformer.")
        config = gpt2_config(args.source, settings, tensors, args.heads)
    elif family in ("llama", "gpt_neox"):
        if args.heads:
            raise UserError("--heads is for a GPT-2 without config.json: leave it out")
        tensors = open_tensors(files, "model." if family == "llama" else "gpt_neox.")
        config = (llama3_config if family == "llama" else pythia_config)(args.source, settings)
    else:
        refuse(args.source, "model_type", family, "gpt2, llama or gpt_neox")
    config.check(str(args.source))
    check_tensors(args.source, config, tensors)
    rows = "; ".join(f"{name} {value}" for name, value in config.rows())
    print(
        f"importing {args.source}: {config.NAME}, {rows}; {config.vocab_size} tokens, sequences of "
        f"{config.max_seq_len}; {num_parameters(config):,} parameters",
        flush=True,
    )
    if family == "gpt2" and args.heads is None and settings.get("n_head") is None:
        print(
            f"{args.source}: no config.json says how many heads the model has; {config.num_heads} of "
            f"{config.channels // config.num_heads} channels each is a guess, and --heads names another number",
            file=sys.stderr,
        )
    write_model(args.out, config, tensors)
    print(f"wrote {args.out}")
    take_tokenizer_along(args.source, args.out, config.vocab_size)


if __name__ == "__main__":
    run_program(main)
