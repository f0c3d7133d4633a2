"""Turns a model of Hugging Face's transformers, of a kind that a script here trains, into a model `.bin`.

    python dev/hf/import_hf.py HuggingFaceTB/SmolLM2-135M -o model.bin    # by its name at Hugging Face
    python dev/hf/import_hf.py DIR -o model.bin                  # a directory of save_pretrained or a download, with
                                                                 # config.json and safetensors
    python dev/hf/import_hf.py model.safetensors -o model.bin    # such a file, with what lies beside it; for GPT-2 a
                                                                 # safetensors file alone is enough

A name is one where no such file or directory is here. The package huggingface_hub fetches the files that the import
reads, with the token of `hf auth login`, into its own cache. A model that lies there already needs no connection.

A Mistral whose attention has no sliding window is imported as the Llama that it is.

Weights of 16 or 64 bits become fp32. They go into the new file one tensor at a time, so a model may be larger than the
memory. A tokenizer.json goes along: as model_tokenizer.json beside the model, and as model_tokenizer.bin, which shows
text without the tokenizers library. transformers makes one of vocab.json with merges.txt, or of tokenizer.model. The
files that an export gives back go along, too, such as generation_config.json, which names the tokens that end a text,
and the chat template. Files of the model that was there before are removed.

A process that may take 4 GiB of memory and a minute tries the tokenizer first. If it fails there, it is left out.
Nothing bounds what a tokenizer takes later, for example for a prompt of generate.py.

All but the number of heads of a GPT-2 can be seen in the tensors themselves. Where no config.json says it, --heads
does; without either the import takes heads to be 64 channels wide, as in all four of GPT-2's sizes, and says so.
"""

import errno
import math
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # run as a program: look in the repository, not in dev/hf/, whose modules could hide others
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from dev.foreign import try_tokenizer
from dev.hf.common import SAVE_AGAIN, config_json, families, named_tensors, read_json, take_tokenizer_along
from dev.hf.family import COMMON, Family, Settings
from dev.scripts import kind_of_magic
from device.errors import UserError, escaped, first_line
from llmc.data.hf_tokenizer import NEIGHBOURS, OLDER
from llmc.files.files import check_no_pointer, first_word
from llmc.files.model_file import new_model
from llmc.model.tensors import Config, layout, num_parameters
from llmc.run.arguments import Parser, a_name, a_path, positive
from llmc.run.program import run_program

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

WITHOUT_CONFIG = "gpt2"  # the model_type whose tensors say all but the heads
PRECISIONS = ("F32", "F16", "BF16", "F64")
CLASSIFIERS = re.compile(r"(.*\.)?((score|classifier|qa_outputs|multiple_choice_head)\..*)")  # the heads of classifiers
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors", re.ASCII)
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.safetensors)", re.ASCII)  # of a model at Hugging Face
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)  # what a disk says
BUFFERS = re.compile(r".*\.(attn|attention)\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")  # no weights, in old files
WRAPPED = re.compile(r"^(module\.|_orig_mod\.)+")  # what DistributedDataParallel and torch.compile put before a name
LITTLE = 1 << 20  # parameters
ADAPTER = "adapter_config.json"
TEMPLATES = "additional_chat_templates"  # a folder
HEAD = "lm_head.weight"
BELOW = ("*", "snapshots/*", "*/snapshots/*")  # where a model lies in a Trainer's output and in the hub's cache

MERGE = (
    "{}: an adapter (LoRA), not a model: merge it into its model with peft's merge_and_unload, save that with "
    "save_pretrained and import it"
)


def refuse_what_is_no_model(source: Path) -> None:
    """Raises UserError for the pointer to a file in place of the file, and for the folder of an adapter."""
    files = [source, source.with_name("config.json")]
    if source.is_dir():
        files = [*(source / name for name in (INDEX, "tokenizer.json", *NEIGHBOURS)), *source.glob("*.safetensors")]
    for path in files:
        if source.exists() and path.is_file():
            check_no_pointer(path)
    if (source / ADAPTER).is_file():
        raise UserError(MERGE.format(source))


def find_files(source: Path) -> list[Path]:
    """The safetensors files of a model given as such a file or a directory. Raises UserError where one is missing, and
    names the directories below that have some."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{source}: no such file or directory")
    whole, index = source / WHOLE, source / INDEX
    shards = sorted(path for path in source.glob("model-*.safetensors") if SHARD.fullmatch(path.name))
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = indexed_files(index)
    elif shards:
        count = shards[0].stem.rpartition("-")[2]
        names = (f"model-{n:0{len(count)}}-of-{count}.safetensors" for n in range(1, int(count) + 1))
    else:
        below = {path.parent for place in BELOW for path in source.glob(f"{place}/*.safetensors")}
        if below:
            first, *others = sorted(below, key=lambda place: place.stat().st_mtime, reverse=True)
            name = f"the newest of {len(below)} is {first}" if others else f"it is in {first}"
            raise UserError(f"{source}: no {WHOLE} there; {name}: name that directory")
        raise UserError(f"{source}: no {WHOLE} there; save the model with save_pretrained")
    found = []
    for name in names:  # there may be more of them than anybody can count
        if not (source / name).is_file():
            raise UserError(f"{source / name} is missing, and it holds a part of the model; fetch it, or {SAVE_AGAIN}")
        found.append(source / name)
    return found


def indexed_files(index: Path) -> list[str]:
    """The names of the safetensors files that an index lists. Raises UserError where it lists none."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: it has no weight_map, which says which file holds which tensor; {SAVE_AGAIN}")
    for name in names.values():
        if not re.fullmatch(r"[\w.-]{1,240}\.safetensors", name, re.ASCII):
            raise UserError(f"{index}: {name[:80]!r} is no name of a safetensors file beside it; {SAVE_AGAIN}")
    return sorted(set(names.values()))


class RareBar(tqdm):
    """A progress bar for a file, which grows every few seconds. Those of huggingface_hub are for terminals only."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings | {"mininterval": 5, "ascii": True, "leave": False})


def fetch(name: str, files: list[str], commit: str | None = None, bar: type[tqdm] | None = None) -> Path:
    """The directory of huggingface_hub's cache that has a model's files, after it has fetched those of the given names
    that the model has. The directory is named after its commit; commit: the one to take, the newest if none is given.
    bar: for the progress, huggingface_hub's own if none is given.

    Raises UserError for all that keeps huggingface_hub from it.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise UserError(
            f"{name}: no such file or directory; to fetch a model of that name: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, revision=commit, allow_patterns=files, tqdm_class=bar))
    except errors.HFValidationError:
        why = "no such file or directory, and no name of a model at Hugging Face"
    except errors.GatedRepoError:
        why = f"gated: ask for access at {constants.ENDPOINT}/{name}, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = (
            "no such file or directory, and no such model at Hugging Face: check the name, or if the model is private, "
            "log in with `hf auth login` or set HF_TOKEN"
        )
    except errors.LocalEntryNotFoundError as error:
        why = (
            "no such file or directory, and the model can be neither found in huggingface_hub's cache, "
            f"{constants.HF_HUB_CACHE}, nor fetched ({first_line(error.__cause__ or error)}): connect, or fetch it "
            "elsewhere and name its directory"
        )
    except Exception as error:  # whatever the libraries beneath raise: of HTTP, of files, of Xet
        reason = (getattr(error, "strerror", None) or first_line(error)).lower()
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            why = f"not for this token ({reason}): log in again with `hf auth login`, or set HF_TOKEN"
        elif getattr(error, "errno", None) in UNWRITABLE or "os error 28" in str(error):
            why = (
                f"huggingface_hub's cache, {constants.HF_HUB_CACHE}, cannot be written ({reason}): make room there, or "
                "set HF_HOME to another directory"
            )
        else:
            why = f"cannot be fetched ({reason}): try again, or fetch it elsewhere and name its directory"
    raise UserError(f"{name}: {why}")


def fetch_weights(name: str, folder: Path) -> None:
    """Fetches a model's weights into the directory of huggingface_hub's cache that has its other files, unless they are
    there: some versions of huggingface_hub ask the server about a commit even where nothing is to be fetched. Raises
    UserError where the model has none, and as `fetch` does."""
    files = indexed_files(folder / INDEX) if (folder / INDEX).is_file() else [WHOLE]
    if all((folder / file).is_file() for file in files):
        return
    print(f"fetching {name}: {files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""), flush=True)
    fetch(name, files, folder.name, None if sys.stderr.isatty() else RareBar)
    for file in files:
        if not (folder / file).is_file():
            raise UserError(
                f"{name}: its {file} was not found; if the model has weights of another format alone, load it with "
                "transformers, save it with save_pretrained and name that directory"
            )


def open_tensors(files: list[Path], family: type[Family]) -> dict[str, object]:
    """The tensors in safetensors files, not yet read, by name; one that was saved without its head lacks the prefix,
    which is put before it. Of tensors that share their numbers a file may have one, and say so.

    Raises UserError where a file is damaged or of another kind.
    """
    tensors, shared = {}, {}
    prefix, whole = family.PREFIX, {HEAD, *(name for names in family.NAMES.values() for name in names)}

    def full(name: str) -> str:
        name = WRAPPED.sub("", name)
        return name if name.startswith(prefix) or name in whole else prefix + name

    for path in files:
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:  # the last is torch's, if the system refuses
            raise UserError(f"{path}: not a whole safetensors file, or not to be read ({first_line(error)})") from None
        for name in file.keys():
            if ".lora_" in name:
                raise UserError(MERGE.format(path))
            if full(name) in tensors:
                raise UserError(f"{path}: tensor {full(name)} is there twice; {SAVE_AGAIN}")
            if not BUFFERS.fullmatch(name):
                tensors[full(name)] = file.get_slice(name)
        shared |= {full(name): full(kept) for name, kept in (file.metadata() or {}).items()}
    return {name: tensors[kept] for name, kept in shared.items() if name in whole and kept in tensors} | tensors


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of transformers' tensors for a model of these sizes."""
    starts, _ = layout(config.parameters(), config.sizes(), align=1)
    hollow = {name: np.broadcast_to(np.float32(0), shape) for name, (_, shape) in starts.items()}  # without memory
    return {name: shape for name, _, shape in named_tensors(config, hollow)}


def check_tensors(source: str, config: Config, tensors: dict[str, object]) -> None:
    """Raises UserError where a tensor is missing, of another shape or kind, or one that the model does not have."""
    head = next(filter(None, map(CLASSIFIERS.fullmatch, sorted(tensors))), None)
    if head:
        kind = config_json(config)["architectures"][0]
        raise UserError(f"{source}: tensor {head[2]} is the head of a classifier; a language model, {kind}, is needed")
    asked, there = num_parameters(config), sum(math.prod(tensor.get_shape()) for tensor in tensors.values())
    if config.num_layers > len(tensors) or asked > 8 * there + LITTLE:  # to name them all would take long
        raise UserError(
            f"{source}: {config.num_layers:,} layers of {asked:,} parameters, and in its files are {len(tensors):,} "
            f"tensors of {there:,} numbers; {SAVE_AGAIN}"
        )
    wanted = shapes_of(config)
    for name, shape in wanted.items():
        found = tuple(tensors[name].get_shape()) if name in tensors else None
        if found != shape:
            found = f"is {found}" if found is not None else "is missing"
            raise UserError(f"{source}: tensor {name} {found}; a {config.NAME} of these sizes has it as {shape}")
        if tensors[name].get_dtype() not in PRECISIONS:
            kind = tensors[name].get_dtype()
            raise UserError(f"{source}: tensor {name} is of type {kind}; {', '.join(PRECISIONS)} are supported")
    unknown = tensors.keys() - wanted.keys() - {HEAD}
    if unknown:
        raise UserError(f"{source}: tensor {min(unknown)} is none of {config.NAME}'s")
    if HEAD in tensors.keys() - wanted.keys():
        name = next(iter(wanted))
        if tensors[HEAD] is not tensors[name] and not np.array_equal(read(tensors[HEAD]), read(tensors[name])):
            raise UserError(f"{source}: {HEAD} is not {name}; a tied {config.NAME} has one tensor for both")


def read(tensor) -> np.ndarray:
    return tensor[:].to(torch.float32).numpy()


def write_model(path: Path, config: Config, tensors: dict[str, object]) -> list[str]:
    """Writes the model, a tensor at a time. Returns the names of tensors that have NaN or infinity in fp32."""
    done, total, shown, nonfinite = 0, num_parameters(config), time.monotonic(), []
    with new_model(path, config) as ours:
        for name, view, _ in named_tensors(config, ours):
            values = read(tensors[name])
            nonfinite += [] if np.isfinite(values).all() else [name]
            view[...] = values.reshape(view.shape)
            done += view.size
            if time.monotonic() - shown > 3:
                shown = time.monotonic()
                print(f"{100 * done // total}% of {total:,} parameters", flush=True)
    return nonfinite


def files_of(place: Path) -> set[str]:
    """The names of the files that an import may write beside the model."""
    names = {name for name in ("tokenizer.json", *NEIGHBOURS) if (place / name).is_file()}
    with_tokenizer = "tokenizer.json" in names or any((place / name).is_file() for name in OLDER)
    return names | ({"tokenizer.json", "tokenizer.bin"} if with_tokenizer else set())


def files_beside(model: Path) -> set[Path]:
    """The files that are there and would be taken for the model's tokenizer, or for what belongs to it."""
    places = (model.with_name(f"{model.stem}_{name}") for name in ("tokenizer.json", "tokenizer.bin", *NEIGHBOURS))
    return {path for path in places if path.is_file()}


def import_tokenizer(place: Path, model: Path, vocab_size: int) -> set[Path]:
    """Writes the tokenizer of a model's directory beside the model, and what belongs to it. transformers makes a
    tokenizer.json of OLDER files. Returns the files that it wrote. Says in a line what it leaves out."""
    if (place / TEMPLATES).is_dir():
        names = ", ".join(sorted(path.name for path in (place / TEMPLATES).iterdir()))
        print(escaped(f"{place / TEMPLATES}: left out, an export will not have them: {names}"), file=sys.stderr)
    found = place / "tokenizer.json"
    older = [name for name in OLDER if (place / name).is_file()]
    if not found.is_file() and not older:
        print(f"no tokenizer is in {place}: the model is imported without one")
    if found.is_file() or not older:
        return take_tokenizer_along(found, model, vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / found.name
        for name in NEIGHBOURS:
            if (place / name).is_file():
                shutil.copy(place / name, folder)
        try:
            try_tokenizer(place, made)
            print(f"{place}: transformers has made a tokenizer.json of {' and '.join(older)}")
        except UserError as error:
            print(f"no tokenizer: {error}", file=sys.stderr)
        return take_tokenizer_along(made, model, vocab_size)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Turn a model of transformers into a model .bin.")
    what = "a directory with config.json and safetensors, such a file, or a model's name at Hugging Face"
    parser.add_argument("source", type=a_name, metavar="DIR|FILE|NAME", help=what)
    parser.add_argument("-o", "--out", type=a_path, metavar="FILE", required=True, help="the .bin to write")
    parser.add_argument("--heads", type=positive, metavar="N", help="GPT-2's heads, where no config.json says it")
    args = parser.parse_args(arguments)
    if os.path.lexists(args.out) and not kind_of_magic(first_word(args.out)):
        raise UserError(f"{args.out}: exists and is not a model: name another file with -o, or remove it")
    if not args.out.parent.is_dir():
        raise UserError(f"{args.out}: {args.out.parent} is not a directory: make it, or name another file with -o")
    place, named = Path(args.source), not os.path.lexists(args.source) and NAME.fullmatch(args.source)
    if named:
        print(f"fetching {args.source} from Hugging Face", flush=True)
        files = [INDEX, ADAPTER, "tokenizer.json", *NEIGHBOURS]  # config.json is a neighbour
        place = fetch(args.source, [*files, *OLDER, f"{TEMPLATES}/*"])
    refuse_what_is_no_model(place)
    folder = place.parent if place.is_file() else place  # of config.json and the tokenizer
    path = folder / "config.json"
    settings = read_json(path) if path.is_file() else {}
    model_type, known = settings.get("model_type", WITHOUT_CONFIG), families()
    if not isinstance(model_type, str) or model_type not in known:
        *others, last = known
        Settings(args.source, settings).refuse("model_type", model_type, f"{', '.join(others)} or {last}")
    if args.heads and model_type != WITHOUT_CONFIG:
        raise UserError("--heads is for a GPT-2 without config.json: leave it out")
    family = known[model_type]
    Settings(args.source, settings).check(COMMON + family.REQUIRED + family.ALSO.get(model_type, ()))
    if named:
        if model_type != WITHOUT_CONFIG:  # its config.json alone says whether it can be imported
            family.read_config(Settings(args.source, settings)).check(args.source)
        fetch_weights(args.source, place)
    tensors = open_tensors(find_files(place), family)
    embedding = family.NAMES["wte"][0]
    if HEAD in tensors and settings.get("tie_word_embeddings", "lm_head" not in family.NAMES):
        tensors.setdefault(embedding, tensors[HEAD])
    shapes = {name: tensor.get_shape() for name, tensor in tensors.items()}
    config = family.read_config(Settings(args.source, settings, shapes, args.heads))
    config.check(args.source)
    check_tensors(args.source, config, tensors)
    coming = {args.out.with_name(f"{args.out.stem}_{name}") for name in files_of(folder)}
    if (others := files_beside(args.out) - coming) and not os.path.lexists(args.out):
        raise UserError(
            f"{min(others)} would be taken for a file of {args.out}: remove it, or name another file with -o"
        )
    rows = "; ".join(f"{name} {value}" for name, value in config.rows())
    print(
        f"importing {args.source}: {config.NAME}, {rows}; {config.vocab_size} tokens, sequences of "
        f"{config.max_seq_len}; {num_parameters(config):,} parameters",
        flush=True,
    )
    if model_type == WITHOUT_CONFIG and args.heads is None and settings.get("n_head") is None:
        print(
            f"{args.source}: no config.json says how many heads the model has; {config.num_heads} of "
            f"{config.head_size} channels each is a guess, and --heads names another number",
            file=sys.stderr,
        )
    nonfinite = write_model(args.out, config, tensors)
    print(f"wrote {args.out}")
    if nonfinite:
        others = f" and in {len(nonfinite) - 1} other tensors" if nonfinite[1:] else ""
        print(f"{args.source}: weights are not finite (NaN or infinity) in {nonfinite[0]}{others}", file=sys.stderr)
    written = import_tokenizer(folder, args.out, config.vocab_size)
    for path in files_beside(args.out) - written:  # of the model that was there
        path.unlink()
        print(f"removed {path}, a file of the model that {args.out} was before")


if __name__ == "__main__":
    run_program(main)
