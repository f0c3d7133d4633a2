"""Turns an llm.c model into a directory that Hugging Face's transformers loads, or into another llm.c model.

    python dev/hf/export_hf.py model.bin -o my_gpt2
    python -c "from transformers import GPT2LMHeadModel; GPT2LMHeadModel.from_pretrained('my_gpt2')"

Writes config.json, the weights as safetensors, in files of up to 4 GB, and where it is given, or found beside the model
or the data that it was trained on, the tokenizer. The logits are the same, to rounding, for a model that was trained
with softmax or flash attention; transformers has no ReLU attention. A text ends with the tokens that end one in the
data, too: they are added to eos_token_id. Of a checkpoint -o must say where the export goes.

    python dev/hf/export_hf.py model.bin -o my_gpt2 --dtype bf16         # weights rounded to bf16, in half the bytes
    python dev/hf/export_hf.py model.bin -o gpt2_bf16.bin --dtype bf16   # the same as llm.c's file, version 5
"""

import io
import json
import os
import shutil
import sys
from pathlib import Path

if not __package__:  # run as a program: look in the repository, not in dev/hf/, whose modules could hide others
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from dev.foreign import try_tokenizer
from dev.hf.common import config_json, named_tensors, read_json, take_tokenizer_along
from dev.scripts import NEEDED, find_model, kind_of
from device.errors import UserError
from llmc.data.find_tokenizer import model_tokenizers, named_tokenizer, open_tokenizer, tokenizer_files
from llmc.data.hf_tokenizer import byte_letters
from llmc.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer
from llmc.files.checkpoint_dir import training_flags
from llmc.files.directory import File
from llmc.files.model_file import in_bf16, read_model, write_model
from llmc.model.tensors import Config, num_parameters
from llmc.run.arguments import Parser, a_path
from llmc.run.program import run_program
from llmc.run.settings import recorded_flags

import numpy as np

FILE_BYTES = 4 * 10**9  # of weights in one file, at most, if no tensor is larger
# A type's name in safetensors and in config.json, and the bytes of a number.
DTYPES = {"fp32": ("F32", "float32", 4), "bf16": ("BF16", "bfloat16", 2)}


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The tokenizer of a `.bin` as the tokenizers library keeps it."""
    try:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as HFTokenizer
    except ImportError as error:
        raise UserError(f"{error.name} is missing: pip install -r requirements-dev.txt") from None

    letters = byte_letters()
    spell = lambda token: "".join(letters[byte] for byte in token)  # noqa: E731
    names = {token: tokenizer.tokens[token].decode(errors="replace") for token in sorted(tokenizer.special)}
    names[tokenizer.eot] = END_OF_TEXT
    ranks = tokenizer.ranks
    pairs = [merged_from(token, ranks) for token in ranks if len(token) > 1]
    merges = [tuple(map(spell, pair)) for pair in pairs if all(part in ranks for part in pair)]
    vocab = {spell(token): rank for token, rank in ranks.items()} | {name: token for token, name in names.items()}
    theirs = HFTokenizer(models.BPE(vocab, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GPT2_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    if tokenizer.bos != tokenizer.eot:
        begin = names[tokenizer.bos]
        theirs.post_processor = processors.TemplateProcessing([begin, "$A"], special_tokens=[(begin, tokenizer.bos)])
    return theirs.to_str()


def merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens whose merge a token is: what is left when its bytes are merged by all earlier tokens. Of a token
    that no merge leads to, such as the name of a special one, they are not both tokens."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks) + 1) for i in range(len(parts) - 1)]
        i = int(np.argmin(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def find_tokenizer(model: Path, config: Config, given: Path | None) -> tuple[Path | None, Tokenizer | None]:
    """The tokenizer file that is given, or one of the model or of the data that it was trained on, and what it holds: a
    .json, or where there is none a .bin, which is taken to split text as GPT-2 does.

    Raises UserError where the given one is not for a model of these sizes; one that is found is left out then.
    """
    trained = recorded_flags(type(config), training_flags(model), model.parent)
    found, own = model_tokenizers(model, trained), model_tokenizers(model)
    if not given and not found:
        print(f"no tokenizer is written: none is beside {model}; name its file with --tokenizer", file=sys.stderr)
    for path in [given] if given else [path for path in found if path.suffix == ".json"] or found:
        try:
            if given:
                try_tokenizer(path)
            tokenizer = open_tokenizer(path)
            encodes = path.suffix == ".json" or tokenizer.ranks
            if encodes and tokenizer.fits(config.vocab_size, own=path in own):
                return path, tokenizer
            raise UserError(
                f"{path} has {tokenizer.vocab_size} tokens and {model} {config.vocab_size}: use the model's own "
                "tokenizer"
            )
        except UserError as error:
            if given:
                raise
            print(f"no tokenizer is written: {error}", file=sys.stderr)
    return None, None


def write_tokenizer(directory: Path, path: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """Writes tokenizer.json, unless it is there, and tokenizer_config.json, unless it is."""
    eos, bos = (tokenizer.tokens[token].decode(errors="replace") for token in (tokenizer.eot, tokenizer.bos))
    if path.suffix != ".json":
        write(directory / "tokenizer.json", tokenizer_json(tokenizer).encode())
        eos, bos = END_OF_TEXT, END_OF_TEXT if bos == eos else bos
    if not (directory / "tokenizer_config.json").exists():  # the token for unknown text never comes; CTranslate2 asks
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": bos, "unk_token": eos}
        special |= {"model_max_length": max_seq_len}
        write(directory / "tokenizer_config.json", json.dumps(special, indent=2).encode())


def with_end(ids: int | list[int] | None, eot: int | None) -> int | list[int] | None:
    """transformers' eos_token_id, one token or a list. The token that ends a text is added if it is not there."""
    known = ids if isinstance(ids, list) else [ids]
    return ids if eot is None or eot in known else eot if ids is None else [*known, eot]


def write_weights(directory: Path, tensors: list[tuple[str, np.ndarray, tuple]], dtype: str) -> None:
    """Writes tensors (name, values, shape), fp32, as model.safetensors, or as several files and the index of what is
    where; with dtype "bf16" rounded to that."""
    files, size, itemsize = [[]], 0, DTYPES[dtype][2]
    for tensor in tensors:
        nbytes = itemsize * tensor[1].size
        if files[-1] and size + nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += nbytes
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for name, content in zip(names, files, strict=True):
        write_safetensors(directory / name, content, dtype)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": itemsize * sum(values.size for _, values, _ in tensors)},
            "weight_map": {key: name for name, file in zip(names, files, strict=True) for key, _, _ in file},
        }
        write(directory / "model.safetensors.index.json", json.dumps(index, indent=2).encode())


def write_safetensors(path: Path, tensors: list[tuple[str, np.ndarray, tuple]], dtype: str) -> None:
    """Writes fp32 tensors as a safetensors file, one at a time: the library would first copy all of them.

    The file is the length of its header, 8 bytes; the header, JSON that says where each tensor lies after it; and the
    tensors.
    """
    header, end, (theirs, _, itemsize) = {"__metadata__": {"format": "pt"}}, 0, DTYPES[dtype]
    for name, values, shape in tensors:
        start, end = end, end + itemsize * values.size
        header[name] = {"dtype": theirs, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with io.BufferedWriter(File(path, "wb")) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values, _ in tensors:
            whole = [np.ascontiguousarray(values, "<f4")]
            for piece in in_bf16(whole) if dtype == "bf16" else whole:
                file.write(piece)


def write(path: Path, content: bytes) -> None:
    """Writes a file. Path.write_bytes would end with an error if a signal came while it is closed."""
    with io.BufferedWriter(File(path, "wb")) as file:
        file.write(content)


def export(path: Path, out: Path, given: Path | None, dtype: str = "fp32") -> None:
    """Writes the directory `out`, or the file of that name where it ends in .bin; it appears whole or not at all.
    given: the tokenizer's file, where one is. dtype: of the weights.

    Raises UserError where the model cannot be read, transformers or llm.c has none like it, the tokenizer is another
    model's, or `out` cannot be written or holds something already.
    """
    config, params = read_model(path, kind_of(path).Config, NEEDED)
    tokenizer_path, tokenizer = find_tokenizer(path, config, given)
    eot = tokenizer.eot if tokenizer else {50257: 50256, 257: 256}.get(config.vocab_size)
    as_file = out.suffix == ".bin"
    source = tokenizer_path or path.with_name(f"{path.stem}_tokenizer.json")  # or only what lies beside that
    along = [*tokenizer_files(source, f"{out.stem}_"), f"{out.stem}_tokenizer.bin"] if as_file else []
    for place in (out, *(out.with_name(name) for name in along)):
        if os.path.lexists(place) and (as_file or not place.is_dir() or any(place.iterdir())):
            raise UserError(f"{place} exists already: remove it, or name another with -o")
    if as_file:
        print(f"writing {path} in {dtype}: {num_parameters(config):,} parameters", flush=True)
        write_model(out, config, params, bf16=dtype == "bf16")
        print(f"wrote {out}")
        take_tokenizer_along(source, out, config.vocab_size)
        return
    content = config_json(config, eot, tokenizer.bos if tokenizer else eot, DTYPES[dtype][1])
    given = source.with_name(source.name.removesuffix(f"tokenizer{source.suffix}") + "config.json")
    given = read_json(given) if given.is_file() else {}
    content |= {name: given[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in given}
    content["eos_token_id"] = with_end(content["eos_token_id"], eot)
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    print(f"exporting {path}: {num_parameters(config):,} parameters", flush=True)
    try:
        part.mkdir(parents=True)
        try:
            write_weights(part, list(named_tensors(config, params)), dtype)
            files = tokenizer_files(source, "")
            for name in files.keys() - {"tokenizer.bin", "config.json"} if tokenizer else ["generation_config.json"]:
                if name in files:
                    write(part / name, files[name])
            if (generation := part / "generation_config.json").is_file():
                kept = read_json(generation)
                if (ends := with_end(kept.get("eos_token_id"), eot)) != kept.get("eos_token_id"):
                    write(generation, json.dumps(kept | {"eos_token_id": ends}, indent=2).encode())
            if tokenizer:
                write_tokenizer(part, tokenizer_path, tokenizer, config.max_seq_len)
            write(part / "config.json", json.dumps(content, indent=2).encode())
            os.replace(part, out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({(error.strerror or str(error)).lower()})") from error
    print(f"wrote {out}")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Turn an llm.c model .bin into a directory for transformers, or into another .bin.")
    parser.add_argument("model", type=a_path, help="a .bin, a checkpoint, or a directory of checkpoints")
    parser.add_argument("-o", "--out", type=a_path, metavar="DIR|FILE.bin",
                        help="where to: a directory, or a .bin for llm.c (beside a model, without .bin)")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (%(default)s)")
    parser.add_argument("--tokenizer", type=a_path, metavar="FILE", help="the model's tokenizer: a file or folder")
    args = parser.parse_args(arguments)
    model = find_model(args.model)
    out = args.out or model.with_suffix("")
    if any((above / "state.json").exists() and (above / "model.bin").exists() for above in out.absolute().parents):
        raise UserError(f"{out}: a run may remove this checkpoint with all that is in it: name another place with -o")
    export(model, out, args.tokenizer and named_tokenizer(args.tokenizer), args.dtype)


if __name__ == "__main__":
    run_program(main)
