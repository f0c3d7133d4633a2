"""--best keeps the checkpoint with the lowest validation loss beside the newest ones. Runs in this process, whose
validations give the losses that a test names."""

import json
import math
import os
import shutil
import signal
import zlib
from dataclasses import dataclass
from pathlib import Path

import generate
from conftest import refusal
from dev.hf import export_hf
from device.errors import UserError
from llmc.data.dataloader import write_tokens
from llmc.files.checkpoint import checkpoints, model_path, newest_checkpoint, read_record
from llmc.run import program
from llmc.run.arguments import parse_arguments
from models import TINY, described
from train_gpt2_fp32 import train

import pytest
from test_evaluation import random_examples, write_evaluation
from test_reliability import write_data

V, B, T = 257, 2, 16
FLAGS = f"-i data -b {B} -t {T} -g 0 -v 1 -m 2 --seed 1 --device cpu --checkpoint-dir run --best".split()


@dataclass
class Trainer:
    """Runs trainers in the working directory."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture

    def train(self, *flags: str, losses: tuple[float, ...] = (), model: str = "gpt2") -> str:
        """What it prints. losses: what its validations are to find, if not their own."""
        kind, coming = TINY[model][0], iter(losses)
        with self.monkeypatch.context() as patch:
            if losses:
                patch.setattr("llmc.run.validation.validate", lambda *args: (next(coming), None))
            args = parse_arguments(kind.Config, ["-e", described(model, V, T)[0], *FLAGS, *flags])
            train(kind, args)
        assert not list(coming)
        return self.capsys.readouterr().out

    def refused(self, *flags: str, losses: tuple[float, ...] = ()) -> str:
        """What a run says that is refused, or fails in the end."""
        return refusal(self.train, *flags, losses=losses)


@pytest.fixture
def trainer(tmp_path, rng, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "last_checkpoint", None)
    write_data(tmp_path, rng)
    write_tokens("data_other.bin", rng.integers(0, V, 400))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Trainer(monkeypatch, capsys)
    for number, handler in handlers.items():  # a run takes them
        signal.signal(number, handler)


def names() -> list[str]:
    return sorted(os.listdir("run"))


def contents(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("run", name).iterdir()}


def best() -> tuple[int, float]:
    """The step and the loss of the best checkpoint."""
    record = read_record(Path("run/best"))
    return record["step"], record["state"]["best"]["val_loss"]


def change_state(path: Path, **changes) -> None:
    """Changes what a checkpoint's state.json says of the run."""
    record = read_record(path)
    record["state"] |= changes
    crc32 = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (path / "state.json").write_text(json.dumps(record | {"crc32": crc32}))


@pytest.mark.parametrize("model", TINY)
def test_the_checkpoint_with_the_lowest_loss_is_kept_beside_the_newest(trainer, model):
    losses = (5.0, 3.0, math.nan, 2.0, 2.0, 4.0)
    trainer.train("-x", "5", "-n", "1", losses=losses, model=model)
    assert best() == (3, 2.0)
    third = contents("step_00000003")
    shutil.rmtree("run")
    out = trainer.train("-x", "5", "-n", "1", "-nk", "1", losses=losses, model=model)
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


def test_a_loss_that_is_not_finite_is_never_the_best(trainer):
    trainer.train("-x", "1", losses=(math.nan, math.inf))
    assert names() == ["step_00000001"]


def test_the_last_validation_can_find_the_best(trainer):
    trainer.train("-x", "2", losses=(3.0, 4.0, 2.5))
    assert names() == ["best", "step_00000002"] and best() == (2, 2.5)
    assert contents("best")["optimizer.bin"] == contents("step_00000002")["optimizer.bin"]


def test_without_best_there_is_none_and_one_that_is_there_stays(trainer):
    trainer.train("-x", "1", "--best", "0", losses=(3.0, 2.0))
    assert names() == ["step_00000001"]
    trainer.train("-x", "2", "-y", "1", losses=(2.0, 1.0))
    before = contents("best")
    trainer.train("-x", "3", "-y", "1", "--best", "0", losses=(1.0, 0.5))
    assert contents("best") == before and best() == (2, 1.0)


def test_a_resumed_run_remembers_the_lowest_loss(trainer):
    trainer.train("-x", "2", losses=(5.0, 3.0, 4.0))
    before = contents("best")
    trainer.train("-x", "4", "-y", "1", losses=(4.0, 3.5, 3.0))
    assert contents("best") == before and best() == (1, 3.0)
    trainer.train("-x", "5", "-y", "1", losses=(3.0, 2.9))
    assert best() == (5, 2.9) and names() == ["best", "step_00000002", "step_00000004", "step_00000005"]


def test_a_resumed_run_has_the_best_of_one_that_was_not_stopped(trainer):
    """With the losses that it really has."""
    flags = ["-n", "2", "-l", "1e-2"]
    trainer.train("-x", "6", *flags)
    want = contents("best")
    shutil.rmtree("run")
    trainer.train("-x", "6", *flags)
    assert best()[0] > 2
    for lost in ("step_00000006", "step_00000004", "best"), ("step_00000006",), ("step_00000006", "step_00000004"):
        for name in lost:
            shutil.rmtree(f"run/{name}")
        trainer.train("-x", "6", "-y", "1", *flags)
        assert contents("best") == want


def test_where_no_other_checkpoint_is_there_a_run_goes_on_from_the_best(trainer):
    trainer.train("-x", "4", losses=(5.0, 4.0, 3.0, 9.0, 9.0))
    last = contents("step_00000004")
    shutil.rmtree("run/step_00000004")  # as if it had been killed before
    assert "run has checkpoints of another run, the newest best: go on from it with -y 1" in trainer.refused("-x", "4")
    out = trainer.train("-x", "4", "-y", "1", losses=(3.0, 9.0, 9.0))
    assert "step    3/4" in out and "step    2/4" not in out and best() == (2, 3.0)
    assert all(contents("step_00000004")[name] == last[name] for name in ("model.bin", "optimizer.bin"))


def test_a_directory_stands_for_its_newest_checkpoint_and_the_best_has_a_name(trainer, capsys):
    trainer.train("-x", "2", losses=(5.0, 3.0, 4.0))
    assert [path.name for path in checkpoints("run")] == ["step_00000002", "best"]
    assert newest_checkpoint("run").name == "step_00000002"
    for name, newest in (("run", "step_00000002"), ("run/best", "best")):
        assert model_path(name) == Path("run", newest, "model.bin")
    capsys.readouterr()
    generate.main(["-e", "run/best", "-g", "3", "--device", "cpu"])
    export_hf.main(["run/best", "-o", "out"])
    assert "exporting run/best/model.bin" in capsys.readouterr().out
    shutil.rmtree("run/step_00000002")
    assert model_path("run") == Path("run/best/model.bin")
    assert capsys.readouterr().err == "run: its newest checkpoint is best\n"


def test_a_damaged_best_checkpoint_names_another_one(trainer):
    trainer.train("-x", "2", losses=(5.0, 3.0, 4.0))
    os.truncate("run/best/model_tokenizer.bin", 50)
    with pytest.raises(UserError, match="use run/step_00000002, another checkpoint that is complete"):
        model_path("run/best")
    assert newest_checkpoint("run").name == "step_00000002"


def truncated(path: Path) -> None:
    os.truncate(path / "model.bin", 99)


def without_a_record(path: Path) -> None:
    (path / "state.json").write_text("{")


def copied_by_hand(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree("run/step_00000002", path)


def of_another_run(path: Path) -> None:
    change_state(path, run="another")


def as_it_is(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        (truncated, [], "no checkpoint, or damaged; "),
        (without_a_record, [], "no checkpoint, or damaged; "),
        (copied_by_hand, [], "this checkpoint does not record its validation loss; "),
        (of_another_run, [], "this is the best checkpoint of another run; "),
        (as_it_is, ["-m", "3"], "its loss is of 2 validation batches, and now of 3: -m 2, "),
        (as_it_is, ["-j", "data_other.bin"], "its loss is of other validation data: name that data (-j, -i), "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_best_that_cannot_be_compared_is_not_replaced(trainer, change, flags, said):
    def there() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path("run").rglob("[!.]*") if path.is_file()}

    trainer.train("-x", "2", losses=(5.0, 3.0, 4.0))
    change(Path("run/best"))
    before = there()
    message = trainer.refused("-x", "3", "-y", "1", "-o", "run.log", *flags)
    assert message == f"run/best: {said}move run/best away, or leave --best out"
    assert there() == before and not Path("run.log").exists()
    assert "step    3/3" in trainer.train("-x", "3", "-y", "1", "--best", "0", *flags)
    assert before.items() <= there().items()


def test_a_best_that_cannot_be_written_is_said_and_the_one_before_stays(trainer):
    Path("run").mkdir()
    trainer.train("-x", "1", losses=(5.0, 6.0))
    before = contents("best")
    Path("run/best.part").write_text("in the way")
    why = "run/best: cannot be written (file exists)"
    message = trainer.refused("-x", "3", "-y", "1", losses=(6.0, 4.0, 7.0))
    assert message == f"the best checkpoint could not be written: {why}"
    assert trainer.capsys.readouterr().out.count(f"not saved: {why}\n") == 1
    assert contents("best") == before and names() == ["best", "best.part", "step_00000001", "step_00000003"]
    Path("run/best.part").unlink()
    trainer.train("-x", "4", "-y", "1", losses=(7.0, 4.5))  # the lowest of those that are kept
    assert best() == (4, 4.5)


def test_a_run_that_fails_before_its_first_checkpoint_names_the_best(trainer, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr("train_gpt2_fp32.adamw_update", fail)
    with pytest.raises(MemoryError):
        trainer.train("-x", "2", losses=(5.0,))
    assert names()[-1] == "best" and program.resume_advice() == "; the run goes on from run/best with -y 1"


def test_a_validation_that_is_given_up_finds_no_best(trainer, rng, monkeypatch):
    """Told to stop during HellaSwag, behind the loss. The run that goes on from there validates again."""
    def stop(*args) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    write_evaluation(Path("questions.bin"), random_examples(rng, 2))
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr("llmc.run.validation.evaluate", stop)
        trainer.train("-x", "2", "-b", "4", "--hellaswag", "questions.bin", losses=(5.0,))
    assert caught.value.code == 128 + signal.SIGTERM and not Path("run/best").exists()
    trainer.train("-x", "1", "-b", "4", "-y", "1", losses=(5.0, 6.0))
    assert best() == (0, 5.0)
