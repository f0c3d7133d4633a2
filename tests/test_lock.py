"""Of two runs that would write to one place, the second waits, and is refused if that was in vain."""

import errno
import fcntl
import os
import re
import signal
import socket
import threading
from pathlib import Path

from conftest import refusal
from llmc.files.checkpoint import model_path
from llmc.files.checkpoint_dir import checkpoints, lock_checkpoints
from llmc.files.directory import Lock

import pytest

ME = f"process {os.getpid()} on {socket.gethostname()}"


def take(path: Path) -> Lock:
    return Lock(path, "the place", "--flag")


def test_the_second_is_refused_in_a_line_that_names_host_and_process(tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.files.directory.PATIENCE", 0)
    first = take(tmp_path / "lock")
    said = refusal(take, tmp_path / "lock")
    assert said == f"the place is in use by {ME}: wait for it to end, or choose another --flag"
    assert (tmp_path / "lock").read_text() == ME + "\n"
    first.release()
    assert os.listdir(tmp_path) == [] and take(tmp_path / "lock")


def test_a_lock_whose_file_somebody_removed_leaves_the_next_ones_file(tmp_path):
    first = take(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    second = take(tmp_path / "lock")
    first.release()
    assert (tmp_path / "lock").exists() and second


def test_who_waits_hears_ctrl_c(tmp_path, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without
    first = take(tmp_path / "lock")
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        take(tmp_path / "lock")
    signal.signal(signal.SIGINT, before)
    assert first.release.alive and (tmp_path / "lock").exists()


def test_a_file_that_was_removed_in_between_is_not_the_lock(tmp_path, monkeypatch, capsys):
    """The run before removes its file when it ends, and a third may make a new one at once."""
    path, real, rivals = tmp_path / "lock", fcntl.flock, []

    def flock(descriptor, how):
        if not rivals:
            path.unlink()
            rivals.append(open(path, "x"))
            real(rivals[0], fcntl.LOCK_EX)
            threading.Timer(0.5, rivals[0].close).start()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    taken = take(path)
    assert rivals[0].closed and "in use by another process" in capsys.readouterr().err
    assert path.read_text() == ME + "\n" and taken


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=os.strerror)
def test_a_file_system_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    taken = take(tmp_path / "lock")
    said = capsys.readouterr().err
    assert said.startswith("the place: cannot be locked (") and said.count("\n") == 1 and taken


@pytest.mark.parametrize("put", [
    lambda lock, thesis: lock.symlink_to(thesis), lambda lock, thesis: lock.symlink_to(thesis.with_name("new")),
    lambda lock, thesis: os.link(thesis, lock), lambda lock, thesis: os.mkfifo(lock),
    lambda lock, thesis: lock.write_text("thesis"),
], ids=["link", "dangling link", "hard link", "pipe", "notes"])  # fmt: skip
def test_what_is_no_lock_is_refused_and_stays(tmp_path, put):
    thesis, lock = tmp_path / "thesis", tmp_path / "Run" / ".lock"
    lock.parent.mkdir()
    thesis.write_text("thesis")
    put(lock, thesis)
    assert re.fullmatch(r"the place: cannot be written \(.lock [^\n]*\); choose another --flag", refusal(take, lock))
    assert thesis.read_text() == "thesis" and not (tmp_path / "new").exists()
    assert not lock.is_file() or lock.read_text() == "thesis"


# Directories of checkpoints


def test_a_directory_that_was_made_for_nothing_goes_away_and_what_has_a_lock_alone_is_empty(tmp_path):
    run = tmp_path / "a" / "run"
    lock = lock_checkpoints(run)
    assert os.listdir(run) == [".llm.cupy.lock"] and checkpoints(run) == []
    assert "neither a model.bin nor a checkpoint in it" in refusal(model_path, run)
    lock.release()
    assert os.listdir(tmp_path) == []
    (tmp_path / "mine").mkdir()
    lock_checkpoints(tmp_path / "mine").release()
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == []


@pytest.mark.parametrize("name, reason", [
    ("link", "a link to nowhere"), ("link/run", "a link to nowhere"), ("file", "not a directory"),
    ("file/run", "not a directory"), ("/proc/run", "no such file or directory"),
])  # fmt: skip
def test_a_directory_that_nothing_can_be_written_to_is_refused_at_the_start(tmp_path, name, reason):
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "file").write_text("")
    assert f"{name}: cannot be written ({reason}); choose another --" in refusal(lock_checkpoints, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


@pytest.mark.parametrize("name", ["step_00000040", "copied"])
def test_a_checkpoint_is_no_directory_of_checkpoints(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("run", name).mkdir(parents=True)
    if name == "copied":
        for file in "model.bin", "state.json":
            Path("run", name, file).touch()
    before = sorted(Path("run").rglob("*"))
    said = refusal(lock_checkpoints, f"run/{name}")
    assert said == f"run/{name} is a checkpoint, not a directory of checkpoints: use --checkpoint-dir run"
    assert sorted(Path("run").rglob("*")) == before
