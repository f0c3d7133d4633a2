"""Files that are valid and hostile: each value of a JSON file that we read is replaced by each of NASTY, and the
checksum, if there is one, is right. The file is taken, or refused in one line."""

import copy
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path

import device
import generate
from conftest import refusal
from dev.hf import export_hf, import_hf
from dev.hf.common import config_json, end_tokens, families
from device.errors import UserError
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.hf_tokenizer import byte_letters
from llmc.files.checkpoint_dir import newest_checkpoint, read_record
from llmc.files.files import make_header
from llmc.files.model_file import read_model_header
from llmc.model.tensors import padded
from llmc.ranks.launcher import SIGNALS
from llmc.run import program
from llmc.run.trainer import run_trainer
from models import write_record
from train_gpt2_fp32 import GPT2, train

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from test_bad_files import smallest
from test_reliability import write_data
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

REMOVED = object()
NASTY = [
    REMOVED, None, True, False, 0, -1, 1, 7, 2**31, 2**32, 2_000_001, 2**63, 2**64, 10**400, -(2**63), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "0", "-1", "auto", "../x", "/dev/zero", "a\0b", "\ud800", "\x1b[31mred\nnext",
    "9" * 5000, [], {}, [[]], [1, None], {"a": -1}, {"": {"": []}},
]  # fmt: skip
SECONDS = 20  # for a case; most take a fifth of one
FEW = 8      # cases of each kind in an ordinary run of the tests
MOST = 4      # elements of a list or an object that are replaced; a vocabulary has many that are alike


class TooLate(BaseException):
    """No Exception, which what reads a file could take for a fault of the file."""


def values(content: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all values in a JSON file, itself first."""
    yield path
    inner = list(content.items()) if isinstance(content, dict) else []
    if isinstance(content, list):
        inner = list(enumerate(content))
    for key, value in inner if len(inner) < 50 else inner[:MOST]:
        yield from values(value, (*path, key))


def with_value(content: object, path: tuple, value: object) -> object:
    """A copy of a JSON file's content with another value in this place."""
    if not path:
        return {} if value is REMOVED else value
    content = copy.deepcopy(content)
    inside = content
    for key in path[:-1]:
        inside = inside[key]
    if value is REMOVED:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return content


def attempt(work: Callable[[], object]) -> bool:
    """Whether this runs to its end. If it is refused, then in one line that a terminal can be shown, and soon."""

    def too_late(number, frame):
        raise TooLate

    said, before = TextIOWrapper(BytesIO(), "utf-8"), signal.signal(signal.SIGALRM, too_late)
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            work()
    except UserError as error:
        refusal = f"error: {error}"
    except SystemExit as end:
        refusal = end.code
    else:
        refusal = None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said.flush()
    assert not {0, 27} & {*said.buffer.getvalue()}
    if refusal is not None:
        assert isinstance(refusal, str) and refusal.startswith("error: ") and refusal.isprintable(), refusal
    return refusal is None


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """A folder that is the current one. It has the data and the checkpoints of a run, a tokenizer, and a model of each
    kind as transformers saves it, in two files with an index."""
    folder, before = tmp_path_factory.mktemp("hostile"), os.getcwd()
    os.chdir(folder)
    device.use("cpu")
    write_data(folder, np.random.default_rng(0))
    Path("tokenizer.json").write_text(json.dumps(tokenizer_json()))
    Path("tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>", "special": True}}))
    Path("generation_config.json").write_text(json.dumps({"bos_token_id": 257, "eos_token_id": [257, 3]}))
    model = "-e", "layers=1,heads=1,channels=8,maxT=16"
    assert trainer(*model, "-i", "data", "-b", "2", "-t", "16", "-x", "2", "--best")
    for family in families().values():
        config = smallest(family.Config)
        shapes = import_hf.shapes_of(config)
        names = sorted(shapes)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        saved = Path(family.TYPE)
        saved.mkdir(exist_ok=True)
        for file, part in parts.items():
            save_file({name: np.zeros(shapes[name], np.float32) for name in part}, saved / file)
        index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, part in parts.items() for n in part}}
        (saved / import_hf.INDEX).write_text(json.dumps(index))
        (saved / "config.json").write_text(json.dumps(config_json(config, 6, 6)))
    yield folder
    os.chdir(before)


def tokenizer_json() -> dict:
    """A small byte-level tokenizer that has something in each of its parts."""
    letters = {letter: n for n, letter in enumerate(byte_letters())}
    library = tokenizers.Tokenizer(models.BPE(letters | {"ab": 256}, [("a", "b")]))
    library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    library.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", 257)])
    return json.loads(library.to_str())


def trainer(*flags: str) -> bool:
    """Whether train_gpt2_fp32.py runs to its end with these flags, in this process."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    usual = ["--device", "cpu", "-g", "0", "-m", "1", "--checkpoint-dir", "run"]
    arguments, sys.argv, program.last_checkpoint = sys.argv, ["train_gpt2_fp32.py", *usual, *flags], None
    try:
        return attempt(lambda: run_trainer(train, GPT2))
    finally:
        sys.argv = arguments
        for number, handler in handlers.items():
            signal.signal(number, handler)


def resume(*flags: str) -> bool:
    """Whether the run goes on from its last checkpoint. What it writes is removed, and BEST is as before."""
    shutil.copytree("run/best", "kept")
    try:
        return trainer("-y", "1", "-x", "3", *flags)
    finally:
        shutil.rmtree("run/step_00000003", ignore_errors=True)
        shutil.rmtree("run/best")
        os.rename("kept", "run/best")


def generated() -> bool:
    flags = ["-e", "run/step_00000002", "-g", "2", "--prompt", "a", "--device", "cpu", "--precision", "fp32"]
    return attempt(lambda: generate.main(flags))


def exported() -> bool:
    try:
        return attempt(lambda: export_hf.main(["run/step_00000002", "-o", "exported"]))
    finally:
        shutil.rmtree("exported", ignore_errors=True)


def imported(kind: str) -> bool:
    return attempt(lambda: import_hf.main([kind, "-o", "imported.bin"]))


def loaded() -> bool:
    def load() -> None:
        tokenizer = open_tokenizer("tokenizer.json")
        tokenizer.encode("ab x\n")
        tokenizer.encode_ordinary_batch(["ab x\n"])
        tokenizer.text_bytes(300)
        end_tokens(Path("model.bin"))

    return attempt(load)


# What is tried: a file, and what reads it.
READERS = {
    "state.json, resumed": ("run/step_00000002/state.json", resume),
    "state.json, resumed, of the best": ("run/best/state.json", lambda: resume("--best")),
    "state.json, generate": ("run/step_00000002/state.json", generated),
    "state.json, export": ("run/step_00000002/state.json", exported),
    **{f"config.json, {kind}": (f"{kind}/config.json", lambda kind=kind: imported(kind))
       for kind in sorted({family.TYPE for family in families().values()})},
    "index.json": (f"llama/{import_hf.INDEX}", lambda: imported("llama")),
    "tokenizer.json": ("tokenizer.json", loaded),
    "tokenizer_config.json": ("tokenizer_config.json", loaded),
    "generation_config.json": ("generation_config.json", loaded),
}  # fmt: skip


@pytest.fixture(params=READERS)
def reader(request, place):
    """The file, its content, and what reads it. The file is there again afterwards."""
    path, read = READERS[request.param]
    path = Path(path)
    before = path.read_bytes()
    yield path, json.loads(before), read
    path.write_bytes(before)


def write(path: Path, content: object) -> None:
    """Writes a JSON file; a record with its right checksum."""
    if path.name == "state.json" and isinstance(content, dict):
        write_record(path.parent, {name: value for name, value in content.items() if name != "crc32"})
    else:
        path.write_text(json.dumps(content))


def cases(content: object) -> list[tuple[tuple, object]]:
    return [(path, value) for path in values(content) for value in NASTY if path != ("crc32",)]


def test_a_whole_file_is_taken(reader):
    path, content, read = reader
    write(path, content)
    assert read()


def try_all(reader, some: list[tuple[tuple, object]]) -> None:
    path, content, read = reader
    for at, value in some:
        write(path, with_value(content, at, value))
        try:
            read()
        except BaseException as error:
            shown = "nothing" if value is REMOVED else repr(value)[:80]
            raise AssertionError(f"{path}: {'.'.join(map(str, at))} is {shown}") from error


def test_some_hostile_values_are_taken_or_refused_in_one_line(reader):
    some = cases(reader[1])
    try_all(reader, random.Random(49).sample(some, FEW))


@pytest.mark.long
def test_all_hostile_values_are_taken_or_refused_in_one_line(reader):
    try_all(reader, cases(reader[1]))


# What is named or numbered beyond all bounds


def test_more_files_and_layers_than_anybody_can_count_are_refused_at_once(place, tmp_path):
    file = tmp_path / "model-00001-of-9999999999.safetensors"
    save_file({"wte.weight": np.zeros((7, 8), np.float32)}, file)
    assert "model-0000000001-of-9999999999.safetensors is missing" in refusal(import_hf.find_files, tmp_path)
    file.rename(tmp_path / "model-a-of-b.safetensors")
    assert "no model.safetensors there" in refusal(import_hf.find_files, tmp_path)
    tensors = {"wte.weight": (7, 64), "wpe.weight": (5, 64), "h.1999999.ln_1.weight": (64,)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    assert "2,000,000 layers of " in refusal(import_hf.main, [str(tmp_path), "-o", str(tmp_path / "out.bin")])


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", "m\n.safetensors"])
def test_an_index_names_files_beside_it_alone(tmp_path, name):
    (tmp_path / import_hf.INDEX).write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    assert "is no name of a safetensors file beside it" in refusal(import_hf.find_files, tmp_path)


def test_a_checkpoint_lists_files_beside_it_alone(place):
    for name in "../best/model.bin", "/etc/passwd", "..", "":
        record = read_record(Path("run/step_00000002"))
        record["files"][name] = {"bytes": 1, "crc32": 1}
        shutil.copytree("run/step_00000002", "other/step_00000002")
        write_record(Path("other/step_00000002"), record)
        assert "lists a file named" in refusal(newest_checkpoint, "other")
        shutil.rmtree("other")


def test_a_header_that_asks_for_terabytes_is_refused_at_once(tmp_path):
    for sizes in (2**31 - 1, 2**31 - 1, 2**31 - 1, 1, 2**31 - 1), (1024, 50257, 10**6, 16, 2**20):
        header = make_header(20240326, 3, *sizes, padded(sizes[1]) % 2**31)
        (tmp_path / "model.bin").write_bytes(header.tobytes())
        refusal(read_model_header, tmp_path / "model.bin", GPT2.Config)


def test_steps_beyond_32_bits_are_refused(place):
    assert not trainer("-y", "1", "-x", str(2**32))


def test_what_files_say_is_printed_in_one_line_that_no_terminal_obeys():
    assert str(UserError("a\nb\x1b[2J\x85\u2028\udc80\u202e é 你")) == r"a\nb\x1b[2J\x85\u2028\udc80\u202e é 你"
