"""Files that are cut off, changed or made up: taken, or refused in one line. dev/fuzz.py does the same for hours."""

import os
import signal
import struct

from dev.fuzz import check, readers
from device.errors import UserError
from llmc.checkpoint import load_checkpoint, newest_checkpoint, read_model, save_checkpoint
from llmc.logger import Logger, read_log
from llmc.scripts import model_kinds
from llmc.tensors import num_parameters
from llmc.tokenizer import Tokenizer
from models import ODD

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MODELS = [f"{kind.Config.NAME} model" for kind in model_kinds()]
KINDS = [
    *MODELS, "debug state", "tokens", "tokenizer", "checkpoint", "hellaswag", "log", "config.json", "safetensors",
]  # fmt: skip
WORDS = [struct.pack("<i", n) for n in (0, -1, 1, 2**31 - 1, -(2**31), 65536, 20240326, 20240520)]
WORDS += [struct.pack("<f", x) for x in (float("nan"), float("inf"), -1.0)] + [b"null", b"1e999", b"[[[[", b'"\\ud800"']


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
@given(damage=damages(), header=st.booleans(), whole=st.integers(0, 2))
def test_a_damaged_file_is_taken_or_refused_in_one_line(kinds, kind, damage, header, whole):
    folder, (reader, seeds) = kinds[0], kinds[1][kind]
    data = seeds[whole % len(seeds)]
    head, body = (data[:64], data[64:]) if header else (data, b"")  # most of what can be wrong stands at the beginning
    check(reader, folder / "input", damage(head) + body)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [b"[", b'{"a":'], ids=["arrays", "objects"])
def test_what_is_nested_too_deeply_is_refused(kinds, kind, text):
    folder, (reader, _) = kinds[0], kinds[1][kind]
    assert not check(reader, folder / "input", text * 100_000) or kind == "log"  # as a line that is not finished


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_taken_and_an_empty_one_refused(kinds, kind):
    folder, (reader, seeds) = kinds[0], kinds[1][kind]
    assert any([check(reader, folder / "input", data) for data in seeds])
    assert not check(reader, folder / "input", b"") or kind == "log"  # a log may have no line yet


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
    with pytest.raises(UserError, match="not a regular file") as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [*MODELS, "debug state", "tokens", "tokenizer", "hellaswag", "log"])
def test_a_pipe_is_refused(kinds, tmp_path, in_time, kind):
    os.mkfifo(tmp_path / "pipe")
    refused(kinds[1][kind][0], tmp_path / "pipe")


def test_a_pipe_is_no_tokenizer_json(tmp_path, in_time):
    os.mkfifo(tmp_path / "pipe.json")
    refused(Tokenizer.load, tmp_path / "pipe.json")


@pytest.mark.parametrize("name", ["model.bin", "optimizer.bin", "state.json"])
def test_a_pipe_in_a_checkpoint_is_refused(tmp_path, rng, in_time, name):
    params = rng.standard_normal(num_parameters(ODD)).astype("<f4")
    checkpoint = save_checkpoint(tmp_path, 3, ODD, params, params, params, {})
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(load_checkpoint, checkpoint, type(ODD))
    refused(newest_checkpoint, tmp_path)
    if name != "optimizer.bin":
        refused(read_model, checkpoint / "model.bin", type(ODD))


def test_a_pipe_that_nobody_reads_is_no_log(tmp_path, in_time):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: cannot be written"):
        Logger(tmp_path / "pipe")


def test_a_pipe_that_somebody_reads_takes_a_log(tmp_path, in_time):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    logger = Logger(tmp_path / "pipe")
    logger.log_train(1, 1.0)
    assert os.read(reader, 100) == b"s:1 trl:1.0000\n"
    logger.close()
    os.close(reader)


def test_a_device_is_refused(in_time):
    refused(read_log, "/dev/zero")
