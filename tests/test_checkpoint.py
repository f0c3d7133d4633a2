"""Models, debug states and training checkpoints: written and read back exactly, refused when damaged."""

import errno
import itertools
import json
import os
import re
import shutil
import struct
import zlib
from pathlib import Path

import device
from conftest import refusal
from device.errors import UserError
from llmc.files.checkpoint import (
    check_saved,
    checkpoints,
    conversion,
    load_checkpoint,
    lock_checkpoints,
    model_path,
    newest_checkpoint,
    prune_checkpoints,
    read_debug_state,
    read_model,
    read_model_header,
    save_checkpoint,
    write_debug_state,
    write_model,
)
from llmc.model.tensors import num_parameters
from llmc.model.weights import model_for_inference
from models import LLAMA_ODD, ODD, PYTHIA_ODD
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


def test_a_model_file_has_the_layout_of_llm_c(model, params):
    data = model.read_bytes()
    header = struct.unpack("<256i", data[:1024])
    assert header == (20240326, 3, 7, 11, 2, 3, 9, 128) + (0,) * 248
    np.testing.assert_array_equal(np.frombuffer(data, "<f4", offset=1024), params)


def test_a_model_is_read_back_exactly(model, params):
    assert read_model_header(model, GPT2Config) == TINY
    config, read = read_model(model, GPT2Config)
    assert config == TINY
    assert list(read) == [name for name, _ in TINY.parameters()]
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


@pytest.mark.parametrize("precision, bf16, line", [
    ("fp32", False, ""), ("fp32", True, "its weights are bf16 and become fp32"), ("bf16", True, ""),
    ("bf16", False, "its weights are fp32; forward and backward take them rounded to bf16"),
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


def test_pieces_of_a_model_are_written_as_the_whole(tmp_path, model, params):
    """Ranks that share a master copy out send it piece by piece."""
    cuts = [0, 1, 500, 501, 2000, params.size]
    write_model(tmp_path / "pieces.bin", TINY, (params[a:b] for a, b in itertools.pairwise(cuts)))
    assert (tmp_path / "pieces.bin").read_bytes() == model.read_bytes()


def test_a_model_that_cannot_be_written_leaves_what_was_there(tmp_path, model, params):
    before = model.read_bytes()
    with pytest.raises(ValueError, match="expected"):
        write_model(model, TINY, params[:-1])
    assert model.read_bytes() == before
    assert "cannot be written" in refusal(write_model, tmp_path / "missing" / "model.bin", TINY, params)
    assert os.listdir(tmp_path) == ["model.bin"]


def test_a_missing_model_is_refused_with_the_remedy(tmp_path):
    message = refusal(read_model, tmp_path / "gpt2_124M.bin", GPT2Config)
    assert "gpt2_124M.bin: no such file" in message and "dev/download_starter_pack.sh" in message


@pytest.mark.parametrize("version", [1, 77])
def test_other_model_versions_are_refused(model, version):
    overwrite(model, 4, struct.pack("<i", version))
    assert f"version {version}; 3 (fp32) or 5 (bf16) is needed" in refusal(read_model, model, GPT2Config)


@pytest.mark.parametrize(
    "field, value, words",
    [
        (2, 0, "max_seq_len is 0"),
        (4, 3, "bytes"),
        (5, 2, "9 channels cannot be split among 2 heads"),
    ],
)
def test_a_header_with_senseless_sizes_is_refused(model, field, value, words):
    overwrite(model, 4 * field, struct.pack("<i", value))
    message = refusal(read_model, model, GPT2Config)
    assert str(model) in message and words in message


@pytest.mark.parametrize("change", [-1, 4])
def test_a_model_of_the_wrong_length_is_refused(model, change):
    os.truncate(model, model.stat().st_size + change)
    assert "truncated or damaged" in refusal(read_model, model, GPT2Config)


def test_something_else_than_a_model_is_refused_by_what_it_is(tmp_path, model):
    overwrite(model, 0, struct.pack("<i", 20240520))
    assert "found GPT-2 tokens" in refusal(read_model, model, GPT2Config)
    model.write_bytes(b"<!DOCTYPE html>" * 100)
    assert "not a GPT-2 model" in refusal(read_model, model, GPT2Config)
    model.write_bytes(b"<!DOCTYPE html>")
    assert "too short for a GPT-2 model" in refusal(read_model, model, GPT2Config)
    assert "is a directory" in refusal(read_model, tmp_path, GPT2Config)


def test_a_debug_state_has_the_layout_of_llm_c_and_is_read_back_exactly(tmp_path, rng):
    B, T, V = 2, 5, TINY.vocab_size
    x, y = rng.integers(0, V, (2, B, T)).astype(np.int32)
    logits, grads = rng.standard_normal((B, T, V)).astype(np.float32), rng.standard_normal(N).astype(np.float32)
    path = tmp_path / "debug_state.bin"
    write_debug_state(path, TINY, x, y, logits, 5.25, grads)

    data = path.read_bytes()
    assert struct.unpack("<5i", data[:20]) == (20240327, 2, B, T, 0)
    assert data[1024:] == x.tobytes() + y.tobytes() + logits.tobytes() + struct.pack("<f", 5.25) + grads.tobytes()

    state = read_debug_state(path, TINY)
    assert state.loss == 5.25
    for name, value in {"x": x, "y": y, "logits": logits, "grads": grads}.items():
        read = getattr(state, name)
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)

    larger = GPT2Config(7, 11, 3, 3, 9)
    assert "damaged" in refusal(read_debug_state, path, larger)
    overwrite(path, 4, struct.pack("<i", 1))
    assert "version 1" in refusal(read_debug_state, path, TINY)
    overwrite(path, 4, struct.pack("<3i", 2, 0, T))
    assert "B 0" in refusal(read_debug_state, path, TINY)
    overwrite(path, 4, struct.pack("<3i", 2, 2**31 - 1, 2**31 - 1))
    assert "damaged" in refusal(read_debug_state, path, TINY)


def test_a_checkpoint_gives_back_all_it_was_given(tmp_path, params):
    state = {"sampler": 2**64 - 1, "data": {"epoch": 1, "batch": 7}, "rate": 0.1, "files": ("a", "b")}
    path = save_checkpoint(tmp_path / "run", 1234, TINY, params, params + 1, params + 2, state)
    assert path == tmp_path / "run" / "step_00001234"
    assert newest_checkpoint(tmp_path / "run") == path
    config, read, m, v, read_state = load_checkpoint(path, GPT2Config)
    assert config == TINY
    for array, value in ((flat(read), params), (m, params + 1), (v, params + 2)):
        np.testing.assert_array_equal(array, value)
    assert read_state == state | {"step": 1234, "files": ["a", "b"]}
    np.testing.assert_array_equal(flat(read_model(path / "model.bin", GPT2Config)[1]), params)


def test_a_checkpoint_of_the_same_step_is_replaced(checkpoint, params):
    save_checkpoint(checkpoint.parent, 20, TINY, params * 2, params, params, {"seed": 4})
    _, read, _, _, state = load_checkpoint(checkpoint, GPT2Config)
    np.testing.assert_array_equal(flat(read), params * 2)
    assert state["seed"] == 4
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


def test_a_checkpoint_holds_the_files_of_a_tokenizer_or_none(tmp_path, checkpoint, params):
    for name, content in TOKENIZER.items():
        assert (checkpoint / name).read_bytes() == content
    assert load_checkpoint(checkpoint, GPT2Config)[4]["seed"] == 3
    without = save_checkpoint(tmp_path / "run", 30, TINY, params, params, params, {})
    assert sorted(os.listdir(without)) == ["model.bin", "optimizer.bin", "state.json"]  # as before tokenizers were held
    assert load_checkpoint(newest_checkpoint(tmp_path / "run"), GPT2Config)[4] == {"step": 30}
    assert [path.name for path in prune_checkpoints(tmp_path / "run", 1, None)] == [checkpoint.name]
    assert os.listdir(tmp_path / "run") == [without.name]


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


@pytest.mark.parametrize("config", [ODD, LLAMA_ODD, PYTHIA_ODD], ids=lambda config: config.NAME)
def test_a_damaged_model_of_a_checkpoint_is_refused_by_whatever_name_it_is_read(tmp_path, monkeypatch, rng, config):
    """An exponent's bit: a model of the right size that computes nonsense."""
    monkeypatch.chdir(tmp_path)
    params = rng.standard_normal(num_parameters(config)).astype(np.float32)
    for step in (5, 20):
        save_checkpoint("run", step, config, params, params, params, {})
    saved = Path("run/step_00000020/model.bin")
    Path("link.bin").symlink_to(saved)
    Path("link").symlink_to("run/step_00000020")
    names = ["run", "run/step_00000020", saved, saved.absolute(), "link", "link.bin"]
    for name in names:
        read_model(model_path(name), type(config))
    shutil.copy(saved, "copy.bin")
    for file in saved, Path("copy.bin"):
        overwrite(file, config.HEADER_BYTES + 4 * 100 + 3, bytes([file.read_bytes()[config.HEADER_BYTES + 403] ^ 0x40]))
    for name in names:
        message = refusal(read_model, model_path(name), type(config))
        assert "model.bin: damaged (its CRC-32 is not the recorded one); use " in message
        assert message.endswith("run/step_00000005, an older checkpoint that is complete")
    read_model("copy.bin", type(config))  # of which nothing is recorded
    (saved.parent / "state.json").write_text("{")
    assert "state.json: damaged" in refusal(read_model, saved, type(config))


@pytest.mark.parametrize("name", TOKENIZER)
@pytest.mark.parametrize("damage", ["a bit", "missing", "a pipe"])
def test_a_checkpoint_whose_tokenizer_is_not_the_saved_one_names_no_model(monkeypatch, checkpoint, name, damage):
    monkeypatch.chdir(checkpoint.parent)
    Path("link").symlink_to(checkpoint)
    names = [".", checkpoint.name, f"{checkpoint.name}/model.bin", "link"]
    for path in names:
        assert model_path(path).is_file()
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).unlink()
    if damage == "a bit":
        (checkpoint / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "a pipe":
        os.mkfifo(checkpoint / name)
    want = {"a bit": "damaged (its CRC-32", "missing": "no such file", "a pipe": "not a regular file"}[damage]
    for path in names:
        message = refusal(model_path, path)
        assert f"{name}: {want}" in message and "older checkpoint" in message


def test_a_directory_of_checkpoints_stands_for_its_newest_and_says_so(tmp_path, params, capsys):
    for step in (5, 100, 20):
        checkpoint = save_checkpoint(tmp_path / "run", step, TINY, params, params, params, {})
    assert model_path(tmp_path / "run") == tmp_path / "run" / "step_00000100" / "model.bin"
    assert capsys.readouterr() == ("", f"{tmp_path / 'run'}: its newest checkpoint is step_00000100\n")
    assert model_path(checkpoint) == checkpoint / "model.bin"
    os.truncate(tmp_path / "run" / "step_00000100" / "optimizer.bin", 10)
    assert "optimizer.bin: 10 bytes" in refusal(model_path, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert "empty: neither a model.bin nor a checkpoint in it" in refusal(model_path, tmp_path / "empty")


def test_who_reads_a_directory_changes_nothing_there(checkpoint):
    """A run may be about to put another in the place of this one; or it was killed then."""
    replaced = checkpoint.rename(checkpoint.with_name("step_00000020.replaced.part"))
    assert checkpoints(replaced.parent) == [replaced] == [newest_checkpoint(replaced.parent)]
    read_model(model_path(replaced.parent), GPT2Config)
    assert os.listdir(replaced.parent) == [replaced.name]
    shutil.copytree(replaced, checkpoint)
    assert checkpoints(replaced.parent) == [checkpoint]
    shutil.rmtree(checkpoint)
    lock_checkpoints(replaced.parent).release()  # as a run does
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


class Crash(BaseException):
    pass


@pytest.mark.parametrize("there, called", [((1,), None), ((1, 2), None), ((2,), None), ((1,), "best")], ids=str)
def test_a_checkpoint_is_never_seen_half_written(tmp_path, params, monkeypatch, there, called):
    """Whatever call to the system is the last before a crash, the newest checkpoint is one that loads."""

    def save_and_crash(run, last_call):
        """Crashes after so many calls, cleaning nothing up. Whether the save got through before."""
        calls = 0

        def counted(function):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > last_call:
                    raise Crash
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "rename", "mkdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            patch.setattr("llmc.files.checkpoint._remove", lambda *directories: None)
            patch.setattr("pathlib.Path.unlink", lambda *args, **kwargs: None)
            try:
                save_checkpoint(run, 2, TINY, params + 2, params, params, {}, name=called)
            except Crash:
                return False
        return True

    last_call, saved = 0, False
    while not saved:
        run = tmp_path / f"run{last_call}"
        for step in there:
            save_checkpoint(run, step, TINY, params + step, params, params, {}, name=called)
        saved = save_and_crash(run, last_call)
        _, read, _, _, state = load_checkpoint(newest_checkpoint(run), GPT2Config)
        np.testing.assert_array_equal(flat(read), params + state["step"])
        again = save_checkpoint(run, 2, TINY, params - 1, params, params, {}, name=called)  # nothing is in the way
        np.testing.assert_array_equal(flat(load_checkpoint(again, GPT2Config)[1]), params - 1)
        assert sorted(os.listdir(run)) == [called] if called else not list(run.glob("*.part"))
        last_call += 1
    assert last_call >= 10  # three files, two directories and their renames


@pytest.mark.parametrize("number, there, saved, called", [
    (errno.ENOSPC, (1, 2), 3, None), (errno.EIO, (1, 2), 3, None), (errno.ENOSPC, (1,), 1, None),
    (errno.ENOSPC, (1,), 2, "best"),
])  # fmt: skip
def test_whatever_call_fails_what_was_there_stays_and_nothing_else_is_left(
    tmp_path, params, monkeypatch, number, there, saved, called
):
    """A checkpoint is added to older ones, or takes the place of one: each call to the system fails in turn."""
    calls, step, fails_at = 1, 0, 0

    def failing(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(number, os.strerror(number))
            return function(*args, **kwargs)

        return call

    while calls >= fails_at:
        run, calls, fails_at = tmp_path / f"run{fails_at}", 0, fails_at + 1
        for step in there:
            save_checkpoint(run, step, TINY, params + step, params, params, {}, name=called)
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "rename", "mkdir"):
                patch.setattr(os, name, failing(getattr(os, name)))
            try:
                save_checkpoint(run, saved, TINY, params + saved, params, params, {}, name=called)
            except UserError as error:
                assert os.strerror(number).lower() in str(error) and "\n" not in str(error)
        _, read, _, _, state = load_checkpoint(newest_checkpoint(run), GPT2Config)
        step = state["step"]
        np.testing.assert_array_equal(flat(read), params + step)
        assert sorted(os.listdir(run)) == ([called] if called else [f"step_{n:08d}" for n in range(1, step + 1)])
    assert step == saved and fails_at > 8


def test_what_a_killed_run_left_is_cleared_away_by_the_next_save(checkpoint, params):
    (checkpoint.parent / "step_00000030.part").mkdir()
    (checkpoint.parent / "step_00000030.part" / "model.bin.7.part").write_bytes(b"x")
    save_checkpoint(checkpoint.parent, 40, TINY, params, params, params, {})
    assert sorted(os.listdir(checkpoint.parent)) == ["step_00000020", "step_00000040"]


def test_a_checkpoint_directory_that_cannot_be_made_is_refused(tmp_path, params):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(save_checkpoint, tmp_path / "file", 1, TINY, params, params, params, {})


@pytest.mark.parametrize("name", ["state.json", "model.bin", "optimizer.bin", "model_tokenizer.bin"])
@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_a_damaged_checkpoint_is_never_passed_over_in_silence(tmp_path, params, name, damage):
    run = tmp_path / "run"
    for step in (5, 20, 100):
        save_checkpoint(run, step, TINY, params, params, params, {}, {"model_tokenizer.bin": b"token" * 99})
    for step, remedy in ((100, "to resume from .*step_00000020, "), (20, "to resume from .*step_00000005, "),
                         (5, "there is no older checkpoint")):  # fmt: skip
        file = run / f"step_{step:08d}" / name
        os.truncate(file, 100) if damage == "cut off" else os.unlink(file)
        message = refusal(newest_checkpoint, run)
        assert re.search(f"{re.escape(str(file))}: .*{remedy}.*remove {file.parent}", message), message
        if step > 5:
            shutil.rmtree(file.parent)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "1", '{"crc32": 0}', "\ud800"], ids=lambda text: text[:9])
def test_a_state_that_is_no_record_is_damaged(checkpoint, text):
    (checkpoint / "state.json").write_bytes(text.encode(errors="surrogatepass"))
    assert "state.json: damaged; there is no older checkpoint" in refusal(newest_checkpoint, checkpoint.parent)


def test_pruning_keeps_the_newest_and_what_other_runs_have(tmp_path, params):
    run = tmp_path / "run"
    for step, identity in ((1, "a"), (2, "b"), (3, "a"), (10, "a"), (2000, "b"), (3000, None)):
        save_checkpoint(run, step, TINY, params, params, params, {"run": identity} if identity else {})
    assert prune_checkpoints(run, 0, "a") == []
    os.truncate(run / "step_00000002" / "model.bin", 10)
    assert [path.name for path in prune_checkpoints(run, 2, "a")] == ["step_00000001"]
    assert sorted(path.name for path in run.iterdir()) == [f"step_{step:08d}" for step in (2, 3, 10, 2000, 3000)]
    assert prune_checkpoints(run, 2, "a") == []
    save_checkpoint(run, 1, TINY, params, params, params, {"run": "a"}, name="best")
    assert [path.name for path in prune_checkpoints(run, 1, "a")] == ["step_00000003"]
    assert checkpoints(run)[-1] == run / "best"


def test_a_header_of_another_length_than_the_script_says_is_not_written(tmp_path, monkeypatch):
    """A copy of GPT-2's script without its header() writes one of 2048 bytes."""
    monkeypatch.setattr(GPT2Config, "HEADER_BYTES", 2048)
    params = np.zeros(num_parameters(TINY), np.float32)
    with pytest.raises(ValueError, match="train_gpt2_fp32.py: HEADER_BYTES is 2048, header.* has 1024 bytes"):
        write_model(tmp_path / "model.bin", TINY, params)
    assert not list(tmp_path.iterdir())


def test_a_long_check_says_how_far_it_is(checkpoint, monkeypatch, capsys):
    check_saved(checkpoint / "model.bin")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("llmc.files.checkpoint.SECONDS", -1)
    check_saved(checkpoint / "model.bin")
    size = (checkpoint / "model.bin").stat().st_size
    assert capsys.readouterr() == ("", f"checking {checkpoint / 'model.bin'}: 100% of {size:,} bytes\n")


def test_an_optimizer_state_of_another_model_is_refused(tmp_path, checkpoint, params):
    """Both files intact by themselves, but not a pair."""
    other_config = GPT2Config(7, 11, 1, 3, 9)
    other_params = params[: num_parameters(other_config)]
    other = save_checkpoint(tmp_path / "other", 20, other_config, other_params, other_params, other_params, {})
    record, other_record = (json.loads((path / "state.json").read_text()) for path in (checkpoint, other))
    record["files"]["optimizer.bin"] = other_record["files"]["optimizer.bin"]
    del record["crc32"]
    record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (checkpoint / "state.json").write_text(json.dumps(record))
    os.replace(other / "optimizer.bin", checkpoint / "optimizer.bin")
    assert "belongs to another model" in refusal(load_checkpoint, checkpoint, GPT2Config)
