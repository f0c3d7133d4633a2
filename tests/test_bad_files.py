"""Files that are cut off, changed or made up: taken, or refused in one line, in memory that is in proportion."""

import json
import os
import resource
import signal
import struct
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path

import generate
from conftest import refusal
from dev.debug_state import DebugState, read_debug_state, write_debug_state
from dev.hf import import_hf
from dev.hf.common import config_json, families
from dev.scripts import model_kinds
from device.errors import UserError
from kernels.rope import ORIGINAL_LENGTH
from llmc.data.dataloader import DataLoader
from llmc.data.evaluation import EvalLoader
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.token_file import open_tokens, write_tokens
from llmc.data.tokenizer import byte_tokenizer
from llmc.files.checkpoint import load_checkpoint, model_path, save_checkpoint
from llmc.files.checkpoint_dir import newest_checkpoint
from llmc.files.model_file import read_model, write_model
from llmc.model.tensors import Config, num_parameters
from llmc.run.logger import Logger, read_log
from models import ODD
from support.evaluations import write_evaluation
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

MEMORY = 1 << 30  # bytes, for a file of a few kilobytes
MODELS = [f"{kind.Config.NAME} model" for kind in model_kinds()]
KINDS = [
    *MODELS, "debug state", "tokens", "tokenizer", "checkpoint", "hellaswag", "log", "prompts", "config.json",
    "safetensors",
]  # fmt: skip
WORDS = [struct.pack("<i", n) for n in (0, -1, 1, 2**31 - 1, -(2**31), 65536, 20240326, 20240520)]
WORDS += [struct.pack("<f", x) for x in (float("nan"), float("inf"), -1.0)] + [b"null", b"1e999", b"[[[[", b'"\\ud800"']


def smallest(config: type[Config]) -> Config:
    """A model of a few kilobytes: its first preset with one layer and one head of a few channels."""
    preset = config.described(next(iter(config.PRESETS)))
    sizes = {field.name: 1 for field in fields(config) if field.type is int}
    sizes |= {name: 8 for name in ("channels", "head_size") if name in sizes}
    return replace(preset, **sizes | {"vocab_size": 7, "max_seq_len": 5})


def readers(folder: Path) -> dict[str, tuple[Callable[[Path], object], list[bytes]]]:
    """For each kind of file: what reads one and uses all of it, and the contents of files that are whole. The readers
    put what they need beside the file into `folder`."""
    configs = [smallest(kind.Config) for kind in model_kinds()]
    gpt2 = next(config for config in configs if isinstance(config, GPT2Config))
    rng, file = np.random.default_rng(0), folder / "whole"

    def content(write: Callable, *arguments) -> bytes:
        write(file, *arguments)
        return file.read_bytes()

    def parameters(config) -> np.ndarray:
        return rng.standard_normal(num_parameters(config), np.float32)

    def sum_model(kind: type[Config], path: Path) -> None:
        [tensor.sum() for tensor in read_model(path, kind)[1].values()]

    found = {}
    for config in configs:
        models = [content(write_model, config, parameters(config))]
        if config.BF16_VERSION:
            llm_cs = config if config is gpt2 else replace(config, tied=False, original_length=ORIGINAL_LENGTH)
            models.append(content(write_model, llm_cs, parameters(llm_cs), True))
        found[f"{config.NAME} model"] = partial(sum_model, type(config)), models

    x = rng.integers(0, 7, (1, 3)).astype(np.int32)
    state = content(write_debug_state, DebugState(x, x, np.zeros((1, 3, 7), np.float32), 1.5, parameters(gpt2)))
    found["debug state"] = (lambda path: read_debug_state(path, gpt2).grads.sum(), [state])

    def read_tokens(path: Path) -> None:
        open_tokens(path)[:].sum()
        loader, batch = DataLoader(path, "train", 2, 3, 70_000), np.empty((2, 2, 3), np.int32)
        for _ in range(4):
            loader.next_batch(*batch)

    tokens = rng.integers(0, 100, 40)
    np.save(folder / "whole.npy", tokens)
    files = [content(write_tokens, tokens), content(write_tokens, tokens, 70_000), (folder / "whole.npy").read_bytes()]
    found["tokens"] = (read_tokens, files)

    whole_tokenizer = struct.pack("<256I", 20240328, 2, 3, 2, *[0] * 252) + b"\1a\2bc\3end"

    def read_tokenizer(path: Path) -> None:
        tokenizer = open_tokenizer(path)
        [tokenizer.decode(token) for token in range(tokenizer.vocab_size)]

    found["tokenizer"] = (read_tokenizer, [whole_tokenizer])

    run = folder / "run"
    state, files = {"run": "a", "flags": {}}, {"model_tokenizer.bin": whole_tokenizer}
    checkpoint = save_checkpoint(run, 3, gpt2, *[parameters(gpt2) for _ in range(3)], state, files)
    whole = {path.name: path.read_bytes() for path in checkpoint.iterdir()}

    def read_checkpoint(path: Path) -> None:
        """The first byte says which of the files the others are, and whether a run goes on from the checkpoint or takes
        its model."""
        data = path.read_bytes()
        names = sorted(whole)
        damaged = names[data[0] % len(names)] if data else names[0]
        for name in names:
            (checkpoint / name).write_bytes(data[1:] if name == damaged else whole[name])
        if data and data[0] // len(names) % 2:
            read_model(model_path(run), GPT2Config)
        else:
            load_checkpoint(newest_checkpoint(run), GPT2Config)

    seeds = [bytes([i]) + whole[name] for i, name in enumerate(2 * sorted(whole))]
    found["checkpoint"] = (read_checkpoint, seeds)

    questions = content(write_evaluation, 2 * [(1, [0, 1, 2], [[0], [0, 1], [0], [0, 1]])])

    def read_questions(path: Path) -> None:
        loader, batch = EvalLoader(path, 4, 8, 50), np.empty((2, 4, 8), np.int32)
        for _ in range(min(loader.num_batches, 5)):
            loader.next_batch(*batch)
            loader.count_correct(np.zeros((4, 8), np.float32))

    found["hellaswag"] = (read_questions, [questions])
    found["log"] = (read_log, [b"s:0 tel:3.5212\ns:1 trl:3.6107\ns:20 eval:0.2955\ns:20 bpb:1.1288\n"])

    def read_prompts(path: Path) -> None:
        objects, tokenizer = folder / "prompts.jsonl", byte_tokenizer()
        objects.write_bytes(path.read_bytes())
        for flags in ["--prompts", str(objects)], ["--prompts", str(path)], ["--prompt-file", str(path)]:
            prompts = generate.prompts_of(generate.make_parser().parse_args(flags))
            generate.tokens_of(prompts, tokenizer, 100, 200)

    found["prompts"] = (read_prompts, ['{"prompt": "a"}\r\n\n{"prompt": "\\ud83d\\ude42 ü"}\n'.encode()])

    saved = folder / "saved"
    saved.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in import_hf.shapes_of(configs[1]).items()},
              saved / "model.safetensors")  # fmt: skip
    known = [family.Config for family in families().values()]
    settings = [json.dumps(config_json(config)).encode() for config in configs if type(config) in known]
    mistral = json.loads(settings[1]) | {"model_type": "mistral", "sliding_window": None}
    settings.append(json.dumps(mistral).encode())
    import_whole = {"model.safetensors": (saved / "model.safetensors").read_bytes(), "config.json": settings[1]}

    def import_with(name: str, path: Path) -> None:
        for other, data in import_whole.items():
            (saved / other).write_bytes(path.read_bytes() if other == name else data)
        with redirect_stdout(StringIO()):
            import_hf.main([str(saved), "-o", str(folder / "out.bin")])

    found["config.json"] = (partial(import_with, "config.json"), settings)
    found["safetensors"] = (partial(import_with, "model.safetensors"), [import_whole["model.safetensors"]])
    return found


def check(reader: Callable[[Path], object], path: Path, data: bytes) -> bool:
    """Whether the reader takes a file with these contents. Raises what it raises, but for a refusal in one line, and
    MemoryError where it takes more than MEMORY."""
    path.write_bytes(data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        reader(path)
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError(f"a refusal of several lines: {error!r}") from error
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return True


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers")
    return folder, readers(folder)


def test_every_reader_is_tried(kinds):
    assert list(kinds[1]) == KINDS


@st.composite
def damages(draw):
    """A function that damages a file's contents."""
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        kind, place = draw(st.sampled_from(["cut", "bit", "word", "grow", "swap"])), draw(st.floats(0, 1))
        steps.append((kind, place, draw(st.integers(0, 7)), draw(st.sampled_from(WORDS))))

    def damage(data: bytes) -> bytes:
        for kind, place, bit, word in steps:
            at = int(place * len(data))
            if kind == "cut":
                data = data[:at]
            elif kind == "bit" and at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            elif kind == "word":  # headers are made of words of four bytes
                data = data[: at // 4 * 4] + word + data[at // 4 * 4 + len(word) :]
            elif kind == "grow":
                data = data[:at] + word * (bit + 1) + data[at:]
            else:
                data = data[at:] + data[:at]
        return data

    return damage


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of what a damaged file holds
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(damage=damages(), header=st.booleans(), whole=st.integers(0, 4))
def test_a_damaged_file_is_taken_or_refused_in_one_line(kinds, kind, damage, header, whole):
    folder, (reader, seeds) = kinds[0], kinds[1][kind]
    data = seeds[whole % len(seeds)]
    head, body = (data[:64], data[64:]) if header else (data, b"")  # most of what can be wrong stands at the beginning
    check(reader, folder / "input", damage(head) + body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_taken_and_an_empty_or_deeply_nested_one_refused(kinds, kind):
    folder, (reader, seeds) = kinds[0], kinds[1][kind]
    taken = [check(reader, folder / "input", data) for data in seeds]
    assert any(taken) if kind == "config.json" else all(taken)  # only one of those fits the tensors beside it
    for data in b"", b"[" * 100_000, b'{"a":' * 100_000:
        assert not check(reader, folder / "input", data) or kind == "log"  # whose last line may not be finished


# What is no regular file: a pipe may have nobody who ever writes to it


@pytest.fixture
def in_time():
    """Fails a test that waits for ever."""

    def too_late(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(function, *arguments) -> None:
    assert "not a regular file" in refusal(function, *arguments)


@pytest.mark.parametrize("kind", [*MODELS, "debug state", "tokens", "tokenizer", "hellaswag", "log"])
def test_a_pipe_is_refused(kinds, tmp_path, in_time, kind):
    os.mkfifo(tmp_path / "pipe")
    refused(kinds[1][kind][0], tmp_path / "pipe")


@pytest.mark.parametrize("name", ["model.bin", "optimizer.bin", "state.json", "model_tokenizer.bin"])
def test_a_pipe_in_a_checkpoint_is_refused(tmp_path, rng, in_time, name):
    params = rng.standard_normal(num_parameters(ODD)).astype("<f4")
    checkpoint = save_checkpoint(tmp_path, 3, ODD, params, params, params, {}, {"model_tokenizer.bin": b"tokens"})
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(load_checkpoint, checkpoint, type(ODD))
    refused(newest_checkpoint, tmp_path)
    if name in ("model.bin", "state.json"):
        refused(read_model, checkpoint / "model.bin", type(ODD))


def test_a_pipe_that_nobody_reads_takes_no_log(tmp_path, in_time):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: cannot be written" in refusal(Logger, tmp_path / "pipe")


def test_a_device_is_refused(in_time):
    refused(read_log, "/dev/zero")
