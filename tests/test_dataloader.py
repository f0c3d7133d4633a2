"""Token files and the walk through them: llm.c's order without a seed, a reproducible shuffle with one."""

import json
import os
import re
import struct
import tracemalloc
from pathlib import Path

from conftest import refusal
from kernels.encoder import sort_by_token
from llmc.data import dataloader
from llmc.data.dataloader import DataLoader
from llmc.data.find_data import check_both_splits, find_token_files
from llmc.data.token_file import RAW_TOKENS, open_tokens, write_tokens

import numpy as np
import pytest

V = 60000
LLAMA3_V = 128256


def batch(loader):
    """The next batch, from arrays that held something else."""
    inputs, targets = np.full((2, loader.B, loader.T), -1, np.int32)
    loader.next_batch(inputs, targets)
    return inputs, targets


def llm_c_batches(tokens, B, T, n):
    """What llm.c's fp32 trainer reads: B*T+1 tokens at a position that moves by B*T, or goes back to 0."""
    position = 0
    for _ in range(n):
        if position + B * T + 1 > len(tokens):
            position = 0
        chunk = tokens[position : position + B * T + 1].astype(np.int32)
        yield chunk[:-1].reshape(B, T), chunk[1:].reshape(B, T)
        position += B * T


@pytest.fixture
def shards(tmp_path):
    """Three shards whose tokens are all different, so that a token tells where it came from."""
    for shard, size in enumerate((1000, 777, 901)):
        write_tokens(tmp_path / f"x_train_{shard:06d}.bin", np.arange(size) + 10_000 * (shard + 1))
    return str(tmp_path / "x_train_*.bin")


def test_the_public_shards_of_fineweb_are_read_as_they_are(tmp_path):
    """llm.c's header (magic, version, count, zeros), 16 bits per token, and the names of the 10 billion tokens."""
    sizes = {"train_000001": 70000, "train_000103": 900, "val_000000": 500}
    tokens = {name: np.arange(size) % 50257 for name, size in sizes.items()}
    for name, its in tokens.items():
        header = struct.pack("<256i", 20240520, 1, its.size, *[0] * 253)
        (tmp_path / f"fineweb_{name}.bin").write_bytes(header + its.astype("<u2").tobytes())
    train, val = (DataLoader(tmp_path / "fineweb", split, 4, 64, 50257) for split in ("train", "val"))
    assert [file.name for file in train.files] == ["fineweb_train_000001.bin", "fineweb_train_000103.bin"]
    assert (train.num_tokens, train.num_batches, val.num_batches) == (70900, 273 + 3, 1)
    for loader, names in (train, ("train_000001", "train_000103")), (val, ("val_000000",)):
        for name in names:
            for wanted in llm_c_batches(tokens[name], 4, 64, (tokens[name].size - 1) // 256):
                np.testing.assert_array_equal(batch(loader), wanted)


@pytest.mark.parametrize("vocab_size, tokens, magic, version, code", [
    (257, [1, 2, 3], 20240520, 1, "H"), (65536, [0, 1, 65535], 20240520, 1, "H"), (65537, [1, 2, 3], 20240801, 7, "I"),
    (LLAMA3_V, [0, 65536, LLAMA3_V - 1], 20240801, 7, "I"),
])  # fmt: skip
def test_a_token_file_has_a_layout_of_llm_c_which_the_vocabulary_decides(
    tmp_path, vocab_size, tokens, magic, version, code
):
    write_tokens(tmp_path / "x.bin", tokens, vocab_size)
    data = (tmp_path / "x.bin").read_bytes()
    assert struct.unpack("<256i", data[:1024]) == (magic, version, 3) + (0,) * 253
    assert data[1024:] == struct.pack(f"<3{code}", *tokens)
    np.testing.assert_array_equal(open_tokens(tmp_path / "x.bin")[:], tokens)


@pytest.mark.parametrize("B, T, size", [(4, 8, 33), (4, 8, 97), (3, 7, 84), (3, 7, 85), (1, 1, 2), (2, 5, 57)])
@pytest.mark.parametrize("vocab_size", [V, LLAMA3_V])
def test_batches_are_those_of_llm_c(tmp_path, rng, B, T, size, vocab_size):
    tokens = rng.integers(0, vocab_size, size)
    write_tokens(tmp_path / "x_val.bin", tokens, vocab_size)
    loader = DataLoader(tmp_path / "x", "val", B, T, vocab_size)
    assert (loader.num_tokens, loader.num_batches) == (size, (size - 1) // (B * T))
    for _ in range(2):
        for expected in llm_c_batches(tokens, B, T, 2 * loader.num_batches + 1):
            np.testing.assert_array_equal(batch(loader), expected)
        loader.reset()


def test_shards_are_walked_in_order_and_no_batch_straddles_two(shards):
    B, T = 2, 50
    loader = DataLoader(shards, "train", B, T, V)
    assert (loader.num_tokens, loader.num_batches, loader.unused, loader.short) == (2678, 25, 2678 - 2503, [])
    for _ in range(2):
        for shard, batches in ((1, 9), (2, 7), (3, 9)):
            for i in range(batches):
                start = shard * 10_000 + i * B * T
                inputs, targets = batch(loader)
                np.testing.assert_array_equal(inputs.ravel(), np.arange(start, start + B * T))
                np.testing.assert_array_equal(targets.ravel(), np.arange(start, start + B * T) + 1)


def test_a_prefix_stands_for_one_file_or_its_shards(tmp_path, shards):
    names = [f"x_train_{shard:06d}.bin" for shard in range(3)]
    for shard in "000000", "000001":
        np.save(tmp_path / f"y_train_{shard}.npy", np.arange(3))  # as build-nanogpt writes its shards
    assert [file.name for file in find_token_files(tmp_path / "y", "train")] == [
        f"y_train_00000{n}.npy" for n in (0, 1)
    ]
    assert [file.name for file in find_token_files(tmp_path / "x", "train")] == names
    assert [file.name for file in find_token_files(shards, "val")] == names
    assert [file.name for file in find_token_files(tmp_path / names[1], "val")] == [names[1]]
    for other in "v2_train", "train_v2_val_000000", "train_v2", "train_":  # of a dataset x_train_v2, for example
        write_tokens(tmp_path / f"x_{other}.bin", [1, 2])
    assert [file.name for file in find_token_files(tmp_path / "x", "train")] == names
    write_tokens(tmp_path / "x_train.bin", [1, 2])
    assert [file.name for file in find_token_files(str(tmp_path / "x"), "train")] == ["x_train.bin"]
    for name in [*names, "x_train.bin"]:
        (tmp_path / name).unlink()
    assert "x_train_.bin may be of another dataset" in refusal(find_token_files, tmp_path / "x", "train")


def starts(loader: DataLoader, windows: int) -> list[int]:
    """The first tokens of the next windows."""
    return [int(start) for _ in range(windows // loader.B) for start in batch(loader)[0][:, 0]]


def test_a_shuffled_epoch_serves_every_window_once_and_differs_from_the_next(shards):
    loader = DataLoader(shards, "train", 3, 10, V, shuffle_seed=1)
    epochs = [starts(loader, 3 * (33 + 25 + 30)) for _ in range(3)]  # (size - 1) // (B*T) batches of each shard
    for found in epochs:
        assert len(set(found)) == len(found) and found != sorted(found)  # none twice
        assert all(start % 10_000 % 10 == 0 for start in found)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len({tuple(start // 10_000 for start in found) for found in epochs}) > 1  # shards change places too
    inputs, targets = batch(loader)
    assert (inputs == inputs[:, :1] + np.arange(10)).all() and (targets == inputs + 1).all()


def test_the_shuffle_depends_on_seed_and_epoch_alone(shards):
    def of(seed: int, B: int = 2) -> list[int]:
        return starts(DataLoader(shards, "train", B, 10, V, shuffle_seed=seed), 60)

    np.random.seed(0)
    first = of(5)
    np.random.seed(1)
    assert first == of(5) == of(5, B=4)  # neither on other random numbers nor on the batch size
    assert len(set(map(tuple, (first, of(6), of(2**32 + 5), of(-1))))) == 4 and of(-1) == of(2**64 - 1)


def test_the_shuffle_is_the_same_in_every_release(tmp_path):
    """Pinned: a change would break the resumption of runs under way."""
    write_tokens(tmp_path / "x_train.bin", np.arange(81))
    loader = DataLoader(tmp_path / "x", "train", 8, 10, V, shuffle_seed=42)
    assert [start // 10 for start in starts(loader, 8)] == [7, 1, 6, 3, 0, 4, 5, 2]


@pytest.mark.parametrize("seed", [None, 2**64 - 1])
def test_a_resumed_loader_goes_on_where_the_other_stopped(shards, seed):
    loader = DataLoader(shards, "train", 2, 50, V, shuffle_seed=seed)
    for stop in range(0, 55, 6):  # across shards and epochs
        resumed = DataLoader(shards, "train", 2, 50, V, shuffle_seed=seed)
        resumed.load_state(json.loads(json.dumps(loader.state())))
        for _ in range(6):
            np.testing.assert_array_equal(batch(resumed), batch(loader), err_msg=f"after {stop}")


@pytest.mark.parametrize("settings, change, said", [
    *(({}, change, "damaged") for change in ({"place": 3}, {"batch": 9}, {"place": 2**40})),
    *((change, {}, f"cannot resume: {next(iter(change))} of")
      for change in ({"B": 1}, {"T": 49}, {"shuffle_seed": 8}, {"shuffle_seed": None})),
])  # fmt: skip
def test_a_position_in_another_walk_or_that_the_data_does_not_have_is_refused(shards, settings, change, said):
    """Also if a file with the right checksum says so."""
    walk = {"B": 2, "T": 50, "shuffle_seed": 7}
    state = DataLoader(shards, "train", vocab_size=V, **walk).state() | change
    assert said in refusal(DataLoader(shards, "train", vocab_size=V, **walk | settings).load_state, state)


@pytest.mark.parametrize("of, bad", [(V, 300), (2**32, 2**32 - 1), (None, -7), (None, 257)])
def test_a_token_outside_the_vocabulary_is_refused_at_once(tmp_path, of, bad):
    """of: the vocabulary that the file is for, or None for raw tokens."""
    if of:
        write_tokens(tmp_path / "x_train.bin", [1, bad, 3], of)
    else:
        np.array([1, bad, 3], "<i4").tofile(tmp_path / "x_train.bin")
    message = refusal(DataLoader, tmp_path / "x", "train", 1, 1, 257, None, "int32")
    assert f"x_train.bin: token {bad} is outside the model's vocabulary of 257" in message


def test_a_bad_token_in_a_large_file_is_refused_when_its_batch_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, "CHECKED_AT_OPENING", 10)
    write_tokens(tmp_path / "x_train.bin", [1] * 9 + [300])
    loader = DataLoader(tmp_path / "x", "train", 1, 3, 257)
    starts(loader, 2)
    assert "token 300" in refusal(batch, loader)  # the last token, which is only ever a target


def test_a_file_of_more_tokens_than_its_header_can_count_is_not_written(tmp_path):
    many = np.broadcast_to(np.uint16(1), (2**31,))
    assert "write shards" in refusal(write_tokens, tmp_path / "x.bin", many) and not list(tmp_path.iterdir())


def header(*words: int) -> bytes:
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


class Opened:  # as it is unpickled, it runs a command
    def __reduce__(self):
        return os.system, ("touch opened",)


NPY = b"\x93NUMPY\1\0v\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (9,), }".ljust(117) + b"\n" + bytes(18)
TO_DO = "--raw-tokens .*python dev/data/text.py"  # of what no first bytes say


@pytest.mark.parametrize("name, data, raw, said", [
    ("x_train.bin", None, "int32", "no such file.* dev/download_starter_pack.sh"),
    ("x_train.bin", b"\x00123456", "int32", "7 bytes"),
    *(("x_train.bin", header(20240520, 1, 3) + b"\0" * n, "int32", "truncated or damaged") for n in (5, 7, 8)),
    ("x_train.bin", header(20240520, 1, 3)[:1000], "int32", "too short"),
    ("x_train.bin", header(20240326, 3), "int32", "found a GPT-2 model"),
    ("x_train.bin", header(20240801, 7), "int32", "holds 0 tokens"),
    ("x_train.bin", header(20240801, 1, 3), "int32", "token file version 1; version 7"),
    ("x_train.bin", b"", None, TO_DO), ("x_train.bin", b"To be, or not to be.\n" * 80, None, TO_DO),
    ("x_train.bin", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 2), None, TO_DO),  # Megatron's
    ("x_train.npy", np.zeros((2, 3), int), None, "2 x 3 of int64"), ("x_train.npy", np.zeros(9), None, "of float64"),
    ("x_train.npy", np.array([Opened()]), None, "NumPy cannot map it"),
    ("x_train.npy", np.zeros(0, int), None, "asks for 0 tokens"),
    ("x_train.npy", np.array([1, 70000, 2]), None, "token 70000 is outside"),
    ("x_train.npy", NPY[:-1], None, "truncated"), ("x_train.npy", NPY[:50], None, "truncated"),
    ("x_train.npy", NPY + b"\0", None, "147 bytes, but its header asks for 9 tokens"),
])  # fmt: skip
def test_a_file_that_is_missing_damaged_or_something_else_is_refused(tmp_path, monkeypatch, name, data, raw, said):
    monkeypatch.chdir(tmp_path)
    if isinstance(data, np.ndarray):
        np.save(name, data)
    elif data is not None:
        Path(name).write_bytes(data)
    assert re.match(f"{name}: .*{said}", message := refusal(DataLoader, "x", "train", 1, 1, V, None, raw))
    assert said != TO_DO or message == refusal(check_both_splits, name, None)
    assert os.listdir() in ([], [name])  # no pickle is opened


def write_raw(path: Path, tokens: np.ndarray) -> None:
    tokens.astype(tokens.dtype.newbyteorder("<")).tofile(path)


def write_npy(path: Path, tokens: np.ndarray) -> None:
    with open(path, "wb") as file:  # np.save would change the name
        np.save(file, tokens)


@pytest.mark.parametrize("dtype, write, raw_tokens", [
    *((dtype, write_raw, dtype) for dtype in RAW_TOKENS),
    *((dtype, write_npy, None) for dtype in ("<u2", ">u2", "<i8")),
    ("<i4", write_npy, "uint8"), ("<u2", write_tokens, "uint32"),  # one of -i and -j may be raw
])  # fmt: skip
def test_tokens_are_of_the_type_that_the_first_bytes_name_or_else_the_flag(tmp_path, rng, dtype, write, raw_tokens):
    """Without the flag raw tokens are refused, even where they could be of one type only."""
    for split, first in ("train", 5), ("val", 1024):  # numbers beside a magic number of train_gpt2_fp32.py
        tokens = np.r_[first, 0, rng.integers(0, V, 1997)].astype(dtype)
        file = tmp_path / f"{split}.bin"
        write(file, tokens)
        for name in tmp_path, f"{tmp_path}/", file:
            loader = DataLoader(name, split, 2, 50, V, raw_tokens=raw_tokens)
            assert (loader.shards[0][:] == tokens).all() and loader.files == (file,)
            if write is write_raw:
                message = refusal(DataLoader, name, split, 2, 50, V)
                assert message.startswith(f"{file}: ") and "if it is tokens without any header" in message


def test_a_folder_without_a_dataset_and_two_datasets_of_one_name_are_asked_about(tmp_path):
    assert "python dev/data/text.py" in refusal(DataLoader, tmp_path, "train", 1, 1, V)
    assert "no file matches" in refusal(DataLoader, tmp_path / "x*.bin", "train", 1, 1, V)
    assert "no such file" in refusal(DataLoader, "\ud800", "train", 1, 1, V)  # a name that no file can have
    write_tokens(tmp_path / "mine_train_000000.bin", [1, 2, 3])
    assert f"name a dataset in it (-i {tmp_path}/PREFIX)" in refusal(DataLoader, tmp_path, "train", 1, 1, V)
    write_tokens(tmp_path / "x_train.bin", [1, 2, 3])
    np.save(tmp_path / "x_train.npy", np.arange(3))
    message = refusal(DataLoader, tmp_path / "x", "train", 1, 1, V)
    assert "x_train.bin" in message and "x_train.npy" in message and "-i" in message


@pytest.mark.parametrize("folder, prefix", [
    ("a [1]", "x"), ("b*", "x [v2]"), ("what?", "y*"), ("[!x]", "x [v2]"), ("two words", "x"),
])  # fmt: skip
def test_a_name_that_is_there_is_a_name_and_only_then_a_pattern(tmp_path, folder, prefix):
    data = tmp_path / folder
    for place in (data, tmp_path / "b2", tmp_path / "a 1"):
        place.mkdir()
        for split in ("train", "val"):
            write_tokens(place / f"{prefix}_{split}_000000.bin", [1, 2, 3])
            write_tokens(place / f"{split}.bin", [1, 2, 3])
    for split in ("train", "val"):
        shard = data / f"{prefix}_{split}_000000.bin"
        assert find_token_files(data / prefix, split) == find_token_files(shard, split) == [shard]
        assert find_token_files(data, split) == [data / f"{split}.bin"]
    for name in (data, data / prefix):
        check_both_splits(name, None)
    assert "name those for validation with -j" in refusal(check_both_splits, shard, None)
    assert find_token_files(tmp_path / "b[0-9]/[tv]*in.bin", "val") == [tmp_path / "b2/train.bin"]


def test_data_shorter_than_a_batch_is_refused_and_a_short_shard_among_others_passed_over(tmp_path, shards):
    write_tokens(tmp_path / "y_train.bin", np.arange(20))
    message = refusal(DataLoader, tmp_path / "y", "train", 4, 5, V)
    assert "y_train.bin: 20 tokens" in message and "takes 21" in message and "-b or -t" in message
    DataLoader(tmp_path / "y", "train", 19, 1, V)

    write_tokens(tmp_path / "x_train_000003.bin", np.arange(30))
    loader = DataLoader(shards, "train", 1, 30, V)
    assert [file.name for file in loader.files] == [f"x_train_{shard:06d}.bin" for shard in range(3)]
    assert (loader.num_tokens, loader.short) == (2678, [30])


def test_a_large_file_is_never_read_whole(tmp_path):
    """A sparse file of more than 2 GiB, opened and read within 50 MB of memory."""
    size = 1_100_000_000
    with open(tmp_path / "x_train.bin", "wb") as file:
        file.write(header(20240520, 1, size))
        file.truncate(1024 + 2 * size)
    tracemalloc.start()
    loader = DataLoader(tmp_path / "x", "train", 4, 1024, 50257, shuffle_seed=1)
    for _ in range(100):
        batch(loader)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_positions_are_sorted_by_token_and_counted():
    order, count = sort_by_token(np.array([[5, 0, 50256], [5, 5, 0]], dtype=np.int32))
    assert order.tolist() == [1, 5, 0, 3, 4, 2]
    assert count.tolist() == [2, 0, 3, 0, 0, 1]
    assert order.dtype == count.dtype == np.int32
    order, count = sort_by_token(np.array([65536 + 5, 5, 65536 + 5, 0], dtype=np.int32))  # beyond 16 bits
    assert order.tolist() == [3, 1, 0, 2] and count.tolist() == [1, 1, 2, 0]
