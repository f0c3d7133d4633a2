"""The log file: llm.c's lines, readable while they are written, cut where a resumed run takes over."""

import os
import socket

from conftest import refusal
from llmc.run.logger import Logger, read_log

import numpy as np
import pytest


def write_run(logger, steps):
    for step in steps:
        if step % 2 == 0:
            logger.log(step, val_loss=5 - step / 8)
        logger.log(step, train_loss=4 - step / 16)


def test_lines_are_llm_cs_and_on_disk_at_once(tmp_path):
    path = tmp_path / "main.log"
    logger = Logger(path)
    assert path.read_text() == ""
    logger.log(0, val_loss=5.325461)
    assert path.read_text() == "s:0 tel:5.3255\n"
    logger.log(0, train_loss=np.float32(4.25))
    logger.log(20, accuracy=0.29551)
    logger.log(40, val_loss=3.5, bits_per_byte=1.23456)
    assert path.read_text() == ("s:0 tel:5.3255\ns:0 trl:4.2500\ns:20 eval:0.2955\ns:40 tel:3.5000\ns:40 bpb:1.2346\n")
    logger.close()


@pytest.mark.parametrize("before", ["", "s:0 trl:9.0000\ns:1 trl:8.0000\n", "s:0 trl:9.0000\ns:1 tr", "s"], ids=repr)
def test_a_new_run_starts_a_log_afresh_and_a_resumed_one_begins_one_if_there_is_none(tmp_path, before):
    (tmp_path / "main.log").write_text(before)
    for name, step in ("main.log", 0), ("resumed.log", 4):
        Logger(tmp_path / name, step).log(step, train_loss=1.0)
        assert (tmp_path / name).read_text() == f"s:{step} trl:1.0000\n"


@pytest.mark.parametrize("first_step", [0, 5], ids=["new", "resumed"])
@pytest.mark.parametrize(
    "content", [b"buy milk\n", b"a thesis of one line", b"s:0 trl:1.0000\nbuy mil", b"\xff\xd8\0\n"], ids=repr
)
def test_what_is_no_log_is_left_alone(tmp_path, content, first_step):
    (tmp_path / "notes").write_bytes(content)
    message = refusal(Logger, tmp_path / "notes", first_step)
    assert "notes: not a log" in message and (content != b"buy milk\n" or "not a log line: 'buy milk'" in message)
    assert (tmp_path / "notes").read_bytes() == content and os.listdir(tmp_path) == ["notes"]


@pytest.mark.parametrize("first_step", [0, 5], ids=["new", "resumed"])
def test_one_run_at_a_time_logs_to_a_file(tmp_path, monkeypatch, capsys, first_step):
    """Also by another name of the directory, and after the first has replaced the file, as a resumed run does."""
    monkeypatch.setattr("llmc.files.directory.PATIENCE", 0)
    path, other = tmp_path / "runs" / "main.log", tmp_path / "other" / "main.log"
    path.parent.mkdir()
    other.parent.symlink_to("runs")
    path.write_text("s:1 trl:2.0000\ns:7 trl:1.0000\n")
    first = Logger(path, first_step=5)
    first.log(5, train_loss=1.5)
    message = refusal(Logger, other, first_step)
    assert f"other/main.log is in use by process {os.getpid()} on {socket.gethostname()}: " in message
    assert "choose another log file (-o)" in message
    first.close()
    assert path.read_text() == "s:1 trl:2.0000\ns:5 trl:1.5000\n"
    Logger(other, first_step=6).log(6, train_loss=1.25)
    assert path.read_text() == "s:1 trl:2.0000\ns:5 trl:1.5000\ns:6 trl:1.2500\n" and other.parent.is_symlink()
    assert os.listdir(path.parent) == ["main.log"]


@pytest.mark.parametrize("first_step", [0, 5], ids=["new", "resumed"])
@pytest.mark.parametrize("target", ["other.log", "missing/log", "new", None], ids=str)
def test_a_log_that_is_a_link_is_refused_and_stays(tmp_path, target, first_step):
    """Without a target: a hard link."""
    log, other = tmp_path / "main.log", tmp_path / "other.log"
    other.write_text("s:1 trl:2.0000\n")
    log.symlink_to(target) if target else os.link(other, log)
    before = sorted(os.listdir(tmp_path))
    what = "a symbolic link" if target else "not a regular file with a single name"
    assert f"cannot be written (main.log is {what}); choose another" in refusal(Logger, log, first_step)
    assert other.read_text() == "s:1 trl:2.0000\n" and sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("first_step", [0, 5], ids=["new", "resumed"])
def test_stdout_a_device_and_a_pipe_take_a_log(tmp_path, first_step, capfd):
    (tmp_path / "null").symlink_to("/dev/null")
    Logger(tmp_path / "null", first_step).log(5, train_loss=1.0)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    Logger(tmp_path / "pipe", first_step).log(5, train_loss=1.0)
    assert os.read(reader, 99) == b"s:5 trl:1.0000\n"
    os.close(reader)
    print("before", flush=True)
    Logger("/dev/stdout", first_step).log(5, train_loss=1.0)  # here it is a file
    print("behind", flush=True)
    assert capfd.readouterr().out == "before\ns:5 trl:1.0000\nbehind\n"
    assert sorted(os.listdir(tmp_path)) == ["null", "pipe"]


def test_a_resumed_run_leaves_the_log_of_one_that_never_stopped(tmp_path):
    whole, stopped = tmp_path / "whole.log", tmp_path / "stopped.log"
    write_run(Logger(whole), range(10))
    write_run(Logger(stopped), range(7))
    with open(stopped, "a") as file:
        file.write("s:7 tr")  # killed while it wrote
    write_run(Logger(stopped, first_step=4), range(4, 10))
    assert stopped.read_text() == whole.read_text()


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    assert "-o" in refusal(Logger, tmp_path / "missing" / "main.log")
    assert "main.log: cannot be written" in refusal(Logger, tmp_path / "missing" / "main.log", 5)
    assert "is a directory" in refusal(Logger, tmp_path)


def test_a_power_cut_may_leave_zeros_in_a_log(tmp_path):
    (tmp_path / "run.log").write_bytes(b"s:0 trl:1.0000\ns:1 tr" + bytes(9) + b"s:2 trl:3.0000\n")
    Logger(tmp_path / "run.log", first_step=3).close()
    assert (tmp_path / "run.log").read_text() == "s:0 trl:1.0000\ns:2 trl:3.0000\n"


def test_logs_of_llm_cs_later_trainer_are_read(tmp_path):
    path = tmp_path / "main.log"
    path.write_text("s:0 tel:11.0\ns:0 eval:0.25\n\ns:1 trl:10.5 lr:0.1 norm:inf\ns:2 trl:nan lr:0.1 norm:2.5\ns:3 t")
    log = read_log(path)
    np.testing.assert_array_equal(log["trl"][1], [10.5, np.nan])
    np.testing.assert_array_equal(log["norm"][1], [np.inf, 2.5])
    np.testing.assert_array_equal(log["eval"][0], [0])


def test_what_is_no_log_is_refused(tmp_path):
    assert "main.log: no such file" in refusal(read_log, tmp_path / "main.log")
    steps = [f"s:{step} trl:1.0" for step in ("x", "-1", "1.5", "99999999999999999999", "9" * 5000)]
    for line in "hello", "s:1 trl:x", "trl:1 s:1", "s:1 trl:1:2", "s:1 trl", *steps:
        (tmp_path / "main.log").write_text(f"s:0 trl:1.0\n{line}\n")
        assert f"not a log line: {line[:60]!r}; " in refusal(read_log, tmp_path / "main.log")
    (tmp_path / "main.log").write_bytes(b"\xff\xfe\n")
    assert "not a log file" in refusal(read_log, tmp_path / "main.log")
