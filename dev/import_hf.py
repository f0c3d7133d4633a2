"""Turns a GPT-2 of Hugging Face's transformers into an llm.c model.

    python dev/import_hf.py DIR -o model.bin                  # what save_pretrained or a download left: config.json and
    python dev/import_hf.py model.safetensors -o model.bin    # safetensors; or a safetensors file alone

Any size will do. All but the number of heads can be seen in the tensors themselves; without a config.json, --heads says
it, or else heads are 64 channels wide, as in all four of GPT-2's sizes. Weights of 16 bits become fp32.
"""

import json
import re
import sys
from pathlib import Path

if not __package__:  # run as a program: look in the repository, not in dev/, whose modules could hide Python's own
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

try:
    import torch
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    sys.exit(f"error: {error.name} is missing: pip install -r requirements-dev.txt")

from dev.huggingface import named_tensors
from llmc.arguments import Parser
from llmc.checkpoint import GPT2Config, num_parameters, write_model
from llmc.errors import UserError

# What makes a GPT-2 compute something else than ours does: the setting, its default, and the values that do not.
REQUIRED = (
    ("model_type", "gpt2", ("gpt2",)),
    ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    ("layer_norm_epsilon", 1e-5, (1e-5,)),
    ("scale_attn_weights", True, (True,)),
    ("scale_attn_by_inverse_layer_idx", False, (False,)),
    ("add_cross_attention", False, (False,)),
)


def find_files(source: Path) -> tuple[list[Path], dict | None]:
    """The safetensors files of a model given as such a file or a directory, and its config.json where it has one.

    Raises UserError where there are none, or the config.json is no JSON object.
    """
    if source.is_dir():
        whole = source / "model.safetensors"
        directory, files = source, [whole] if whole.is_file() else sorted(source.glob("model-*-of-*.safetensors"))
        if not files:
            raise UserError(f"{source}: no model.safetensors there; save the model with save_pretrained")
    elif source.is_file():
        directory, files = source.parent, [source]
    else:
        raise UserError(f"{source}: no such file or directory")
    path = directory / "config.json"
    if not path.is_file():
        return files, None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object; save the model again with save_pretrained")
    return files, config


def open_tensors(files: list[Path]) -> dict[str, object]:
    """The tensors in safetensors files, not yet read, by the name that GPT2Model has for them.

    Raises UserError where a file is damaged or of another kind.
    """
    tensors = {}
    for path in files:
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error})") from None
        for name in file.keys():
            plain = name.removeprefix("transformer.")
            if not re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", plain):  # the causal mask, in old files
                tensors[plain] = file.get_slice(name)
    return tensors


def read_config(source: Path, tensors: dict[str, object], settings: dict | None, heads: int | None) -> GPT2Config:
    """The model's sizes, as its tensors show them, and its heads. Raises UserError where this is no GPT-2."""
    settings = settings or {}
    for name, default, values in REQUIRED:
        if settings.get(name, default) not in values:
            raise UserError(f"{source}: {name} is {settings[name]} in its config.json; llm.c's GPT-2 has {values[0]}")
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    if len(shapes.get("wte.weight", ())) != 2 or len(shapes.get("wpe.weight", ())) != 2:
        raise UserError(f"{source}: no GPT-2 (it lacks the embeddings wte.weight and wpe.weight)")
    vocab_size, channels = shapes["wte.weight"]
    num_layers = 1 + max((int(name.split(".")[1]) for name in shapes if re.match(r"h\.\d+\.", name)), default=-1)
    num_heads = heads or settings.get("n_head") or max(1, channels // 64)
    padded_vocab_size = -(-vocab_size // 128) * 128
    config = GPT2Config(shapes["wpe.weight"][0], vocab_size, padded_vocab_size, num_layers, num_heads, channels)
    config.check(str(source))
    return config


def read_parameters(source: Path, tensors: dict[str, object], config: GPT2Config) -> np.ndarray:
    """All parameters, fp32 (num_parameters,) in the order of the model file; the padding of the vocabulary is 0.

    Raises UserError where a tensor is missing, of another shape, or one that GPT-2 does not have.
    """
    params = np.zeros(num_parameters(config), np.float32)
    views = dict(named_tensors(config, params))
    for name, view in views.items():
        shape = tuple(tensors[name].get_shape()) if name in tensors else None
        if shape != view.shape:
            found = f"is {shape}" if shape else "is missing"
            raise UserError(f"{source}: tensor {name} {found}; a GPT-2 of these sizes has it as {view.shape}")
        view[...] = read(tensors[name])
    unknown = tensors.keys() - views.keys() - {"lm_head.weight"}
    if unknown:
        raise UserError(f"{source}: tensor {min(unknown)} is none of GPT-2's")
    if "lm_head.weight" in tensors and not np.array_equal(read(tensors["lm_head.weight"]), views["wte.weight"]):
        raise UserError(f"{source}: lm_head.weight is not wte.weight; llm.c's GPT-2 has one tensor for both")
    return params


def read(tensor) -> np.ndarray:
    return tensor[:].to(torch.float32).numpy()


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Turn a GPT-2 of transformers into an llm.c model .bin.")
    parser.add_argument("source", type=Path, help="a directory with config.json and safetensors, or a safetensors file")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", required=True, help="the .bin to write")
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads, where no config.json says it")
    args = parser.parse_args(arguments)
    files, settings = find_files(args.source)
    tensors = open_tensors(files)
    config = read_config(args.source, tensors, settings, args.heads)
    print(
        f"importing {args.source}: {config.num_layers} layers, {config.num_heads} heads, {config.channels} channels, "
        f"{config.vocab_size} tokens, sequences of {config.max_seq_len}; {num_parameters(config):,} parameters",
        flush=True,
    )
    write_model(args.out, config, read_parameters(args.source, tensors, config))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
