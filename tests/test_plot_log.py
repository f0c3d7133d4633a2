"""The picture of a run: drawn from what the logs hold, or refused in one line."""

import sys
from pathlib import Path

from conftest import refusal
from dev import plot_log
from dev.pictures import check_picture
from llmc.run.logger import Logger

import matplotlib.pyplot as plt
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def logs(tmp_path):
    """Two runs, of which the second has a single training loss of its own and diverges."""
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for path, level in zip(paths, (4.0, 5.0), strict=True):
        logger = Logger(path)
        for step in range(10):
            logger.log(step, train_loss=level - step / 10)
        logger.log(0, val_loss=level + 1)
        logger.log(9, val_loss=level)
    with open(paths[1], "a") as file:
        file.write("s:10 trl:nan\ns:11 tr")
    return paths


def test_what_is_logged_is_drawn_and_bits_per_byte_in_a_panel_of_their_own(logs, tmp_path, monkeypatch):
    logger = Logger(tmp_path / "c.log")
    for step, bits in (0, 8.0), (9, 2.5):
        logger.log(step, train_loss=5.0)
        logger.log(step, val_loss=5.0, bits_per_byte=bits)
    figures, names = [], [*logs, tmp_path / "c.log"]
    monkeypatch.setattr(plt, "close", figures.append)
    monkeypatch.setattr(sys, "argv", ["plot_log.py", *map(str, names), "-o", str(tmp_path / "loss.svg")])
    plot_log.main()
    plot_log.plot(logs, tmp_path / "losses.svg")
    monkeypatch.undo()
    plt.close("all")
    losses, bits = ({line.get_label(): line.get_xydata() for line in axes.lines} for axes in figures[0].axes)
    assert list(losses) == [f"{log}: {what}" for log in names for what in ("training", "validation")]
    np.testing.assert_allclose(losses[f"{logs[0]}: training"], [(step, 4 - step / 10) for step in range(10)])
    np.testing.assert_allclose(losses[f"{logs[1]}: validation"], [(0, 6), (9, 5)])
    assert list(bits) == [f"{names[2]}: validation"] and bits[f"{names[2]}: validation"].tolist() == [[0, 8], [9, 2.5]]
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml") and len(figures[1].axes) == 1


def test_what_cannot_be_drawn_is_refused_in_one_line(logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "notes.txt").write_text("buy milk\n")
    for args, words in [
        (["missing.log"], "missing.log: no such file"),
        (["a.log", "notes.txt"], "notes.txt: not a log line"),
        (["empty.log"], "empty.log: no losses"),
        (["a.log", "-o", "loss.xyz"], "loss.xyz: no picture"),
        (["a.log", "-o", "missing/loss.png"], "missing/loss.png: cannot be written"),
    ]:
        monkeypatch.setattr(sys, "argv", ["plot_log.py", *args])
        assert words in refusal(plot_log.main)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "b.log", "empty.log", "notes.txt"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_takes_the_place_of_an_older_one_and_of_nothing_else(logs, tmp_path, monkeypatch, suffix):
    out, theirs = tmp_path / f"loss.{suffix}", tmp_path / f"thesis.{suffix}"
    plot_log.plot(logs[:1], out)
    before = out.read_bytes()
    plot_log.plot(logs, out)
    assert out.read_bytes() != before
    plt.figure().savefig(theirs)
    before = theirs.read_bytes()
    said = refusal(plot_log.plot, logs, theirs)
    assert f"thesis.{suffix}: there is a file that this program has not drawn: name" in said
    plt.close("all")
    assert theirs.read_bytes() == before


def test_the_pictures_of_the_pages_may_be_drawn_again():
    """By the commands that the pages give."""
    for name in "loss.png", "own-text.png", "profile.png":
        check_picture(ROOT / "doc" / name)
