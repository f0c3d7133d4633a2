"""--best keeps the checkpoint with the lowest validation loss beside the newest ones. Runs in this process, whose
validations give the losses that a test names."""

import errno
import math
import os
import shutil
import signal
from pathlib import Path

import generate
from conftest import refusal
from dev.hf import export_hf
from device.errors import UserError
from llmc.data.token_file import write_tokens
from llmc.files.checkpoint import model_path
from llmc.files.checkpoint_dir import checkpoints, newest_checkpoint, read_record
from llmc.files.directory import Directory
from models import TINY, described, write_record
from support.evaluations import random_examples, write_evaluation
from support.folders import write_data

import pytest

V, B, T = 257, 2, 16
FLAGS = f"-i data -b {B} -t {T} -g 0 -v 1 -m 2 --seed 1 --device cpu --checkpoint-dir run --best".split()


@pytest.fixture
def train(tmp_path, rng, monkeypatch, trainer_here):
    """train(*flags) runs a trainer in the working directory, and returns what it writes. losses: what its validations
    are to find, if not their own."""
    write_data(tmp_path, rng)
    write_tokens(tmp_path / "data_other.bin", rng.integers(0, V, 400))
    monkeypatch.chdir(tmp_path)

    def train(*flags: str, losses: tuple[float, ...] = (), model: str = "gpt2", code: int = 0) -> str:
        coming = iter(losses)
        with monkeypatch.context() as patch:
            if losses:
                patch.setattr("llmc.run.validation.validate", lambda *args: (next(coming), None))
            flags = ["-e", described(model, V, T)[0], *FLAGS, *flags]
            out, error = trainer_here(TINY[model][0], tmp_path, flags, code)
        assert not list(coming)
        return out + error

    return train


def names() -> list[str]:
    return sorted(os.listdir("run"))


def contents(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("run", name).iterdir()}


def best() -> tuple[int, float]:
    """The step and the loss of the best checkpoint."""
    record = read_record(Path("run/best"))
    return record["step"], record["state"]["best"]["val_loss"]


def give_to_another_run() -> None:
    record = read_record(Path("run/best"))
    write_record(Path("run/best"), record | {"state": record["state"] | {"run": "another"}})


@pytest.mark.parametrize("model", TINY)
def test_the_checkpoint_with_the_lowest_loss_is_kept_beside_the_newest(train, model):
    losses = (5.0, 3.0, math.nan, 2.0, 2.0, 4.0)
    train("-x", "5", "-n", "1", losses=losses, model=model)
    assert best() == (3, 2.0)
    third = contents("step_00000003")
    shutil.rmtree("run")
    out = train("-x", "5", "-n", "1", "-nk", "1", losses=losses, model=model)
    assert names() == ["best", "step_00000005"] and best() == (3, 2.0)
    kept = contents("best")
    assert kept.keys() == third.keys() and "model_tokenizer.bin" in kept
    assert all(kept[name] == third[name] for name in kept if name != "state.json")
    lines = [line for line in out.splitlines() if line.startswith(("val loss", "saved"))]
    assert lines == [
        "val loss 5.000000", "saved run/best", "saved run/step_00000001", "val loss 3.000000", "saved run/best",
        "saved run/step_00000002", "val loss nan", "saved run/step_00000003", "val loss 2.000000", "saved run/best",
        "saved run/step_00000004", "val loss 2.000000", "saved run/step_00000005", "val loss 4.000000",
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_is_never_the_best(train):
    train("-x", "1", losses=(math.nan, math.inf))
    assert names() == ["step_00000001"]


def test_without_best_there_is_none_and_one_that_is_there_stays(train):
    train("-x", "1", "--best", "0", losses=(3.0, 2.0))
    assert names() == ["step_00000001"]
    train("-x", "2", "-y", "1", losses=(2.0, 1.0))
    before = contents("best")
    train("-x", "3", "-y", "1", "--best", "0", losses=(1.0, 0.5))
    assert contents("best") == before and best() == (2, 1.0)


def test_a_resumed_run_remembers_the_lowest_loss(train):
    train("-x", "2", losses=(5.0, 3.0, 4.0))
    before = contents("best")
    train("-x", "4", "-y", "1", losses=(4.0, 3.5, 3.0))
    assert contents("best") == before and best() == (1, 3.0)
    train("-x", "5", "-y", "1", losses=(3.0, 2.9))
    assert best() == (5, 2.9) and names() == ["best", "step_00000002", "step_00000004", "step_00000005"]


def test_where_no_other_checkpoint_is_there_a_run_goes_on_from_the_best(train):
    train("-x", "4", losses=(5.0, 4.0, 3.0, 9.0, 9.0))
    last = contents("step_00000004")
    shutil.rmtree("run/step_00000004")  # as if it had been killed before
    refused = train("-x", "4", code=1)
    assert "run has checkpoints of another run, the newest best: go on from it with -y 1" in refused
    out = train("-x", "4", "-y", "1", losses=(3.0, 9.0, 9.0))
    assert "step    3/4" in out and "step    2/4" not in out and best() == (2, 3.0)
    assert all(contents("step_00000004")[name] == last[name] for name in ("model.bin", "optimizer.bin"))


def test_a_directory_stands_for_its_newest_checkpoint_and_the_best_has_a_name(train, capsys):
    train("-x", "2", losses=(5.0, 3.0, 4.0))
    assert [path.name for path in checkpoints("run")] == ["step_00000002", "best"]
    for name, newest in (("run", "step_00000002"), ("run/best", "best")):
        assert model_path(name) == Path("run", newest, "model.bin")
    capsys.readouterr()
    generate.main(["-e", "run/best", "-g", "3", "--device", "cpu"])
    export_hf.main(["run/best", "-o", "out"])
    assert "exporting run/best/model.bin" in capsys.readouterr().out
    shutil.rmtree("run/step_00000002")
    assert model_path("run") == Path("run/best/model.bin")
    assert capsys.readouterr().err == "run: its newest checkpoint is best\n"


def test_a_damaged_best_checkpoint_names_another_one(train):
    train("-x", "2", losses=(5.0, 3.0, 4.0))
    os.truncate("run/best/model_tokenizer.bin", 50)
    assert "use run/step_00000002, which is complete; " in refusal(model_path, "run/best")
    assert newest_checkpoint("run").name == "step_00000002"


NOT_THIS_RUNS = "this is not the best checkpoint of this run; "
OTHER_DATA = "its loss is of other validation data (-j, -i) or not of {} batches (-m); "


@pytest.mark.parametrize("change, flags, said", [
    (lambda: os.truncate("run/best/model.bin", 99), "", "no checkpoint, or damaged; "),
    (lambda: shutil.copytree("run/step_00000002", "run/best", dirs_exist_ok=True), "", NOT_THIS_RUNS),
    (give_to_another_run, "", NOT_THIS_RUNS), (None, "-m 3", OTHER_DATA.format(3)),
    (None, "-j data_other.bin", OTHER_DATA.format(2)),
], ids=["damaged", "copied by hand", "of another run", "-m", "-j"])  # fmt: skip
def test_a_best_that_cannot_be_compared_is_not_replaced(train, change, flags, said):
    def there() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path("run").rglob("[!.]*") if path.is_file()}

    train("-x", "2", losses=(5.0, 3.0, 4.0))
    if change:
        change()
    before = there()
    said = f"error: run/best: {said}move run/best away, or leave --best out\n"
    assert train("-x", "3", "-y", "1", "-o", "run.log", *flags.split(), code=1).endswith(said)
    assert there() == before and not Path("run.log").exists()
    assert "step    3/3" in train("-x", "3", "-y", "1", "--best", "0", *flags.split())
    assert before.items() <= there().items()


def test_a_best_that_cannot_be_written_is_said_and_the_one_before_stays(train):
    Path("run").mkdir()
    train("-x", "1", losses=(5.0, 6.0))
    before = contents("best")
    Path("run/best.part").write_text("in the way")
    why = "run/best: cannot be written (file exists)"
    written = train("-x", "3", "-y", "1", losses=(6.0, 4.0, 7.0), code=1)
    assert written.endswith(f"error: the best checkpoint could not be written: {why}\n")
    assert written.count(f"not saved: {why}\n") == 1
    assert contents("best") == before and names() == ["best", "best.part", "step_00000001", "step_00000003"]
    Path("run/best.part").unlink()
    train("-x", "4", "-y", "1", losses=(7.0, 4.5))  # the lowest of those that are kept
    assert best() == (4, 4.5)


@pytest.mark.parametrize("unreadable", [False, True])
def test_after_a_sync_that_failed_no_worse_model_replaces_a_better_one(train, monkeypatch, unreadable):
    """The new best is in its place by then, and perhaps not on disk; the old one stays beside it."""
    real, put_in_place = Directory.sync, []

    def sync(directory: Directory) -> None:
        if directory.path.name == "run" and "best.replaced.part" in directory.names() and not put_in_place:
            put_in_place.append(directory.names())
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(directory)

    def read(path: Path) -> dict:
        if put_in_place and unreadable:
            raise UserError(f"{path}: input/output error")
        return read_record(path)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "sync", sync)
        patch.setattr("llmc.files.checkpoint_dir.read_record", read)
        out = train("-x", "3", losses=(5.0, 3.0, 4.0, 4.5), code=1)
    assert put_in_place == [[".llm.cupy.lock", "best", "best.replaced.part"]]
    assert out.count("not saved: run/best: cannot be written (input/output error)") == 1
    assert ("not read back: run/best: input/output error" in out) == unreadable
    assert best() == (1, 3.0) and names() == ["best", "step_00000003"]


def test_a_run_that_fails_before_its_first_checkpoint_names_the_best(train, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr("train_gpt2_fp32.adamw_update", fail)
    written = train("-x", "2", losses=(5.0,), code=1)
    assert names()[-1] == "best" and written.endswith("; the run goes on from run/best with -y 1\n")


def test_a_validation_that_is_given_up_finds_no_best(train, rng, monkeypatch):
    """Told to stop during HellaSwag, after the loss. The run that goes on from there validates again."""

    write_evaluation(Path("questions.bin"), random_examples(rng, 2))
    flags = ["-x", "2", "-b", "4", "--hellaswag", "questions.bin"]
    with monkeypatch.context() as patch:
        patch.setattr("llmc.run.validation.evaluate", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
        train(*flags, losses=(5.0,), code=128 + signal.SIGTERM)
    assert not Path("run/best").exists()
    train("-x", "1", "-b", "4", "-y", "1", losses=(5.0, 6.0))
    assert best() == (0, 5.0)
