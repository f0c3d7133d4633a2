"""Files that are damaged, made up or hostile: taken, or refused in one line, soon, and in memory in proportion.

Each file is cut off, changed, emptied, nested deeply, and replaced by a pipe. In a JSON file each value is replaced by
each of NASTY, with a right checksum, if there is one."""

import copy
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import device
import generate
from conftest import refusal
from dev.debug_state import DebugState, read_debug_state, write_debug_state
from dev.hf import export_hf, import_hf
from dev.hf.common import config_json, end_tokens, families
from dev.scripts import model_kinds
from device.errors import UserError
from kernels.rope import ORIGINAL_LENGTH
from llmc.data.dataloader import DataLoader
from llmc.data.evaluation import EvalLoader
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.hf_tokenizer import byte_letters
from llmc.data.token_file import open_tokens, write_tokens
from llmc.data.tokenizer import byte_tokenizer
from llmc.files.checkpoint import load_checkpoint, model_path
from llmc.files.checkpoint_dir import newest_checkpoint, read_record
from llmc.files.files import make_header
from llmc.files.model_file import read_model, read_model_header, write_model
from llmc.model.tensors import Config, num_parameters, padded
from llmc.ranks.launcher import SIGNALS
from llmc.run import program
from llmc.run.logger import Logger, read_log
from llmc.run.trainer import run_trainer
from models import write_record
from support.evaluations import write_evaluation
from support.folders import write_data
from train_gpt2_fp32 import GPT2, GPT2Config, train

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

MEMORY, SECONDS = 1 << 30, 20  # for a file of a few kilobytes; most take a fifth of a second
WORDS = [struct.pack("<i", n) for n in (0, -1, 1, 2**31 - 1, -(2**31), 65536, 20240326, 20240520)]
WORDS += [struct.pack("<f", x) for x in (float("nan"), float("inf"), -1.0)] + [b"null", b"1e999", b"[[[[", b'"\\ud800"']
REMOVED = object()
NASTY = [
    REMOVED, None, True, False, 0, -1, 1, 7, 2**31, 2**32, 2_000_001, 2**63, 2**64, 10**400, -(2**63), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "0", "-1", "auto", "../x", "/dev/zero", "a\0b", "\ud800", "\x1b[31mred\nnext",
    "9" * 5000, [], {}, [[]], [1, None], {"a": -1}, {"": {"": []}},
]  # fmt: skip
FEW = 8  # nasty values of each kind in an ordinary run of the tests
MOST = 4  # elements of a list or an object that are replaced; a vocabulary has many that are alike


# The files


def smallest(config: type[Config]) -> Config:
    """A model of a few kilobytes: its first preset with one layer and one head of a few channels."""
    preset = config.described(next(iter(config.PRESETS)))
    sizes = {field.name: 1 for field in fields(config) if field.type is int}
    sizes |= {name: 8 for name in ("channels", "head_size") if name in sizes}
    return replace(preset, **sizes | {"vocab_size": 7, "max_seq_len": 5})


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """A folder that is the current one, with a file of each kind: the data and the checkpoints of a run, tokenizers,
    models of each kind, also as transformers saves them, in two files with an index, and more."""
    folder, before, rng = tmp_path_factory.mktemp("files"), os.getcwd(), np.random.default_rng(0)
    os.chdir(folder)
    device.use("cpu")
    write_data(folder, rng)
    Path("tokenizer.json").write_text(json.dumps(tokenizer_json()))
    Path("tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>", "special": True}}))
    Path("generation_config.json").write_text(json.dumps({"bos_token_id": 257, "eos_token_id": [257, 3]}))
    model = "-e", "layers=1,heads=1,channels=8,maxT=16"
    train_gpt2(*model, "-i", "data", "-b", "2", "-t", "16", "-x", "2", "--best", "-o", "run.log")
    shutil.copytree("run/best", "best")
    for config in CONFIGS:
        write_model(f"{config.NAME}.bin", config, rng.standard_normal(num_parameters(config), np.float32))
        if config.BF16_VERSION:
            options = {} if type(config) is GPT2Config else {"tied": False, "original_length": ORIGINAL_LENGTH}
            llm_cs = replace(config, **options)
            flat = rng.standard_normal(num_parameters(llm_cs), np.float32)
            write_model(f"{config.NAME} in bf16.bin", llm_cs, flat, bf16=True)
    x, grads = rng.integers(0, 7, (1, 3)).astype(np.int32), np.zeros(num_parameters(TINY_GPT2), np.float32)
    write_debug_state("debug_state.bin", DebugState(x, x, np.zeros((1, 3, 7), np.float32), 1.5, grads))
    write_tokens("wide.bin", rng.integers(0, 100, 40), 70_000)
    np.save("tokens.npy", rng.integers(0, 100, 40))
    write_evaluation(Path("questions.bin"), 2 * [(1, [0, 1, 2], [[0], [0, 1], [0], [0, 1]])])
    Path("prompts.jsonl").write_text('{"prompt": "a"}\r\n\n{"prompt": "\\ud83d\\ude42 ü"}\n', "utf-8")
    for family in families().values():
        save_as_transformers_does(smallest(family.Config), Path(family.TYPE))
    shutil.copytree("llama", "mistral")
    config = json.loads(Path("llama/config.json").read_text())
    Path("mistral/config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": None}))
    yield folder
    os.chdir(before)


def save_as_transformers_does(config: Config, folder: Path) -> None:
    shapes = import_hf.shapes_of(config)
    names = sorted(shapes)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    folder.mkdir(exist_ok=True)
    for file, part in parts.items():
        save_file({name: np.zeros(shapes[name], np.float32) for name in part}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / import_hf.INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_json(config, 6, 6)))


def tokenizer_json() -> dict:
    """A small byte-level tokenizer that has something in each of its parts."""
    letters = {letter: n for n, letter in enumerate(byte_letters())}
    library = tokenizers.Tokenizer(models.BPE(letters | {"ab": 256}, [("a", "b")]))
    library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    library.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", 257)])
    return json.loads(library.to_str())


# What reads them, and uses all of them


class TooLate(BaseException):
    """No Exception, which what reads a file could take for a fault of the file."""


def refused(work: Callable[[], object]) -> str:
    """The line in which this is refused, which a terminal can be shown; empty if it is taken. Fails if it takes more
    than SECONDS or MEMORY."""

    def too_late(number, frame):
        raise TooLate

    said, line, handler = TextIOWrapper(BytesIO(), "utf-8"), "", signal.signal(signal.SIGALRM, too_late)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            work()
    except UserError as error:
        line = f"error: {error}"
    except SystemExit as end:
        line = end.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
    said.flush()
    assert not {0, 27} & {*said.buffer.getvalue()}
    assert line == "" or line.startswith("error: ") and line.isprintable() and "out of memory" not in line, line
    return line


def train_gpt2(*flags: str) -> None:
    """As train_gpt2_fp32.py does, in this process."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    usual = ["--device", "cpu", "-g", "0", "-m", "1", "--checkpoint-dir", "run"]
    arguments, sys.argv, program.last_checkpoint = sys.argv, ["train_gpt2_fp32.py", *usual, *flags], None
    try:
        run_trainer(train, GPT2)
    finally:
        sys.argv = arguments
        for number, handler in handlers.items():
            signal.signal(number, handler)


def resume(*flags: str) -> None:
    """Goes on from the last checkpoint. What this writes is removed, and the best checkpoint is whole again."""
    try:
        train_gpt2("-y", "1", "-x", "3", *flags)
    finally:
        for written in "run/step_00000003", "run/best":
            shutil.rmtree(written, ignore_errors=True)
        shutil.copytree("best", "run/best")


def read_checkpoint() -> None:
    load_checkpoint(newest_checkpoint("run"), GPT2Config)


def sum_model(path: str, kind: type[Config]) -> None:
    [tensor.sum() for tensor in read_model(model_path(path), kind)[1].values()]


def generated() -> None:
    generate.main("-e run/step_00000002 -g 2 --prompt a --device cpu --precision fp32".split())


def exported() -> None:
    try:
        export_hf.main(["run/step_00000002", "-o", "exported"])
    finally:
        shutil.rmtree("exported", ignore_errors=True)


def imported(kind: str) -> None:
    import_hf.main([kind, "-o", "imported.bin"])


def read_tokens(path: str) -> None:
    open_tokens(path)[:].sum()
    loader, batch = DataLoader(path, "train", 2, 3, 70_000), np.empty((2, 2, 3), np.int32)
    for _ in range(4):
        loader.next_batch(*batch)


def read_tokenizer(path: str) -> None:
    tokenizer = open_tokenizer(path)
    [tokenizer.decode(token) for token in range(tokenizer.vocab_size)]


def read_tokenizer_json() -> None:
    tokenizer = open_tokenizer("tokenizer.json")
    tokenizer.encode("ab x\n")
    tokenizer.encode_ordinary_batch(["ab x\n"])
    tokenizer.text_bytes(300)
    end_tokens(Path("model.bin"))


def read_questions() -> None:
    loader, batch = EvalLoader(Path("questions.bin"), 4, 8, 50), np.empty((2, 4, 8), np.int32)
    for _ in range(min(loader.num_batches, 5)):
        loader.next_batch(*batch)
        loader.count_correct(np.zeros((4, 8), np.float32))


def read_prompts(flag: str) -> None:
    prompts = generate.prompts_of(generate.make_parser().parse_args([flag, "prompts.jsonl"]))
    generate.tokens_of(prompts, byte_tokenizer(), 100, 200)


CONFIGS = [smallest(kind.Config) for kind in model_kinds()]
TINY_GPT2 = smallest(GPT2Config)
MODELS = [(f"{config.NAME}{bf16}.bin", type(config)) for config in CONFIGS for bf16 in
          ("", *[" in bf16"] * bool(config.BF16_VERSION))]  # fmt: skip
# What is tried: the file, and what reads it
JSON_READERS = {
    "state.json, resumed": ("run/step_00000002/state.json", resume),
    "state.json, resumed, of the best": ("run/best/state.json", partial(resume, "--best")),
    "state.json, generate": ("run/step_00000002/state.json", generated),
    "state.json, export": ("run/step_00000002/state.json", exported),
    **{f"config.json, {kind}": (f"{kind}/config.json", partial(imported, kind))
       for kind in sorted({"mistral", *(family.TYPE for family in families().values())})},
    "index.json": (f"llama/{import_hf.INDEX}", partial(imported, "llama")),
    "tokenizer.json": ("tokenizer.json", read_tokenizer_json),
    "tokenizer_config.json": ("tokenizer_config.json", read_tokenizer_json),
    "generation_config.json": ("generation_config.json", read_tokenizer_json),
}  # fmt: skip
READERS = JSON_READERS | {
    **{path: (path, partial(sum_model, path, kind)) for path, kind in MODELS},
    **{name: (f"run/step_00000002/{name}", read_checkpoint)
       for name in ("model.bin", "optimizer.bin", "model_tokenizer.bin", "state.json")},
    **{f"{name}, read": (f"run/step_00000002/{name}", partial(sum_model, "run", GPT2Config))
       for name in ("model.bin", "model_tokenizer.bin", "state.json")},
    "debug state": ("debug_state.bin", lambda: read_debug_state("debug_state.bin", TINY_GPT2).grads.sum()),
    **{path: (path, partial(read_tokens, path)) for path in ("data_train.bin", "wide.bin", "tokens.npy")},
    "tokenizer": ("data_tokenizer.bin", partial(read_tokenizer, "data_tokenizer.bin")),
    "hellaswag": ("questions.bin", read_questions),
    "log": ("run.log", partial(read_log, "run.log")),
    "--prompts": ("prompts.jsonl", partial(read_prompts, "--prompts")),
    "--prompt-file": ("prompts.jsonl", partial(read_prompts, "--prompt-file")),
    "safetensors": ("llama/model-00001-of-00002.safetensors", partial(imported, "llama")),
}  # fmt: skip
MAY_BE_MISSING = [name for name, (path, _) in READERS.items() if name == "safetensors" or path == "run/best/state.json"
                  or path.endswith(("config.json", import_hf.INDEX))]  # fmt: skip


@pytest.fixture(params=READERS)
def reader(request, place) -> Iterator[tuple[Path, bytes, Callable]]:
    """The file, its contents, and what reads it. The file is there again afterwards."""
    path, read = Path(READERS[request.param][0]), READERS[request.param][1]
    before = path.read_bytes()
    yield path, before, read
    path.unlink()
    path.write_bytes(before)


# Damaged files


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut off, with another bit, with another word or some more, or with its parts swapped; one to three times."""
    for _ in range(rng.randint(1, 3)):
        at, word = rng.randint(0, len(data)), rng.choice(WORDS)
        even = at // 4 * 4  # headers are made of words of four bytes
        other_bit = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1])
        data = rng.choice([
            data[:at], data[:at] + other_bit + data[at + 1 :], data[:even] + word + data[even + len(word) :],
            data[:at] + word * rng.randint(1, 8) + data[at:], data[at:] + data[:at],
        ])  # fmt: skip
    return data


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of what a damaged file holds
def test_a_damaged_file_is_taken_or_refused_in_one_line(reader):
    path, data, read = reader
    rng = random.Random(str(path))
    for n in range(40):
        head = data[:64] if n % 2 else data  # most of what can be wrong stands at the beginning
        path.write_bytes(damaged(head, rng) + data[len(head) :])
        refused(read)


def test_a_whole_file_is_taken_and_an_empty_or_deeply_nested_one_or_a_pipe_is_refused(reader, request):
    path, data, read = reader
    name = request.node.callspec.params["reader"]
    assert refused(read) == ""
    for other in b"", b"[" * 100_000, b'{"a":' * 100_000:
        path.write_bytes(other)
        assert refused(read) or name == "log"  # whose last line may not be finished
    path.unlink()
    os.mkfifo(path)  # perhaps nobody ever writes to it
    assert "not a regular file" in refused(read) or name in MAY_BE_MISSING


def test_a_pipe_that_nobody_reads_takes_no_log_and_a_device_is_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: cannot be written" in refused(partial(Logger, tmp_path / "pipe"))
    assert "not a regular file" in refused(partial(read_log, "/dev/zero"))


# Hostile files


def values(content: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all values in a JSON file, itself first."""
    yield path
    inner = content if isinstance(content, dict) else dict(enumerate(content)) if isinstance(content, list) else {}
    for key, value in list(inner.items())[: None if len(inner) < 50 else MOST]:
        yield from values(value, (*path, key))


def with_value(content: object, path: tuple, value: object) -> object:
    """A copy of a JSON file's content with another value in this place."""
    if not path:
        return {} if value is REMOVED else value
    changed, (key, *rest) = copy.copy(content), path
    if value is REMOVED and not rest:
        del changed[key]
    else:
        changed[key] = with_value(content[key], rest, value)
    return changed


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("reader", JSON_READERS, indirect=True)
def test_hostile_values_are_taken_or_refused_in_one_line(reader, few):
    path, data, read = reader
    content = json.loads(data)
    cases = [(at, value) for at in values(content) for value in NASTY if at != ("crc32",)]
    for at, value in random.Random(49).sample(cases, FEW) if few else cases:
        changed = with_value(content, at, value)
        if path.name == "state.json" and isinstance(changed, dict):
            write_record(path.parent, {name: each for name, each in changed.items() if name != "crc32"})
        else:
            path.write_text(json.dumps(changed))
        try:
            refused(read)
        except BaseException as error:
            shown = "nothing" if value is REMOVED else repr(value)[:80]
            raise AssertionError(f"{path}: {'.'.join(map(str, at))} is {shown}") from error


def test_more_files_and_layers_than_anybody_can_count_are_refused_at_once(tmp_path):
    file = tmp_path / "model-00001-of-9999999999.safetensors"
    save_file({"wte.weight": np.zeros((7, 8), np.float32)}, file)
    assert "model-0000000001-of-9999999999.safetensors is missing" in refusal(import_hf.find_files, tmp_path)
    file.rename(tmp_path / "model-a-of-b.safetensors")
    assert "no model.safetensors there" in refusal(import_hf.find_files, tmp_path)
    tensors = {"wte.weight": (7, 64), "wpe.weight": (5, 64), "h.1999999.ln_1.weight": (64,)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    assert "2,000,000 layers of " in refusal(import_hf.main, [str(tmp_path), "-o", str(tmp_path / "out.bin")])


def test_an_index_and_a_checkpoint_name_files_beside_them_alone(place, tmp_path):
    for name in "../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", "m\n.safetensors":
        (tmp_path / import_hf.INDEX).write_text(json.dumps({"weight_map": {"wte.weight": name}}))
        assert "is no name of a safetensors file beside it" in refusal(import_hf.find_files, tmp_path)
    record = read_record(Path("run/step_00000002"))
    shutil.copytree("run/step_00000002", tmp_path / "step_00000002")
    for name in "../best/model.bin", "/etc/passwd", "..", "":
        files = record["files"] | {name: {"bytes": 1, "crc32": 1}}
        write_record(tmp_path / "step_00000002", record | {"files": files})
        assert "lists a file named" in refusal(newest_checkpoint, tmp_path)


def test_a_header_that_asks_for_terabytes_is_refused_at_once(tmp_path):
    for sizes in (2**31 - 1, 2**31 - 1, 2**31 - 1, 1, 2**31 - 1), (1024, 50257, 10**6, 16, 2**20):
        header = make_header(20240326, 3, *sizes, padded(sizes[1]) % 2**31)
        (tmp_path / "model.bin").write_bytes(header.tobytes())
        refusal(read_model_header, tmp_path / "model.bin", GPT2Config)


def test_steps_beyond_32_bits_are_refused(place):
    assert refused(partial(train_gpt2, "-y", "1", "-x", str(2**32)))


def test_what_files_say_is_printed_in_one_line_that_no_terminal_obeys():
    assert str(UserError("a\nb\x1b[2J\x85\u2028\udc80\u202e é 你")) == r"a\nb\x1b[2J\x85\u2028\udc80\u202e é 你"
