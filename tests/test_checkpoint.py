"""Models, debug states and training checkpoints: written and read back exactly, refused when damaged."""

import errno
import os
import re
import shutil
import struct
from pathlib import Path

import device
from conftest import refusal
from dev.debug_state import DebugState, read_debug_state, write_debug_state
from device.errors import UserError
from llmc.files.checkpoint import load_checkpoint, model_path, save_checkpoint
from llmc.files.checkpoint_dir import checkpoints, lock_checkpoints, newest_checkpoint, prune_checkpoints, read_record
from llmc.files.files import crc32_of
from llmc.files.model_file import conversion, read_model, read_model_header, write_model
from llmc.model.tensors import num_parameters
from llmc.step.generation import model_for_inference
from models import write_record
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest

TINY = GPT2Config(max_seq_len=7, vocab_size=11, num_layers=2, num_heads=3, channels=9)
N = num_parameters(TINY)
TOKENIZER = {"model_tokenizer.bin": b"tokens", "model_tokenizer.json": b"{}"}


@pytest.fixture
def params(rng):
    return rng.standard_normal(N).astype(np.float32)


@pytest.fixture
def model(tmp_path, params):
    write_model(tmp_path / "model.bin", TINY, params)
    return tmp_path / "model.bin"


@pytest.fixture
def checkpoint(tmp_path, params):
    return save_checkpoint(tmp_path / "run", 20, TINY, params, params + 1, params + 2, {"seed": 3}, TOKENIZER)


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flat(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.ravel() for tensor in tensors.values()])


def save(run, step, params, state=None, **options):
    return save_checkpoint(run, step, TINY, params, params, params, state or {}, **options)


def test_a_model_file_has_the_layout_of_llm_c_and_is_read_back_exactly(model, params):
    data = model.read_bytes()
    header = struct.unpack("<256i", data[:1024])
    assert header == (20240326, 3, 7, 11, 2, 3, 9, 128) + (0,) * 248
    np.testing.assert_array_equal(np.frombuffer(data, "<f4", offset=1024), params)
    assert read_model_header(model, GPT2Config) == TINY
    config, read = read_model(model, GPT2Config)
    assert config == TINY and list(read) == [name for name, _ in TINY.parameters()]
    np.testing.assert_array_equal(flat(read), params)


def test_llm_cs_bf16_file_is_written_and_read(tmp_path, model, params):
    """Version 5: the header of version 3, and each number rounded to bf16."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "model_bf16.bin"
    write_model(path, TINY, params, bf16=True)
    data = path.read_bytes()
    assert struct.unpack("<256i", data[:1024])[:2] == (20240326, 5)
    assert data[8:1024] == model.read_bytes()[8:1024]
    rounded = torch.from_numpy(params).bfloat16()
    assert data[1024:] == rounded.view(torch.int16).numpy().tobytes()
    config, read = read_model(path, GPT2Config)
    assert config == TINY and flat(read).dtype == np.float32
    np.testing.assert_array_equal(flat(read), rounded.float().numpy())
    os.truncate(path, path.stat().st_size - 2)
    assert "truncated or damaged" in refusal(read_model, path, GPT2Config)


def test_a_weight_that_bf16_cannot_hold_is_not_written_as_infinity(tmp_path, params):
    params[[5, 6]] = np.inf, np.nan  # which bf16 has, too
    write_model(tmp_path / "model.bin", TINY, params, bf16=True)
    params[7] = -3.4e38  # the largest of bf16 is 3.39e38
    assert "a weight is -3.4e+38" in refusal(write_model, tmp_path / "other.bin", TINY, params, True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("precision, bf16, line", [
    ("fp32", False, ""), ("fp32", True, "its weights are bf16 and become fp32"), ("bf16", True, ""),
    ("bf16", False, "its weights are fp32; the model computes with them rounded to bf16"),
])  # fmt: skip
def test_a_line_says_what_becomes_of_weights_of_another_type(tmp_path, params, precision, bf16, line, capsys):
    device.use("cpu")
    device.use_precision(precision)
    path = tmp_path / "model.bin"
    write_model(path, TINY, params, bf16)
    line = f"{path}: {line}" if line else ""
    assert conversion(path, GPT2Config) == line
    model = model_for_inference(GPT2, path, 4)
    assert capsys.readouterr().err == (f"{line}\n" if line else "")
    rounded = device.from_bf16(device.to_bf16(params))
    np.testing.assert_array_equal(
        device.to_floats(model.params_memory), rounded if "bf16" in line or precision == "bf16" else params
    )


def test_a_model_that_cannot_be_written_leaves_what_was_there(tmp_path, model, params):
    before = model.read_bytes()
    with pytest.raises(ValueError, match="expected"):
        write_model(model, TINY, params[:-1])
    assert model.read_bytes() == before
    assert "cannot be written" in refusal(write_model, tmp_path / "missing" / "model.bin", TINY, params)
    assert os.listdir(tmp_path) == ["model.bin"]


@pytest.mark.parametrize("field, value, words", [
    (0, 20240520, "found GPT-2 tokens"), (0, 7, "not a GPT-2 model"),
    (1, 1, "version 1; 3 (fp32) or 5 (bf16) is needed"), (2, 0, "max_seq_len is 0"), (4, 3, "bytes"),
    (5, 2, "9 channels cannot be split among 2 heads"), (1024 + 4 * N + 4, None, "damaged"), (1028, None, "truncated"),
    (10, None, "too short for a GPT-2 model"),
])  # fmt: skip
def test_a_header_that_makes_no_model_or_one_of_another_length_is_refused(model, field, value, words):
    """Without a value, the file has so many bytes."""
    if value is None:
        os.truncate(model, field)
    else:
        overwrite(model, 4 * field, struct.pack("<i", value))
    message = refusal(read_model, model, GPT2Config)
    assert str(model) in message and words in message


def test_a_model_that_is_not_there_is_refused_with_the_place_to_get_it(tmp_path):
    assert "is a directory" in refusal(read_model, tmp_path, GPT2Config)
    message = refusal(read_model, tmp_path / "gpt2_124M.bin", GPT2Config)
    assert "gpt2_124M.bin: no such file" in message and "dev/download_starter_pack.sh" in message


def test_a_debug_state_has_the_layout_of_llm_c_and_is_read_back_exactly(tmp_path, rng):
    B, T, V = 2, 5, TINY.vocab_size
    x, y = rng.integers(0, V, (2, B, T)).astype(np.int32)
    logits, grads = rng.standard_normal((B, T, V)).astype(np.float32), rng.standard_normal(N).astype(np.float32)
    path, written = tmp_path / "debug_state.bin", DebugState(x, y, logits, 5.25, grads)
    write_debug_state(path, written)
    data = path.read_bytes()
    assert struct.unpack("<5i", data[:20]) == (20240327, 2, B, T, 0)
    assert data[1024:] == x.tobytes() + y.tobytes() + logits.tobytes() + struct.pack("<f", 5.25) + grads.tobytes()
    for read, value in zip(read_debug_state(path, TINY), written, strict=True):
        np.testing.assert_array_equal(read, value, strict=not isinstance(value, float))

    larger = GPT2Config(7, 11, 3, 3, 9)
    assert "damaged" in refusal(read_debug_state, path, larger)
    overwrite(path, 4, struct.pack("<3i", 2, 2**31 - 1, 2**31 - 1))
    assert "damaged" in refusal(read_debug_state, path, TINY)
    overwrite(path, 4, struct.pack("<i", 1))
    assert "damaged" in refusal(read_debug_state, path, TINY)


def test_a_checkpoint_gives_back_all_it_was_given_with_the_files_of_a_tokenizer_or_none(tmp_path, params):
    state = {"sampler": 2**64 - 1, "data": {"epoch": 1, "batch": 7}, "rate": 0.1, "files": ("a", "b")}
    for step, tokenizer in (1234, TOKENIZER), (1235, {}):
        path = save_checkpoint(tmp_path, step, TINY, params, params + 1, params + 2, state, tokenizer)
        assert path == tmp_path / f"step_{step:08d}" == newest_checkpoint(tmp_path)
        config, read, m, v, read_state = load_checkpoint(path, GPT2Config)
        assert config == TINY
        for array, value in ((flat(read), params), (m, params + 1), (v, params + 2)):
            np.testing.assert_array_equal(array, value)
        assert read_state == state | {"step": step, "files": ["a", "b"]}
        np.testing.assert_array_equal(flat(read_model(path / "model.bin", GPT2Config)[1]), params)
        assert {*os.listdir(path)} == {"model.bin", "optimizer.bin", "state.json", *tokenizer}
        assert all((path / name).read_bytes() == content for name, content in tokenizer.items())
    assert [path.name for path in prune_checkpoints(tmp_path, 1, None)] == ["step_00001234"]
    assert os.listdir(tmp_path) == ["step_00001235"]


@pytest.mark.parametrize("name", ["model.bin", "optimizer.bin", "state.json", *TOKENIZER])
def test_one_changed_bit_anywhere_in_a_checkpoint_is_noticed(checkpoint, name, rng):
    file = checkpoint / name
    intact = file.read_bytes()
    for place in [0, len(intact) - 1, *rng.integers(0, len(intact), 40)]:
        if name == "state.json" and intact[place] in b" \n":
            continue  # layout between values, which means nothing
        damaged = bytearray(intact)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        message = refusal(load_checkpoint, checkpoint, GPT2Config)
        assert str(file) in message and "older checkpoint" in message


def test_a_damaged_model_of_a_checkpoint_is_refused_by_whatever_name_it_is_read(tmp_path, monkeypatch, params):
    """An exponent's bit: a model of the right size that computes nonsense."""
    monkeypatch.chdir(tmp_path)
    for step in (5, 20):
        saved = save("run", step, params) / "model.bin"
    Path("link.bin").symlink_to(saved)
    Path("link").symlink_to(saved.parent)
    overwrite(saved, 1024 + 403, bytes([saved.read_bytes()[1024 + 403] ^ 0x40]))
    for name in ["run", saved.parent, saved, saved.absolute(), "link", "link.bin"]:
        message = refusal(read_model, model_path(name), GPT2Config)
        assert "model.bin: damaged (its CRC-32 is not the recorded one); use " in message
        assert "run/step_00000005, which is complete; " in message
    shutil.copy(saved, "copy.bin")
    read_model("copy.bin", GPT2Config)  # no state.json records its checksum


class Crash(BaseException):
    pass


def fail_at(patch, number: int, error: BaseException) -> list:
    """The call to the system of this number, counted from 1, raises the error; after a crash there are no others.
    Returns the list of calls so far."""
    calls = []

    def failing(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) == number or len(calls) > number and isinstance(error, Crash):
                raise error
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        patch.setattr(os, name, failing(getattr(os, name)))
    return calls


@pytest.mark.parametrize("error", [Crash(), OSError(errno.EIO, os.strerror(errno.EIO))], ids=["crash", "EIO"])
@pytest.mark.parametrize("before, saved, called", [((1,), 2, None), ((1, 2), 2, None), ((1,), 2, "best")], ids=str)
def test_a_checkpoint_is_never_seen_half_written_whatever_call_is_the_last_or_fails(
    tmp_path, params, monkeypatch, error, before, saved, called
):
    """It is added to older ones, or takes the place of one. If the call fails that syncs the directory, nobody knows
    which of the two is on disk, and both stay."""
    calls, number = [None], 0
    while len(calls) >= number:
        number += 1
        run = tmp_path / f"run{number}"
        for step in before:
            save(run, step, params + step, name=called)
        with monkeypatch.context() as patch:
            calls = fail_at(patch, number, error)
            try:
                save(run, saved, params + saved, name=called)
            except Crash:
                pass
            except UserError as refused:
                assert error.strerror.lower() in str(refused) and "\n" not in str(refused)
        there = os.listdir(run)
        _, read, _, _, state = load_checkpoint(newest_checkpoint(run), GPT2Config)
        np.testing.assert_array_equal(flat(read), params + state["step"])
        want = [called] if called else [f"step_{step:08d}" for step in range(1, state["step"] + 1)]
        replaced = f"{want[-1]}.replaced.part"
        assert newest_checkpoint(run).name == (want[-1] if want[-1] in there else replaced)
        assert os.listdir(run) == there  # who only reads changes nothing
        assert isinstance(error, Crash) or {*want} <= {*there} <= {*want, replaced}
        lock_checkpoints(run).release()  # as a run that starts there
        assert sorted(os.listdir(run)) == want
        again = save(run, saved, params - 1, name=called)  # nothing is in the way
        np.testing.assert_array_equal(flat(load_checkpoint(again, GPT2Config)[1]), params - 1)
    assert state["step"] == saved and number > 8  # three files, two directories and their renames


def test_what_a_killed_run_left_goes_at_the_next_start_and_no_link_is_followed(tmp_path, params):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(run, 1, params)
    save(elsewhere, 1, params)
    for name in "step_00000002.part", "step_00000000.pruned.part", "best.replaced.part":
        shutil.copytree(run / "step_00000001", run / name)
    shutil.copytree(run / "step_00000001", run / "best")
    (run / "step_00000002.part" / "model.bin").unlink()
    (run / "step_00000002.part" / "model.bin").symlink_to(elsewhere)
    (run / "mine.part").mkdir()
    lock_checkpoints(run).release()
    assert sorted(os.listdir(run)) == ["best", "mine.part", "step_00000001"]
    for name in "step_00000003", "step_00000004":
        (run / name).symlink_to(elsewhere / "step_00000001")
    save(run, 3, params + 3)
    assert not (run / "step_00000003").is_symlink()
    assert [path.name for path in prune_checkpoints(run, 1, None)] == ["step_00000003", "step_00000001"]
    assert sorted(os.listdir(elsewhere / "step_00000001")) == ["model.bin", "optimizer.bin", "state.json"]
    (run / "step_00000005.part").symlink_to(elsewhere)
    assert "step_00000005: cannot be written (file exists)" in refusal(save, run, 5, params)
    assert os.listdir(elsewhere) == ["step_00000001"]


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_directory_that_is_removed_or_replaced_under_a_run_is_noticed(tmp_path, params, again):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")  # the directory itself may be a link
    lock = lock_checkpoints(tmp_path / "run")
    saved = save(lock.directory, 1, params)
    (tmp_path / "real").rename(tmp_path / "moved")
    if again:
        (tmp_path / "real").mkdir()
    message = refusal(save, lock.directory, 2, params)
    run = tmp_path / "run"
    assert message.startswith(f"{run}/step_00000002: cannot be written ({run} was removed or replaced under the run")
    assert not again or os.listdir(tmp_path / "real") == []
    shutil.rmtree(tmp_path / "real", ignore_errors=True)
    (tmp_path / "moved").rename(tmp_path / "real")
    assert newest_checkpoint(tmp_path / "run") == saved and save(lock.directory, 2, params)


@pytest.mark.parametrize("name", ["state.json", "model.bin", "optimizer.bin", "model_tokenizer.bin"])
@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_a_damaged_checkpoint_is_never_passed_over_in_silence(tmp_path, params, name, damage):
    for step in (5, 20, 100):
        save(tmp_path, step, params, tokenizer={"model_tokenizer.bin": b"token" * 99})
    for step, remedy in ((100, "use .*step_00000020, "), (20, "use .*step_00000005, "),
                         (5, "no older checkpoint")):  # fmt: skip
        file = tmp_path / f"step_{step:08d}" / name
        os.truncate(file, 100) if damage == "cut off" else os.unlink(file)
        message = refusal(newest_checkpoint, tmp_path)
        assert re.search(f"{re.escape(str(file))}: .*{remedy}.*move {file.parent} away", message), message
        if step > 5:
            shutil.rmtree(file.parent)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "1", '{"crc32": 0}', "\ud800"], ids=lambda text: text[:9])
def test_a_state_that_is_no_record_is_damaged(checkpoint, text):
    (checkpoint / "state.json").write_bytes(text.encode(errors="surrogatepass"))
    message = refusal(newest_checkpoint, checkpoint.parent)
    assert "state.json: damaged: not what was written; no older checkpoint" in message


def test_pruning_keeps_the_newest_and_what_other_runs_have(tmp_path, params):
    run = tmp_path / "run"
    for step, identity in ((1, "a"), (2, "b"), (3, "a"), (10, "a"), (2000, "b"), (3000, None)):
        save(run, step, params, {"run": identity} if identity else {})
    assert prune_checkpoints(run, 0, "a") == []
    os.truncate(run / "step_00000002" / "model.bin", 10)
    assert [path.name for path in prune_checkpoints(run, 2, "a")] == ["step_00000001"]
    assert sorted(path.name for path in run.iterdir()) == [f"step_{step:08d}" for step in (2, 3, 10, 2000, 3000)]
    assert prune_checkpoints(run, 2, "a") == []
    save(run, 1, params, {"run": "a"}, name="best")
    assert [path.name for path in prune_checkpoints(run, 1, "a")] == ["step_00000003"]
    assert checkpoints(run)[-1] == run / "best"


def test_a_header_of_another_length_than_the_script_says_is_not_written(tmp_path, params, monkeypatch):
    """A copy of GPT-2's script without its header() writes one of 2048 bytes."""
    monkeypatch.setattr(GPT2Config, "HEADER_BYTES", 2048)
    with pytest.raises(ValueError, match="train_gpt2_fp32.py: HEADER_BYTES is 2048, header.* has 1024 bytes"):
        write_model(tmp_path / "model.bin", TINY, params)
    assert not list(tmp_path.iterdir())


def test_what_no_run_has_made_is_never_removed(tmp_path, params, capsys):
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save(run, step, params, {"run": "a"})
    for name in "step_00000004.part", "best.part", "step_00000002.replaced.part", "step_00000009.pruned.part":
        for inner in ("notes.txt", "model.bin/thesis"):
            place = run / name
            (place / inner).parent.mkdir(parents=True)
            (place / inner).write_text("mine")
            for what in lambda: lock_checkpoints(run), lambda: save(run, 4, params):
                said = refusal(what)
                assert str(place) in said and "is not ours: move it away" in said
            assert (place / inner).read_text() == "mine"
            shutil.rmtree(place)
    (run / "step_00000002" / "notes.txt").write_text("mine")  # in a checkpoint
    assert "its notes.txt is not ours" in refusal(prune_checkpoints, run, 1, "a")
    assert sorted(os.listdir(run)) == ["step_00000002", "step_00000003"]
    assert "its notes.txt is not ours" in refusal(save, run, 2, params)
    assert (run / "step_00000002" / "notes.txt").read_text() == "mine"


def test_a_replaced_or_pruned_directory_that_cannot_be_removed_is_said(tmp_path, params, monkeypatch, capsys):
    run = tmp_path / "run"
    save(run, 1, params, {"run": "a"})

    def rmdir(*arguments, **more):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rmdir", rmdir)
    save(run, 1, params, {"run": "a"})
    save(run, 2, params, {"run": "a"})
    prune_checkpoints(run, 1, "a")
    said = capsys.readouterr().err
    for end in "replaced", "pruned":
        assert f"{run}/step_00000001.{end}.part: not removed (input/output error)" in said
    assert newest_checkpoint(run).name == "step_00000002"


def test_a_cut_optimizer_with_a_right_checksum_is_refused(checkpoint):
    for size in 1024, 1025, 1024 + 8 * N - 1, 0:
        os.truncate(checkpoint / "optimizer.bin", size)
        record = read_record(checkpoint)
        record["files"]["optimizer.bin"] = {"bytes": size, "crc32": crc32_of(checkpoint / "optimizer.bin")}
        write_record(checkpoint, record)
        said = refusal(load_checkpoint, checkpoint, GPT2Config)
        assert f"{checkpoint / 'optimizer.bin'}: cut off, or of another model" in said and "older checkpoint" in said
        os.truncate(checkpoint / "optimizer.bin", 1024 + 8 * N)
