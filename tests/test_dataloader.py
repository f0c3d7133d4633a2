"""Token files and the walk through them: llm.c's order without a seed, a reproducible shuffle with one."""

import json
import os
import struct
import subprocess
import sys
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
@pytest.mark.parametrize("raw, vocab_size", [(False, V), (True, V), (False, LLAMA3_V), (True, LLAMA3_V)])
def test_batches_are_those_of_llm_c(tmp_path, rng, B, T, size, raw, vocab_size):
    tokens = rng.integers(0, vocab_size, size)
    if raw:
        tokens.astype("<i4").tofile(tmp_path / "x_val.bin")
    else:
        write_tokens(tmp_path / "x_val.bin", tokens, vocab_size)
    loader = DataLoader(tmp_path / "x", "val", B, T, vocab_size, raw_tokens="int32")
    assert loader.num_tokens == size
    assert loader.num_batches == (size - 1) // (B * T)
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


def test_a_shuffled_epoch_serves_every_window_once_and_differs_from_the_next(shards):
    B, T = 3, 10
    loader = DataLoader(shards, "train", B, T, V, shuffle_seed=1)
    epochs = []
    for _ in range(3):
        starts = []
        for _ in range(33 + 25 + 30):  # (size - 1) // (B*T) batches of each shard
            inputs, targets = batch(loader)
            np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(T))
            np.testing.assert_array_equal(targets, inputs + 1)
            starts.extend(inputs[:, 0])
        assert len(set(starts)) == len(starts)  # none twice
        assert all(start % 10_000 % T == 0 for start in starts)
        assert starts != sorted(starts)
        epochs.append(starts)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len({tuple(start // 10_000 for start in starts) for starts in epochs}) > 1  # shards change places too


def test_the_shuffle_depends_on_seed_and_epoch_alone(shards):
    def starts(seed, B):
        loader = DataLoader(shards, "train", B, 10, V, shuffle_seed=seed)
        return [int(start) for _ in range(60 // B) for start in batch(loader)[0][:, 0]]

    np.random.seed(0)
    first = starts(5, 2)
    np.random.seed(1)
    assert first == starts(5, 2) == starts(5, 4)  # neither on other random numbers nor on the batch size
    assert first != starts(6, 2)
    assert starts(2**32 + 5, 2) != first
    assert starts(-1, 2) == starts(2**64 - 1, 2)


def test_the_shuffle_is_the_same_in_every_release(tmp_path):
    """Pinned: a change would break the resumption of runs under way."""
    write_tokens(tmp_path / "x_train.bin", np.arange(81))
    loader = DataLoader(tmp_path / "x", "train", 8, 10, V, shuffle_seed=42)
    assert [start // 10 for start in batch(loader)[0][:, 0]] == [7, 1, 6, 3, 0, 4, 5, 2]


@pytest.mark.parametrize("seed", [None, 2**64 - 1])
def test_a_resumed_loader_goes_on_where_the_other_stopped(shards, seed):
    loader = DataLoader(shards, "train", 2, 50, V, shuffle_seed=seed)
    for stop in range(0, 55, 6):  # across shards and epochs
        resumed = DataLoader(shards, "train", 2, 50, V, shuffle_seed=seed)
        resumed.load_state(json.loads(json.dumps(loader.state())))
        for _ in range(6):
            np.testing.assert_array_equal(batch(resumed), batch(loader), err_msg=f"after {stop}")


@pytest.mark.parametrize("change", [{"place": 3}, {"batch": 9}, {"place": 2**40}])
def test_a_position_that_the_data_does_not_have_is_refused(shards, change):
    """A file with the right checksum may say so."""
    loader = DataLoader(shards, "train", 2, 50, V)
    assert "damaged" in refusal(loader.load_state, loader.state() | change)


def test_a_file_of_more_tokens_than_its_header_can_count_is_not_written(tmp_path):
    many = np.broadcast_to(np.uint16(1), (2**31,))
    assert "write shards" in refusal(write_tokens, tmp_path / "x.bin", many) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [{"B": 1}, {"T": 49}, {"shuffle_seed": 8}, {"shuffle_seed": None}])
def test_a_position_in_another_walk_is_refused(shards, change):
    settings = {"B": 2, "T": 50, "shuffle_seed": 7}
    state = DataLoader(shards, "train", vocab_size=V, **settings).state()
    message = refusal(DataLoader(shards, "train", vocab_size=V, **settings | change).load_state, state)
    assert next(iter(change)) in message and "cannot resume" in message


@pytest.mark.parametrize("of, bad", [(V, 300), (2**32, 2**32 - 1), (None, -7), (None, 257)])
def test_a_token_outside_the_vocabulary_is_refused_at_once(tmp_path, of, bad):
    """of: the vocabulary that the file is for, or None for raw tokens."""
    if of:
        write_tokens(tmp_path / "x_train.bin", [1, bad, 3], of)
    else:
        np.array([1, bad, 3], "<i4").tofile(tmp_path / "x_train.bin")
    message = refusal(DataLoader, tmp_path / "x", "train", 1, 1, 257, None, "int32")
    assert f"x_train.bin: token {bad} is outside" in message and "257" in message


def test_a_bad_token_in_a_large_file_is_refused_when_its_batch_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, "CHECKED_AT_OPENING", 10)
    write_tokens(tmp_path / "x_train.bin", [1] * 9 + [300])
    loader = DataLoader(tmp_path / "x", "train", 1, 3, 257)
    batch(loader)
    batch(loader)
    assert "token 300" in refusal(batch, loader)  # the last token, which is only ever a target


def test_files_that_are_missing_damaged_or_something_else_are_refused(tmp_path):
    def message(data=None, pattern="x"):
        if data is not None:
            (tmp_path / "x_train.bin").write_bytes(data)
        return refusal(DataLoader, str(tmp_path / pattern), "train", 1, 1, V, None, "int32")

    header = struct.pack("<256i", 20240520, 1, 3, *[0] * 253)
    missing = message()
    assert "x_train.bin: no such file" in missing and "dev/download_starter_pack.sh" in missing
    assert "no file matches" in message(pattern="x*.bin")
    assert "no such file" in message(pattern="\ud800")  # a name that no file can have
    assert "7 bytes" in message(b"\x00123456")
    assert "truncated or damaged" in message(header + b"\0" * 5)
    assert "truncated or damaged" in message(header + b"\0" * 7)
    assert "too short" in message(header[:1000])
    assert "found a GPT-2 model" in message(struct.pack("<256i", 20240326, 3, *[0] * 254))
    assert "0 tokens" in message(struct.pack("<256i", 20240801, 7, *[0] * 254))
    assert "token file version 1; version 7" in message(struct.pack("<256i", 20240801, 1, 3, *[0] * 253))


@pytest.mark.parametrize("raw_tokens", RAW_TOKENS)
def test_raw_tokens_are_of_the_type_that_the_flag_names(tmp_path, rng, raw_tokens):
    """Also from nanoGPT's folder. Without the flag they are refused, even where they could be of one type only."""
    for split in ("train", "val"):
        tokens = rng.integers(0, 256 if raw_tokens == "uint8" else V, 1999)
        tokens.astype(np.dtype(raw_tokens).newbyteorder("<")).tofile(tmp_path / f"{split}.bin")
        for name in (tmp_path, f"{tmp_path}/", tmp_path / f"{split}.bin"):
            loader = DataLoader(name, split, 2, 50, V, raw_tokens=raw_tokens)
            np.testing.assert_array_equal(loader.shards[0][:], tokens)
            assert [file.name for file in loader.files] == [f"{split}.bin"]
            message = refusal(DataLoader, name, split, 2, 50, V)
            assert message.startswith(f"{tmp_path}/{split}.bin: ") and "--raw-tokens" in message


@pytest.mark.parametrize("first", [5, 1024])
def test_raw_tokens_may_begin_with_a_number_that_stands_beside_a_magic_number(tmp_path, first):
    """In train_gpt2_fp32.py both do. The file is no model, with the flag or without it."""
    tokens = np.r_[np.array([first, 0], "<u2"), np.arange(1000, dtype="<u2")]
    tokens.tofile(tmp_path / "x_train.bin")
    loader = DataLoader(tmp_path / "x", "train", 2, 50, V, raw_tokens="uint16")
    np.testing.assert_array_equal(loader.shards[0][:], tokens)
    assert "if it is tokens without any header" in refusal(DataLoader, tmp_path / "x", "train", 2, 50, V)


def test_a_token_file_keeps_its_header_whatever_type_raw_tokens_have(tmp_path):
    """One of -i and -j may be raw."""
    write_tokens(tmp_path / "x_train.bin", range(1000))
    loader = DataLoader(tmp_path / "x", "train", 2, 50, V, raw_tokens="uint32")
    np.testing.assert_array_equal(loader.shards[0][:], range(1000))
    with open(tmp_path / "x_train.bin", "ab") as file:
        file.write(b"\0\0")
    assert "truncated or damaged" in refusal(DataLoader, tmp_path / "x", "train", 2, 50, V, raw_tokens="uint32")


@pytest.mark.parametrize(
    "data", [b"", b"To be, or not to be.\n" * 80, b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 2)],
    ids=["empty", "text", "Megatron"],
)  # fmt: skip
def test_whatever_is_no_token_file_by_its_first_bytes_is_refused_with_what_to_do(tmp_path, data):
    (tmp_path / "x_train.bin").write_bytes(data)
    message = refusal(DataLoader, tmp_path / "x", "train", 1, 1, V)
    assert message.startswith(f"{tmp_path}/x_train.bin: ")
    assert "--raw-tokens" in message and "python dev/data/text.py" in message
    named = str(tmp_path / "x_train.bin")
    assert message == refusal(check_both_splits, named, None)


def test_a_folder_without_a_dataset_and_two_datasets_of_one_name_are_asked_about(tmp_path):
    assert "python dev/data/text.py" in refusal(DataLoader, tmp_path, "train", 1, 1, V)
    write_tokens(tmp_path / "mine_train_000000.bin", [1, 2, 3])
    assert f"name a dataset in it (-i {tmp_path}/PREFIX)" in refusal(DataLoader, tmp_path, "train", 1, 1, V)
    write_tokens(tmp_path / "x_train.bin", [1, 2, 3])
    np.save(tmp_path / "x_train.npy", np.arange(3))
    message = refusal(DataLoader, tmp_path / "x", "train", 1, 1, V)
    assert "x_train.bin" in message and "x_train.npy" in message and "-i" in message


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", "<i8"])
def test_the_tokens_of_a_npy_are_numpys(tmp_path, dtype):
    """As build-nanogpt writes its shards. The header is none of them, whatever the file's name."""
    for shard in range(2):
        np.save(tmp_path / f"x_train_{shard:06d}.npy", np.arange(shard, 101 + shard).astype(dtype))
    np.save(tmp_path / "val.npy", np.arange(7, 108).astype(dtype))
    loader = DataLoader(tmp_path / "x", "train", 2, 50, V, raw_tokens="uint8")
    assert [file.name for file in loader.files] == ["x_train_000000.npy", "x_train_000001.npy"]
    for shard in range(2):
        inputs, targets = batch(loader)
        np.testing.assert_array_equal(np.ravel(inputs), np.arange(shard, 100 + shard))
        np.testing.assert_array_equal(np.ravel(targets), np.arange(1 + shard, 101 + shard))
    assert batch(DataLoader(tmp_path, "val", 1, 50, V))[0][0, 0] == 7
    os.rename(tmp_path / "val.npy", tmp_path / "y_val.bin")
    assert batch(DataLoader(tmp_path / "y", "val", 1, 50, V))[0][0, 0] == 7


def test_a_npy_of_anything_else_is_refused_and_no_pickle_is_opened(tmp_path, monkeypatch):
    class Opened:
        def __reduce__(self):
            return os.system, ("touch opened",)

    def message(array=None, data=None):
        if array is not None:
            np.save("x_train.npy", array)
        if data is not None:
            Path("x_train.npy").write_bytes(data)
        found = refusal(DataLoader, "x", "train", 1, 1, V)
        assert found.startswith("x_train.npy: ")
        return found

    monkeypatch.chdir(tmp_path)
    assert "2 x 3 of int64" in message(np.zeros((2, 3), int))
    assert "of float64" in message(np.zeros(9))
    assert "NumPy cannot map it" in message(np.array([Opened()]))
    assert "0 tokens" in message(np.zeros(0, np.uint16))
    assert "token 70000 is outside" in message(np.array([1, 70000, 2]))
    np.save("x_train.npy", np.arange(9, dtype=np.uint16))
    whole = Path("x_train.npy").read_bytes()
    assert "truncated" in message(data=whole[:-1]) and "truncated" in message(data=whole[:50])
    assert os.listdir() == ["x_train.npy"]


@pytest.mark.parametrize("folder", ["a [1]", "b*", "what?", "[!x]", "two words"])
@pytest.mark.parametrize("prefix", ["x", "x [v2]", "y*"])
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
    """A sparse file of more than 2 GiB, opened and read at both ends within 500 MB of memory."""
    size = 1_100_000_000
    with open(tmp_path / "x_train.bin", "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, size, *[0] * 253))
        file.truncate(1024 + 2 * size)
    program = (
        "import re, sys, numpy as np\n"
        "from llmc.data.dataloader import DataLoader\n"
        "loader = DataLoader(sys.argv[1], 'train', 4, 1024, 50257, shuffle_seed=1)\n"
        "inputs = np.empty((4, 1024), np.int32)\n"
        "for _ in range(100): loader.next_batch(inputs, inputs)\n"
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])\n"  # its own peak, no parent's
    )
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "x"], capture_output=True, text=True, check=True,
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )
    assert int(run.stdout) < 500_000  # KiB


def test_positions_are_sorted_by_token_and_counted():
    order, count = sort_by_token(np.array([[5, 0, 50256], [5, 5, 0]], dtype=np.int32))
    assert order.tolist() == [1, 5, 0, 3, 4, 2]
    assert count.tolist() == [2, 0, 3, 0, 0, 1]
    assert order.dtype == count.dtype == np.int32
    order, count = sort_by_token(np.array([65536 + 5, 5, 65536 + 5, 0], dtype=np.int32))  # beyond 16 bits
    assert order.tolist() == [3, 1, 0, 2] and count.tolist() == [1, 1, 2, 0]
