"""What happens to real runs: directories are used twice, flags forgotten, files damaged, disks full, runs killed."""

import itertools
import os
import re
import shutil
import signal
import socket
import time
from functools import partial
from pathlib import Path

import device
import generate
from conftest import refusal
from dev.data.common import load_tokenizer
from dev.hf import export_hf, import_hf
from kernels import classifier
from llmc.data.batches import Batches
from llmc.data.dataloader import DataLoader
from llmc.data.token_file import Tokens, write_tokens
from llmc.files.checkpoint import model_path
from llmc.files.checkpoint_dir import lock_checkpoints, read_record
from llmc.files.model_file import read_model, write_model
from llmc.model.tensors import num_parameters
from llmc.run.logger import Logger, read_log
from llmc.step.update import adamw_update
from models import write_record
from support.folders import checkpoint_bytes, limit_files, output_of_trainer, start_trainer, steps_of, write_data
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest

V, B, T = 257, 2, 16
FLAGS = ["-e", "layers=2,heads=2,channels=32,maxT=64", "-i", "data", "-b", str(B), "-t", str(T), "--device", "cpu",
         "-g", "0", "-m", "2", "-v", "50"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, rng):
    write_data(tmp_path, rng)
    return tmp_path


start, run = partial(start_trainer, flags=FLAGS), partial(output_of_trainer, flags=FLAGS)


@pytest.fixture
def run_here(trainer_here):
    """`run` in this process."""
    return lambda folder, *more, code=0, flags=FLAGS: trainer_here(GPT2, folder, [*flags, *more], code)


def without(flag: str) -> list[str]:
    """FLAGS but for this one and its value."""
    at = FLAGS.index(flag)
    return FLAGS[:at] + FLAGS[at + 2 :]


SAVE = ["--checkpoint-dir", "run"]


# A directory that is used twice


def test_a_new_run_does_not_start_where_another_has_checkpoints(folder, run_here):
    run_here(folder, *SAVE, "-x", "3", "-n", "1")
    before = sorted(path.name for path in (folder / "run").iterdir())
    (folder / "run.log").write_text("s:0 tel:1.0000\n")
    out, error = run_here(folder, *SAVE, "-x", "2", "-nk", "1", "-o", "run.log", code=1)
    assert error == (
        "error: run has checkpoints of another run, the newest step_00000003: go on from it with -y 1, or choose "
        "another --checkpoint-dir\n"
    )
    assert sorted(path.name for path in (folder / "run").iterdir()) == before and not steps_of(out)
    assert (folder / "run.log").read_text() == "s:0 tel:1.0000\n"


def test_a_run_has_its_directory_and_its_log_for_itself_until_it_is_killed(folder, monkeypatch):
    monkeypatch.setattr("llmc.files.directory.PATIENCE", 0)
    monkeypatch.chdir(folder)
    process = start(folder, *SAVE, "-x", "100000", "-n", "1", "-nk", "2", "-o", "run.log")
    for line in process.stdout:
        if line.startswith("saved run/step_00000002"):
            break
    for claim, place in (lock_checkpoints, "run"), (Logger, "run.log"):
        holder = f"process {process.pid} on {socket.gethostname()}"
        assert f"{place} is in use by {holder}: wait for it to end, or choose another " in refusal(claim, place)
    assert read_model(model_path("run"), GPT2Config)  # a reader needs no lock
    process.kill()
    process.communicate()
    assert lock_checkpoints("run") and Logger("run.log")


def test_a_resumed_run_waits_for_the_one_that_is_dying_and_takes_its_last_checkpoint(folder, run_here, monkeypatch):
    run_here(folder, *SAVE, "-x", "4", "-n", "2")
    last = folder / "run" / "step_00000004"
    last.rename(folder / "not yet")
    monkeypatch.chdir(folder)
    dying = lock_checkpoints("run")
    process = start(folder, *SAVE, "-y", "1", "-x", "5")
    said = process.stderr.readline()
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert said == f"run is in use by {holder}: waiting up to 30 s for it to end\n"
    (folder / "not yet").rename(last)
    dying.release()
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "") and list(steps_of(out)) == [5]
    assert sorted(os.listdir("run")) == [f"step_{step:08d}" for step in (2, 4, 5)]


# Places that are none


def test_a_disk_that_is_full_at_the_start_is_refused_there(folder):
    out, error = run(folder, *SAVE, "-x", "1", code=1, **limit_files(0))
    assert error == "error: run: cannot be written (file too large); choose another --checkpoint-dir\n"
    assert not steps_of(out) and not (folder / "run").exists()


def test_an_import_takes_the_place_of_a_model_and_of_nothing_else(folder):
    (folder / "notes").write_text("buy milk")
    said = refusal(import_hf.main, [str(folder), "-o", str(folder / "notes")])
    assert "notes: exists and is not a model: name another file with -o" in said
    assert (folder / "notes").read_text() == "buy milk"


# What a resumed run computes


def model_at(path: Path, seed: int) -> str:
    config = GPT2Config(64, V, 2, 2, 32)
    write_model(path, config, np.random.default_rng(seed).standard_normal(num_parameters(config), np.float32) / 50)
    return path.name


def test_a_resumed_run_takes_the_model_that_it_was_started_with_and_no_other(folder, run_here):
    first, other = model_at(folder / "first.bin", 0), model_at(folder / "other.bin", 1)
    base = without("-e")
    run_here(folder, "-e", first, *SAVE, "-x", "1", flags=base)
    for given in other, "layers=1,heads=2,channels=32,maxT=64", "gone.bin":
        out, error = run_here(folder, "-e", given, *SAVE, "-y", "1", "-x", "9", flags=base, code=1)
        assert error == (
            f"error: cannot resume: -e {given} is another model than run/step_00000001, whose run was started with -e "
            "first.bin: leave -e out\n"
        ) and not steps_of(out)  # fmt: skip
    for n, given in enumerate([first, str(folder / first), "layers=2,heads=2,channels=32,maxT=64", "run", None], 2):
        out, _ = run_here(folder, *(["-e", given] if given else []), *SAVE, "-y", "1", "-x", str(n), flags=base)
        assert list(steps_of(out)) == [n]
    (folder / first).unlink()  # as where the job goes on on another machine
    assert read_record(folder / "run" / "step_00000006")["state"]["flags"]["model"] == first
    out, _ = run_here(folder, "-e", first, *SAVE, "-y", "1", "-x", "7", flags=base)
    assert list(steps_of(out)) == [7]
    _, error = run_here(folder, "-e", "run/step_00000001", *SAVE, "-y", "1", "-x", "8", flags=base, code=1)
    assert "-e run/step_00000001 is another model than run/step_00000007, whose" in error


def test_a_resumed_run_keeps_the_flags_that_it_is_not_given_again(folder, run_here):
    settings = ["-a", "relu", "-k", "cosine", "-u", "2", "-q", "0.1", "-c", "0.1", "--grad-clip", "0.5", "--seed", "3",
                "-l", "1e-2", "-d", str(2 * B * T)]  # fmt: skip
    whole, _ = run_here(folder, *SAVE, *settings, "-x", "6")
    want = checkpoint_bytes(folder, 6)
    shutil.rmtree(folder / "run")
    run_here(folder, *SAVE, *settings, "-x", "6", "-n", "3")
    shutil.rmtree(folder / "run" / "step_00000006")
    bare = ["--device", "cpu", "-g", "0", "-m", "2", "-v", "50"]  # no data, batch, length, model
    out, _ = run_here(folder, *SAVE, "-y", "1", flags=bare)
    assert "| attention             | relu " in out
    assert steps_of(out) == {step: loss for step, loss in steps_of(whole).items() if step > 3}
    assert checkpoint_bytes(folder, 6) == want


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    write_data(folder, np.random.default_rng(0))
    run(folder, *SAVE, "-x", "2", "--seed", "3", "-l", "1e-3")
    return folder


@pytest.mark.parametrize("flags, was", [
    ("-a relu", "--attention was softmax and is now relu"), ("--dropout 0.5", "--dropout was 0.0 and is now 0.5"),
    ("-k linear", "--schedule was constant"), ("-u 7", "--warmup was 0"), ("-q 1", "--final-fraction was 0.0"),
    ("--seed 4", "--seed was 3"), ("-b 4", "--batch-size was 2"), ("-t 8", "--sequence-length was 16"),
    ("-d 64", "--total-batch-size was 32 and is now 64"), ("--beta1 0.8", "--beta1 was 0.9"),
    ("--beta2 0.95", "--beta2 was 0.999 and is now 0.95"),
])  # fmt: skip
def test_a_flag_that_contradicts_the_checkpoint_is_refused(finished, run_here, flags, was):
    out, error = run_here(finished, *SAVE, "-y", "1", "-x", "9", *flags.split(), code=1)  # the last of two -b counts
    assert re.fullmatch(rf"error: cannot resume: {was}.*; leave it out, or start another run\n", error)
    assert not steps_of(out)


def copy_of(finished: Path, tmp_path: Path, **recorded: object) -> Path:
    """A copy of a run's folder, whose checkpoint has recorded other flags than the run's. As in old checkpoints,
    there is no precision else, and nothing of AdamW's betas and eps."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    record = read_record(folder / "run" / "step_00000002")
    for name in ("precision", "beta1", "beta2", "eps"):
        del record["state"]["flags"][name]
    record["state"]["flags"] |= recorded
    write_record(folder / "run" / "step_00000002", record)
    return folder


@pytest.mark.parametrize("flags, lines", [
    ("-l 2e-3 --grad-clip 1", "--learning-rate was 0.001 and is now 0.002\n--grad-clip was 0.0 and is now 1.0\n"
     "--max-steps was 2 and is now 3\nthe run was in tf32"),
    ("", "the run was in tf32 and goes on in fp32, which is what CPU"),
    ("-f 1", "the run was in tf32 and goes on in fp32, which is what CPU"),
    ("--precision fp32", "the run was in tf32 and goes on in fp32\n"),
    ("--precision bf16", "the run was in tf32 and goes on in bf16\n"),
])  # fmt: skip
def test_what_may_change_is_said(finished, tmp_path, run_here, flags, lines):
    """The checkpoint is of a GPU, which has computed in TF32."""
    folder = copy_of(finished, tmp_path, precision="tf32")
    out, _ = run_here(folder, *SAVE, "-y", "1", "-x", "3", *flags.split())
    assert lines in out and list(steps_of(out)) == [3]


def test_weights_beyond_what_bf16_holds_stop_a_run_before_another_parameter_changes(folder, run_here):
    """Its copy of them is infinite, and the master copy, which a checkpoint holds, is not."""
    flags = "--precision", "bf16", "-l", "3.4e38", "-c", "0", "-v", "0", "-x", "4"
    _, error = run_here(folder, *SAVE, *flags, code=1)
    assert error.startswith("error: step 2: its loss (nan) or gradients are not finite, so all parameters are left as")
    saved = {path.name: path.read_bytes() for path in (folder / "run" / "step_00000001").iterdir()}
    _, tensors = read_model(folder / "run" / "step_00000001" / "model.bin", GPT2Config)
    assert 3.39e38 < max(np.abs(tensor).max() for tensor in tensors.values()) < np.inf
    _, error = run_here(folder, *SAVE, "-y", "1", code=1)
    assert error.startswith("error: step 2: ") and error.count("\n") == 1
    assert saved == {path.name: path.read_bytes() for path in (folder / "run" / "step_00000001").iterdir()}


def test_a_model_without_dropout_refuses_a_rate_also_if_a_checkpoint_recorded_it(finished, tmp_path, run_here):
    line = "error: --dropout 0.1: GPT-2 trains without dropout, as llm.c does; {}\n"
    _, error = run_here(finished, "-x", "1", "--dropout", "0.1", code=1)
    assert error == line.format("leave it out")
    _, error = run_here(copy_of(finished, tmp_path, dropout=0.1), *SAVE, "-y", "1", "-x", "3", code=1)
    assert error == line.format("start another run")


def test_a_run_keeps_its_betas_and_those_of_an_old_checkpoint_are_the_ones_that_it_was_trained_with(
    finished, tmp_path, run_here
):
    folder = copy_of(finished, tmp_path)
    out, _ = run(folder, *SAVE, "-y", "1", "-x", "3", script="train_gpt2.py")
    assert "| beta1, beta2, eps     | 0.9, 0.999, 1e-08 " in out and list(steps_of(out)) == [3]
    out, _ = run(folder, "--checkpoint-dir", "new", "-x", "1", script="train_gpt2.py")
    assert "| beta1, beta2, eps     | 0.9, 0.95, 1e-08 " in out  # llm.c's mainline
    out, _ = run_here(folder, "--checkpoint-dir", "new", "-y", "1", "-x", "2", "--eps", "1e-6")
    assert "| beta1, beta2, eps     | 0.9, 0.95, 1e-06 " in out and "--eps was 1e-08 and is now 1e-06\n" in out


@pytest.mark.parametrize("val", [[], ["-j", "data"]], ids=" ".join)
def test_data_that_is_not_where_the_checkpoint_says_is_named_with_the_flag_for_another_place(folder, run_here, val):
    run_here(folder, *SAVE, "-x", "1", *val)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    checkpoint, bare = ["--checkpoint-dir", "../run", "-y", "1", "-x", "2"], without("-i")
    _, error = run_here(elsewhere, *checkpoint, flags=bare, code=1)
    assert error == (
        f"error: ../run/step_00000001 was trained with -i data, and there is no such data below {elsewhere}: -i may "
        "name where it is now\n"
    )
    out, _ = run_here(elsewhere, *checkpoint, "-i", "../data", flags=bare)
    assert list(steps_of(out)) == [2] and "| val data              | ../data " in out


def test_flash_attention_is_kept_and_softmax_may_take_its_place(folder, run_here):
    model = ["-e", "layers=1,heads=1,channels=64,maxT=64", *without("-e")]
    whole, _ = run_here(folder, *SAVE, "-x", "3", "-n", "1", "-a", "flash", flags=model)
    shutil.rmtree(folder / "run" / "step_00000003")
    out, _ = run_here(folder, *SAVE, "-y", "1", flags=model)
    assert "| attention             | flash " in out and steps_of(out) == {3: steps_of(whole)[3]}
    out, _ = run_here(folder, *SAVE, "-y", "1", "-x", "4", "-a", "softmax", flags=model)
    assert "--attention was flash and is now softmax: the same function" in out and list(steps_of(out)) == [4]


def test_other_data_of_the_same_size_is_refused_and_makes_another_run(folder, run_here):
    run_here(folder, *SAVE, "-x", "2")
    with open(folder / "data_train.bin", "r+b") as file:
        file.seek(1024)
        file.write(b"\x01\x00")
    _, error = run_here(folder, *SAVE, "-y", "1", "-x", "3", code=1)
    assert re.match("error: cannot resume: fingerprint of the training data was .* and is now ", error)
    run_here(folder, "--checkpoint-dir", "other", "-x", "2")
    runs = [read_record(folder / name / "step_00000002")["state"]["run"] for name in ("run", "other")]
    assert runs[0] != runs[1]


def test_tokens_that_the_fingerprint_does_not_see_are_noticed_and_hashed_only_if_the_file_has_changed(
    folder, run_here, rng, monkeypatch
):
    tokens, hashed, sha256 = rng.integers(0, V, 20_000), [], Tokens.sha256
    monkeypatch.setattr(Tokens, "sha256", lambda of: (hashed.append(of.path), sha256(of))[1])
    write_tokens(folder / "data_train.bin", tokens)
    os.utime(folder / "data_train.bin", (-5, -5))  # a time before 1970
    run_here(folder, *SAVE, "-x", "2")
    run_here(folder, *SAVE, "-y", "1", "-x", "3")
    assert len(hashed) == 1  # the second run believes size, time and inode
    write_tokens(folder / "data_train.bin", np.r_[tokens[:5000], (tokens[5000:6000] + 1) % V, tokens[6000:]])
    _, error = run_here(folder, *SAVE, "-y", "1", "-x", "4", code=1)
    assert error.startswith("error: cannot resume: data_train.bin has other tokens than when the checkpoint was saved")
    write_tokens(folder / "data_train.bin", tokens)  # another file with the same tokens
    run_here(folder, *SAVE, "-y", "1", "-x", "4")
    record = read_record(folder / "run" / "step_00000004")
    del record["state"]["loader"]["files"]  # as older checkpoints
    write_record(folder / "run" / "step_00000004", record)
    run_here(folder, *SAVE, "-y", "1", "-x", "5")
    assert len(hashed) == 4 and read_record(folder / "run" / "step_00000005")["state"]["loader"]["files"]


def write_one(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\1\0")


@pytest.mark.parametrize("change", [partial(os.truncate, length=1100), write_one], ids=["cut", "written to"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_data_that_change_under_a_run_end_it_with_a_line_and_a_checkpoint(folder, run_here, monkeypatch, split, change):
    whole, _ = run_here(folder, "-x", "6", "-v", "2")
    file, calls, next_batch = folder / f"data_{split}.bin", itertools.count(1), DataLoader.next_batch
    before = file.read_bytes()

    def changing(loader, *arrays) -> None:
        if loader.files[0].name == file.name and next(calls) == 5:
            change(file)  # in the fifth step, or in the third validation, which is before it
        next_batch(loader, *arrays)

    with monkeypatch.context() as patch:
        patch.setattr(DataLoader, "next_batch", changing)
        out, error = run_here(folder, *SAVE, "-x", "6", "-v", "2", code=1)
    assert list(steps_of(out)) == [1, 2, 3, 4] and "stopped by data that cannot be read after 4 of 6 steps" in out
    assert error == (
        f"error: data_{split}.bin: it has changed since it was opened, so its tokens are not what they were; the run "
        "goes on from run/step_00000004 with -y 1\n"
    )
    file.write_bytes(before)
    out, _ = run_here(folder, *SAVE, "-y", "1", "-v", "2")
    assert steps_of(out) == {n: loss for n, loss in steps_of(whole).items() if n > 4}


@pytest.mark.parametrize("at", [0, 2047, 5000, 9999], ids=str)
def test_the_fingerprint_sees_every_shard_at_its_ends_and_in_the_middle(tmp_path, at):
    tokens = np.arange(10_000) % V
    for shard in range(2):
        for name in "ab":
            write_tokens(tmp_path / f"{name}_train_{shard}.bin", tokens)
    tokens[at] += 1
    write_tokens(tmp_path / "b_train_1.bin", tokens)
    prints = [DataLoader(tmp_path / name, "train", B, T, V + 1).fingerprint for name in "ab"]
    assert prints[0] != prints[1] and all(len(text) == 16 for text in prints)


def test_generate_computes_what_the_checkpoint_was_trained_with(folder, run_here, capsys):
    run_here(folder, *SAVE, "-x", "1", "-a", "relu")
    texts, flags = [], ["-e", "run/step_00000001", "-g", "40", "--device", "cpu", "--tokenizer", "data_tokenizer.bin"]
    for more in [], ["-a", "relu"]:
        generate.main([*flags, *more])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    said = refusal(generate.main, [*flags, "-a", "softmax"])
    assert said == "-a softmax: run/step_00000001 was trained with relu attention: leave -a out"


def test_a_checkpoint_can_be_the_model_that_a_run_starts_from(folder, run_here):
    run_here(folder, *SAVE, "-x", "2")
    out, _ = run_here(folder, "-e", "run/step_00000002", "-x", "1", flags=without("-e"))
    assert list(steps_of(out)) == [1] and "| model                 | run/step_00000002" in out
    newest, error = run_here(folder, "-e", "run", "-x", "1", flags=without("-e"))
    assert steps_of(newest) == steps_of(out) and error == "run: its newest checkpoint is step_00000002\n"


# Damage


@pytest.mark.parametrize("name, at", [("model.bin", 1024 + 403), ("model_tokenizer.bin", -1), ("state.json", 0)])
def test_a_damaged_file_of_a_checkpoint_is_used_by_no_program(folder, run_here, monkeypatch, name, at):
    """A bit of an exponent or a letter: training would begin at a loss of 1e36, generate.py would write nonsense."""
    run_here(folder, *SAVE, "-x", "2", "-n", "1", "-o", "run.log")
    log = (folder / "run.log").read_bytes()
    monkeypatch.chdir(folder)
    damaged = Path("run/step_00000002", name)
    data = bytearray(damaged.read_bytes())
    data[at] ^= 0x40
    damaged.write_bytes(data)
    said = []
    for given in "run", "run/step_00000002", "run/step_00000002/model.bin":
        said.append(refusal(generate.main, ["-e", given, "--device", "cpu"]))
        said.append(refusal(export_hf.main, [given, "-o", "out"]))
    if name == "model_tokenizer.bin":
        said.append(refusal(load_tokenizer, str(damaged)))
    for flags in ["-e", "run/step_00000002"], [*FLAGS[:2], *SAVE, "-y", "1", "-o", "run.log"]:
        out, error = run_here(folder, *flags, "-x", "3", flags=without("-e"), code=1)
        said.append(error.removeprefix("error: "))
        assert not steps_of(out)
    older = "use run/step_00000001, which is complete; "
    assert all(line.startswith(f"{damaged}: damaged") and older in line for line in said)
    assert (folder / "run.log").read_bytes() == log and not Path("out").exists()


# Stopping


@pytest.mark.parametrize("work, begun, flags", [
    ("validation", "| steps", ["-v", "1", "-m", "1000000"]), ("sampling", "generating:", ["-s", "1", "-g", "1000000"]),
])  # fmt: skip
def test_a_run_stops_in_the_midst_of_what_takes_long(folder, rng, work, begun, flags):
    write_tokens(folder / "data_val.bin", rng.integers(0, V, 4_000_000))
    (folder / "data_tokenizer.bin").unlink()  # which says what ends a sample
    process = start(folder, *SAVE, "-x", "1000", *flags)
    for line in process.stdout:
        if line.startswith(begun):
            break
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    out = process.stdout.read()
    assert (process.wait(timeout=60), process.stderr.read()) == (128 + signal.SIGTERM, "")
    assert time.monotonic() - told < 10
    assert "val loss" not in out if work == "validation" else "stopped by SIGTERM after 1 of" in out


@pytest.mark.parametrize("first, second, at_once", [
    ("SIGTERM", "SIGHUP", True), pytest.param("SIGHUP", "SIGHUP", False, marks=pytest.mark.long),
])  # fmt: skip
def test_a_second_signal_stops_at_once_unless_a_closed_terminal_sent_both(folder, first, second, at_once):
    """The run stops in its last step, and leaves the last validation out. A step and a validation have one batch each.
    On one thread a batch takes most of a second; on several it might end before the second signal comes."""
    for split in "train", "val":
        write_tokens(folder / f"data_{split}.bin", np.zeros(10_000 * T + 1, np.int64))
    large = "-x", "1", "-b", "10000", "-m", "1"
    process = start(folder, *SAVE, *large, env=os.environ | {"LLMC_CPU_THREADS": "1"})
    for line in process.stdout:
        if line.startswith("val loss"):
            break
    time.sleep(0.05 if at_once else 0.2)  # to save something, the run must have begun its step
    first, second = getattr(signal, first), getattr(signal, second)
    process.send_signal(first)
    status = Path(f"/proc/{process.pid}/status")
    while status.exists() and int(re.search(r"SigCgt:\s+(\w+)", status.read_text())[1], 16) & 1 << first - 1:
        time.sleep(0.001)  # until the run has heard it
    time.sleep(0 if status.exists() else 0.05)  # macOS has no /proc
    process.send_signal(second)
    out, code = process.stdout.read(), process.wait(timeout=60)
    assert code == (-second if at_once else 128 + first)
    assert any((folder / "run").glob("step_*")) != at_once and "val loss" not in out
    assert at_once or "saved run/step_00000001" in out and f"stopped by {first.name} after 1 of 1 steps" in out


def test_nohup_is_respected(folder):
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process, out = start(folder, "-x", "30", preexec_fn=ignore), ""
    for line in process.stdout:
        out += line
        if line.startswith("step    2/"):
            process.send_signal(signal.SIGHUP)
    assert (process.wait(timeout=60), process.stderr.read()) == (0, "") and max(steps_of(out)) == 30


# Failing to report


@pytest.mark.parametrize("flags, output, code, said", [
    ("-o run.log", "its reader leaves", 0, "cannot print any more (broken pipe): the run goes on, see run.log\n"),
    ("--tensorboard events", "its reader leaves", 0,
     "cannot print any more (broken pipe): the run goes on, see events\n"),
    ("-o run.log", "there is none", 0, ""), ("", "its reader leaves", 0, ""),
    ("-o run.log", "full", 0, "cannot print any more (no space left on device): the run goes on, see run.log\n"),
    ("", "full", 1, "error: cannot print (no space left on device); with a log (-o), --tensorboard or checkpoints a "
     "run goes on\n"),
])  # fmt: skip
def test_a_run_with_a_log_goes_on_without_an_output_or_its_reader_and_another_ends(folder, flags, output, code, said):
    with open("/dev/full", "w") as full:
        options = {"full": {"stdout": full}, "there is none": {"preexec_fn": partial(os.close, 1)}}.get(output, {})
        process = start(folder, "-x", "30" if flags else "1000000", *flags.split(), **options)
        if process.stdout:
            process.stdout.readline()
            process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (code, said)
    assert "-o" not in flags or read_log(folder / "run.log")["trl"][0].tolist() == list(range(30))


def test_a_full_disk_under_the_log_is_said_once_and_told_by_the_exit_code(folder, run_here):
    out, error = run_here(folder, "-x", "5", "-o", "/dev/full", code=1)
    assert out.count("/dev/full: a line was lost (no space left on device); the run goes on\n") == 1
    assert error == "error: /dev/full lacks 9 lines that could not be written\n" and max(steps_of(out)) == 5


def test_a_checkpoint_that_fails_is_tried_again_when_the_next_is_due_and_one_that_cannot_be_removed_stays(
    folder, run_here
):
    run_here(folder, *SAVE, "-x", "1")
    for name in "step_00000001.pruned.part", "step_00000002.part":
        (folder / "run" / name).write_text("in the way")
    out, error = run_here(folder, *SAVE, "-x", "3", "-n", "1", "-y", "1", "-nk", "1")
    assert error == "" and out.count("not saved: run/step_00000002: cannot be written (file exists)") == 1
    assert "saved run/step_00000003\nan old checkpoint stays: run/step_00000001: " in out
    assert {path.name for path in (folder / "run").glob("step_*[0-9]")} == {"step_00000001", "step_00000003"}


def test_when_no_checkpoint_can_be_written_the_last_good_one_stays_and_the_exit_code_tells(folder, run_here):
    run_here(folder, *SAVE, "-x", "1")
    want = checkpoint_bytes(folder, 1)
    out, error = run(folder, *SAVE, "-y", "1", "-x", "4", "-n", "1", code=1, **limit_files(20_000))
    assert max(steps_of(out)) == 4 and out.count("not saved: run/step_") == 3
    assert re.fullmatch(r"error: the last checkpoint could not be written: run/step_00000004.*\n", error), error
    assert [path.name for path in (folder / "run").iterdir()] == ["step_00000001"]
    assert checkpoint_bytes(folder, 1) == want


@pytest.mark.parametrize("kind, base, what, remedy", [
    ("CUDARuntimeError", RuntimeError, "the GPU failed (cudaErrorECCUncorrectable: uncorrectable ECC error)",
     "dmesg may name an Xid"),
    ("OutOfMemoryError", MemoryError, "out of memory (Out of memory allocating 8,589,934,592 bytes)",
     "lower -b or -t"),
])  # fmt: skip
def test_a_gpu_that_fails_is_one_line_with_the_last_checkpoint(folder, run_here, monkeypatch, kind, base, what, remedy):
    failure = type(kind, (base,), {"__module__": "cupy_backends.cuda.api.runtime"})
    reason = re.search(r"\((.*)\)", what)[1]

    def update(model, adamw, exchange, lr, t):
        if t == 5:
            raise failure(f"{reason}\nmore")
        adamw_update(model, adamw, exchange, lr, t)

    with monkeypatch.context() as patch:
        patch.setattr("train_gpt2_fp32.adamw_update", update)
        _, error = run_here(folder, *SAVE, "-x", "9", "-n", "2", code=1)
    assert error.startswith(f"error: {what}: ") and remedy in error and error.count("\n") == 1
    assert error.endswith("; the run goes on from run/step_00000004 with -y 1\n")
    assert list(steps_of(run_here(folder, *SAVE, "-x", "9", "-y", "1")[0])) == [5, 6, 7, 8, 9]


# Numbers that are not finite


@pytest.fixture
def spoil(monkeypatch):
    """spoil(batches) puts a NaN into the logits of these batches. They are counted from 1; the first two are those of a
    validation."""
    real = classifier.fused_classifier

    def spoil(batches: set[int]) -> None:
        calls = itertools.count(1)

        def spoiled(logits, *rest) -> None:
            if next(calls) in batches:
                logits[0, 0] = float("nan")
            real(logits, *rest)

        monkeypatch.setattr(classifier, "fused_classifier", spoiled)

    return spoil


@pytest.mark.parametrize("accumulated, every, good", [
    (1, 2, "run/step_00000004; the state that it came to: run/step_00000005"), (3, 5, "run/step_00000005")
])  # fmt: skip
def test_a_step_that_is_not_finite_stops_the_run_before_the_parameters_change(
    folder, run_here, spoil, accumulated, every, good
):
    flags = [*SAVE, "-d", str(accumulated * B * T), "-l", "1e-2"]
    run_here(folder, *flags, "-x", "5")
    want = checkpoint_bytes(folder, 5)
    shutil.rmtree(folder / "run")
    spoil({2 + 5 * accumulated + 1})
    out, error = run_here(folder, *flags, "-x", "9", "-n", str(every), code=1)
    assert error == (
        "error: step 6: its loss (nan) or gradients are not finite, so all parameters are left as they were. "
        "Possible causes: a learning rate that is too high (-l, -u), gradients that are not clipped (--grad-clip 1), "
        f"damaged weights or data; --skip-nonfinite leaves such steps out; last good checkpoint: {good}\n"
    )
    assert list(steps_of(out)) == [1, 2, 3, 4, 5, 6] and checkpoint_bytes(folder, 5) == want
    assert out.count("saved run/step_00000005") == 1  # also where it was due
    again, _ = run_here(folder, *flags, "-x", "9", "-y", "1")
    assert list(steps_of(again)) == [6, 7, 8, 9]  # the batch that was spoiled comes again


def test_a_state_that_may_be_poisoned_takes_no_older_checkpoint_away(folder, run_here):
    """Parameters that are too large already, which is what the next step shows."""
    run_here(folder, *SAVE, "-n", "2", "-nk", "1", "-x", "4")
    _, error = run_here(folder, *SAVE, "-y", "1", "-nk", "1", "-l", "1e37", "-x", "20", code=1)
    assert error.endswith("; last good checkpoint: run/step_00000004; the state that it came to: run/step_00000005\n")
    more = ["-l", "1e-3", "-x", "50", "-n", "2", "--skip-nonfinite"]
    _, error = run_here(folder, *SAVE, "-y", "1", "-nk", "1", *more, code=1)
    assert "; that is so in 20 steps in a row; last good checkpoint: run/step_00000005; the state that" in error
    assert (folder / "run" / "step_00000004").exists()
    for later in set((folder / "run").iterdir()) - {folder / "run" / "step_00000004"}:
        shutil.rmtree(later)
    run_here(folder, *SAVE, "-y", "1", "-x", "6", "-l", "1e-3")


def test_a_weights_gradient_that_overflows_leaves_that_weight_alone_and_stops_the_run(folder, run_here, monkeypatch):
    """Without clipping nobody has looked at it before; the others have moved, and that is said and saved."""

    def update(model, adamw, exchange, lr, t) -> None:
        if t == 3:
            model.grads.qkvw.reshape(-1)[5] = 1e25
        adamw_update(model, adamw, exchange, lr, t)

    monkeypatch.setattr("train_gpt2_fp32.adamw_update", update)
    _, error = run_here(folder, *SAVE, "-n", "1", "-x", "6", code=1)
    assert re.match(
        r"error: step 3: its loss \(\d\.\d+\) or gradients are not finite, so parameters with such a gradient are "
        r"left as they were, and the others have taken the step\. .*; last good checkpoint: run/step_00000002; the "
        r"state that it came to: run/step_00000003\n$", error,
    ), error  # fmt: skip
    shutil.rmtree(folder / "run")
    out, _ = run_here(folder, *SAVE, "-x", "6", "--skip-nonfinite")
    assert "steps whose loss or gradients were not finite: 1\n" in out
    want = checkpoint_bytes(folder, 6)
    shutil.rmtree(folder / "run")
    _, error = run_here(folder, *SAVE, "-x", "6", code=1)
    assert "; last good checkpoint: none; the state that it came to: run/step_00000003\n" in error
    run_here(folder, *SAVE, "-x", "6", "-y", "1")
    assert checkpoint_bytes(folder, 6) == want  # the run goes on from where it was


def test_steps_that_are_not_finite_are_skipped_and_counted(folder, run_here, spoil):
    flags = [*SAVE, "--skip-nonfinite", "-l", "1e-2"]
    spoil({5, 7})
    out, _ = run_here(folder, *flags, "-x", "6", "-n", "4")
    assert re.findall(r"^step (\d+): its loss \(nan\).*; (\d) such .*$", out, re.M) == [("3", "1"), ("5", "2")]
    assert "steps whose loss or gradients were not finite: 2\n" in out
    assert np.isfinite(np.frombuffer(checkpoint_bytes(folder, 6)[0][1024:], "<f4")).all()
    shutil.rmtree(folder / "run" / "step_00000006")
    spoil(set())
    out, _ = run_here(folder, *SAVE, "-y", "1")  # the flag is recorded, and so is the count
    assert "steps whose loss or gradients were not finite: 1\n" in out


def test_a_step_of_many_batches_is_dropped_by_a_stop_request(folder, run_here, monkeypatch):
    flags, real = [*SAVE, "--seed", "1", "-x", "4"], Batches.fetch_losses
    run_here(folder, *flags, "-d", str(10 * B * T))
    want = checkpoint_bytes(folder, 4)
    shutil.rmtree(folder / "run")

    def fetch(self, step, i) -> None:
        real(self, step, i)
        if (step, i) == (2, 6):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (step, i) < (2, 7), "went on after the current batch"

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "fetch_losses", fetch)
        out, _ = run_here(folder, *flags, "-d", str(10 * B * T), code=128 + signal.SIGTERM)
    assert "stopped by SIGTERM after 2 of 4 steps" in out and list(steps_of(out)) == [1, 2]
    run_here(folder, *flags, "-y", "1")
    assert checkpoint_bytes(folder, 4) == want


# Killed


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.long)])
def test_a_run_that_is_killed_anywhere_ends_as_if_it_had_not_been(folder, rng, run_here, kills):
    """At random moments; so does the best checkpoint."""
    number = 20 * kills
    settings = [*SAVE, "--seed", "1", "-n", "1", "-nk", "3", "-x", str(number), "--best", "-v", "3",
                "-l", "1e-3"]  # fmt: skip
    run_here(folder, *settings)
    want, best = checkpoint_bytes(folder, number), (folder / "run" / "best" / "state.json").read_bytes()
    shutil.rmtree(folder / "run")
    for _ in range(kills):
        process, saved = start(folder, *settings, "-y", "1"), 0
        for line in process.stdout:
            saved += line.startswith("saved ")
            if saved and rng.random() < 0.4:
                break
        time.sleep(rng.uniform(0, 0.02))  # the next step, or the next checkpoint, has begun
        process.kill()
        process.communicate()
    assert not (folder / "run" / f"step_{number:08d}").exists()
    run_here(folder, *settings, "-y", "1")
    assert checkpoint_bytes(folder, number) == want
    assert (folder / "run" / "best" / "state.json").read_bytes() == best
    assert len(list((folder / "run").iterdir())) == 4  # and nothing of what was being written


def test_a_gpu_that_cannot_be_had_is_one_line_with_the_remedy(folder, run_here, monkeypatch):
    reason = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"

    def no_gpu(number: int) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(device, "CudaDevice", no_gpu)
    out, _ = run_here(folder, "-x", "0", flags=without("--device"))
    assert f"| why not CUDA          | {reason} " in out
    _, error = run_here(folder, "-x", "0", "--device", "cuda", flags=without("--device"), code=1)
    assert error.startswith(f"error: CUDA does not work here ({reason}): update NVIDIA's") and error.count("\n") == 1


@pytest.mark.long
def test_twenty_thousand_steps_take_no_more_time_and_memory_than_the_first(folder):
    """With validation, samples, a log and checkpoints on the way; on the GPU where there is one, by itself."""
    kind = device.use()
    flags = ["-x", "20000", "-v", "500", "-m", "2", "-s", "500", "-g", "8", "-o", "run.log", "--seed", "1",
             "-n", "2000", "-nk", "2", "--grad-clip", "1", "--device", kind]  # fmt: skip
    process = start(folder, *SAVE, *flags, flags=FLAGS[: FLAGS.index("--device")])
    memory, times = {}, []

    def memory_now() -> list[int]:
        """Host and device memory in KiB."""
        resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        used = device.memory()[1] - device.memory()[0] if kind == "cuda" else 0
        return [int(resident[1]), used >> 10]

    for line in process.stdout:
        if found := re.match(r"step +(\d+)/20000: .*\(([\d.]+) ms", line):
            times.append(float(found[2]))
            if len(times) in (4000, 19999):
                memory[len(times)] = memory_now()
    assert process.wait(timeout=60) == 0 and len(times) == 20000
    early, late = np.median(times[1000:5000]), np.median(times[-4000:])
    print(f"{kind}: {early:.4f} and {late:.4f} ms per step, {memory} KiB")
    assert late < 1.1 * early
    assert all(after <= before + 2048 for before, after in zip(memory[4000], memory[19999], strict=True)), memory


def test_the_largest_batches_that_are_named_fit(folder):
    if device.use() != "cuda":
        pytest.skip("needs a GPU, whose memory is nobody else's")
    free = device.memory()[0]
    ballast = device.empty(((free - (3 << 30)) // 4,))  # 3 GiB are left
    base = ["-e", "layers=2,heads=4,channels=256,maxT=1024", "-i", "data", "-t", "1024", "-g", "0", "-m", "1",
            "-x", "3"]  # fmt: skip
    for split in "train", "val":
        write_tokens(folder / f"data_{split}.bin", np.zeros(1 << 20, np.int64))
    _, error = run(folder, "-b", "1000", flags=base, code=1)
    remedies = re.search(r"at most (-b .*) fits", error)[1].split(" or ")
    for flags in map(str.split, remedies):
        run(folder, *flags, flags=base)  # another process, which gives its memory back
        assert int(flags[1]) > 8
    assert len(remedies) == 4 and ballast.nbytes > free // 2
