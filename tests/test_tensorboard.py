"""TensorBoard's events, read back by TensorBoard."""

import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

from llmc.data.tokenizer import write_tokenizer
from llmc.run.logger import TensorBoard, read_log
from support.folders import V, limit_files, make_folder, output_of_trainer, samples_of, start_trainer
from train_gpt2_fp32 import GPT2

import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

FLAGS = "-e layers=1,heads=2,channels=16,maxT=64 -i data -b 2 -t 16 -v 2 -m 2 -s 4 -g 20 --device cpu".split()
FIGURES = {"loss/train", "optimization/norm", "optimization/learning_rate", "speed/tokens_per_second"}


@pytest.fixture
def folder(tmp_path):
    folder = make_folder(tmp_path / "folder")
    write_tokenizer(folder / "data_tokenizer.bin", [b"\n", *(bytes([32 + i]) for i in range(1, V))], V - 1)
    return folder


start, run = partial(start_trainer, flags=FLAGS), partial(output_of_trainer, flags=FLAGS)


def shown(directory: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[int, str]]:
    """What TensorBoard shows of a directory: (step, value) of each figure by name, and the samples by step."""
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    series = {
        name: [(event.step, make_ndarray(event.tensor_proto).item()) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    return series, {step: text.decode() for step, text in series.pop("sample", [])}


def test_a_run_that_is_stopped_and_resumed_shows_each_step_once_with_what_it_printed_last(folder):
    settings = ["-x", "9", "--grad-clip", "1", "-k", "cosine", "-n", "3", "--checkpoint-dir", "run", "-o", "run.log",
                "--tensorboard", "events/here"]  # fmt: skip
    whole, _ = run(folder, *settings)
    assert "| TensorBoard           | events/here  " in whole
    for step in (6, 9):  # as if it had been killed after the ninth step
        shutil.rmtree(folder / "run" / f"step_{step:08d}")
    process, out = start(folder, *settings, "-x", "100000", "-y", "1"), ""
    for line in process.stdout:
        out += line
        if line.startswith("step   20/"):
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 128 + signal.SIGTERM
    last = int(re.search(r"stopped by SIGTERM after (\d+) of", out)[1])

    figures, texts = shown(folder / "events" / "here")
    assert len(list((folder / "events" / "here").iterdir())) == 2
    log = read_log(folder / "run.log")
    for name, theirs in ("trl", "loss/train"), ("tel", "loss/validation"), ("bpb", "loss/bits_per_byte"):
        np.testing.assert_allclose(figures.pop(theirs), np.transpose(log[name]), atol=6e-5)
    assert all(seconds > 0 for _, seconds in figures["speed/sample_seconds"])
    assert [step for step, _ in figures.pop("speed/sample_seconds")] == list(texts)
    assert figures.keys() == FIGURES - {"loss/train"}  # and no share of a peak that is not known
    printed = re.findall(r", (\d+) tok/s\), norm (\S+), lr (\S+),", re.sub(r"(?s)step    4/9.*", "", whole) + out)
    for name, values in zip(sorted(FIGURES - {"loss/train"}), np.array(printed, float).T[[2, 1, 0]], strict=True):
        assert [step for step, _ in figures[name]] == list(range(last))
        np.testing.assert_allclose([value for _, value in figures[name]], values, rtol=6e-3)
    indented = [re.sub("^", "    ", text, flags=re.M) for text in samples_of(out)]  # Markdown shows it as it stands
    assert texts == {4 * i: text for i, text in enumerate(indented, start=1)}


def test_a_new_run_hides_the_one_before_and_what_is_not_known_is_left_out(tmp_path):
    for speed in (100.0, 200.0):
        board = TensorBoard(tmp_path)
        board.log(0, val_loss=5.0)
        board.log(0, train_loss=4.0, norm=0.5, learning_rate=1e-3, tokens_per_second=speed, percent_of_peak=12.5)
        board.log(1, train_loss=float("nan"), norm=None, learning_rate=1e300, tokens_per_second=speed)
        if speed == 100:
            board.log(2, train_loss=3.0, learning_rate=1e-3, tokens_per_second=speed, percent_of_peak=None)
        board.log(2, accuracy=0.25)
        board.log_sample(2, "# é\n\n *x*")
        figures, texts = shown(tmp_path)  # before it is closed
        board.close()
    assert figures.pop("loss/train")[0] == (0, 4.0)
    assert figures == {
        "loss/validation": [(0, 5.0)], "optimization/norm": [(0, 0.5)], "accuracy/hellaswag": [(2, 0.25)],
        "optimization/learning_rate": [(0, pytest.approx(1e-3)), (1, float("inf"))],
        "speed/tokens_per_second": [(0, 200.0), (1, 200.0)], "speed/MFU_percent": [(0, 12.5)],
    }  # fmt: skip
    assert texts == {2: "    # é\n    \n     *x*"}


def test_a_full_disk_is_said_once_and_told_by_the_exit_code_and_what_was_written_before_is_shown(folder):
    out, error = run(folder, "-x", "40", "-g", "0", "--tensorboard", "events", code=1, **limit_files(3000))
    assert re.findall(".* lost .*", out) == ["events: an event was lost (no space left on device); the run goes on"]
    lost = int(re.fullmatch(r"error: events lacks (\d+) events that could not be written\n", error)[1])
    steps = [step for step, _ in shown(folder / "events")[0]["loss/train"]]
    assert "step   40/40" in out and 0 < len(steps) < 40 and lost >= 40 - len(steps)
    assert steps == list(range(len(steps)))


def test_what_cannot_work_is_refused_in_one_line_before_anything_is_written(folder, trainer_here, monkeypatch):
    (folder / "run.log").write_text("s:0 tel:1.0000\n")
    (folder / "link").symlink_to("gone")
    before = sorted(folder.rglob("*"))
    refused = "{}: events cannot be written there ({}); choose another --tensorboard"
    for place, message in [
        ("data_train.bin", refused.format("data_train.bin", "not a directory")),
        ("data_train.bin/x", refused.format("data_train.bin/x", "not a directory")),
        ("link", refused.format("link", "a link to nowhere")),
        ("events", "--tensorboard needs TensorBoard (import of tensorboard.compat.proto halted; None in sys.modules); "
         "install it with: pip install tensorboard"),
    ]:  # fmt: skip
        if place == "events":
            monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
        _, error = trainer_here(GPT2, folder, [*FLAGS, "--tensorboard", place, "-o", "run.log"], 1)
        assert error == f"error: {message}\n"
    assert sorted(folder.rglob("*")) == before and (folder / "run.log").read_text() == "s:0 tel:1.0000\n"
