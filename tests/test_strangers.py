"""Strangers neither join a run of several ranks, nor delay it, nor make it print; and a rank that hangs, is killed or
breaks off in the midst of a message is named in one line, ends the job, and costs no checkpoint."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from device.errors import UserError
from llmc.files.checkpoint import load_checkpoint
from llmc.files.checkpoint_dir import newest_checkpoint
from llmc.ranks import handshake, launcher
from llmc.ranks.group import LENGTH
from llmc.ranks.handshake import HELLO, MAGIC, PROOF, RANDOM, find_secret, make_key, prove
from llmc.ranks.heartbeat import Heartbeat, hang_after
from support.ranks import (
    HOST,
    ROOT,
    begun,
    children,
    ended,
    finish,
    folder,
    free_port,
    most,
    on,
    patched,
    run,
    start,
    torchrun_env,
    until,
)
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest

__all__ = ["folder"]  # a fixture
KEY = make_key(b"the secret", "a job", 3)


# Strangers


@pytest.fixture
def rank_0() -> Iterator[tuple[int, dict[int, socket.socket]]]:
    """Rank 0 of three ranks, in a thread: its port, and the ranks that it has let in. At the end the others come."""
    listener, accepted = handshake.listen("127.0.0.1", 0), {}
    port = listener.getsockname()[1]

    def work() -> None:
        for rank, connection, _ in filter(None, handshake.accept(listener, KEY, 3)):
            accepted[rank] = connection

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield port, accepted
    for rank in {1, 2} - accepted.keys():
        handshake.connect("127.0.0.1", port, KEY, rank).close()
    thread.join(10)
    assert not thread.is_alive() and accepted.keys() == {1, 2}
    with pytest.raises(ConnectionRefusedError):  # it listens no longer than it must
        socket.create_connection(("127.0.0.1", port), timeout=5)


def one_bit_off(said: bytes) -> bytes:
    return said[:-1] + bytes([said[-1] ^ 1])


def hello(key: bytes, challenge: bytes, rank: int, magic: bytes = MAGIC, who: bytes = b"rank") -> bytes:
    said = HELLO.pack(magic, handshake.version(), rank, bytes(RANDOM))
    return said + prove(key, who, challenge, said)


@pytest.mark.parametrize("answer", [
    lambda challenge: b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO.size + PROOF),
    lambda challenge: hello(make_key(b"another secret", "a job", 3), challenge, 1),
    lambda challenge: hello(make_key(b"the secret", "another job", 3), challenge, 1),
    lambda challenge: hello(make_key(b"the secret", "a job", 4), challenge, 1),
    lambda challenge: hello(KEY, bytes(RANDOM), 1),  # the answer to another challenge
    lambda challenge: hello(KEY, challenge, 1, who=b"rank 0"),
    lambda challenge: hello(KEY, challenge, 1, magic=b"llm.cupy"),
    lambda challenge: hello(KEY, challenge, 0),
    lambda challenge: hello(KEY, challenge, 3),
    lambda challenge: hello(KEY, challenge, 2),  # which is there already
    lambda challenge: one_bit_off(hello(KEY, challenge, 1)),
], ids="http secret job size replayed reflected protocol zero range twice bit".split())  # fmt: skip
def test_rank_0_accepts_none_but_the_ranks_of_its_run(rank_0, answer):
    port, accepted = rank_0
    with handshake.connect("127.0.0.1", port, KEY, 2):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(answer(stranger.recv(RANDOM)))
            assert stranger.recv(100) == b""  # closed, and nothing was said
        assert accepted.keys() == {2}


@pytest.mark.parametrize("secret", [b"another secret", None])
def test_a_rank_believes_no_rank_0_that_lacks_the_secret(secret):
    """secret: of who listens; None: it sends back what it was sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        found = pool.submit(handshake.connect, *server.getsockname(), KEY, 1)
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(RANDOM))
            said = handshake.read_exactly(connection, HELLO.size + PROOF)
            other = secret and prove(make_key(secret, "a job", 3), b"rank 0", bytes(RANDOM), said[: HELLO.size])
            connection.sendall(other or said[HELLO.size :])
            with pytest.raises(OSError, match="is not this run"):
                found.result(timeout=10)


def flood(port: int) -> None:
    """10,000 connections that stay silent, or say garbage or half of a message. Some 500 are open at a time."""
    texts, some = (b"", b"GET / HTTP/1.1\r\n", bytes(HELLO.size + PROOF), MAGIC, bytes(2000)), []
    for i in range(10_000):
        some.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        with suppress(OSError):  # it was closed already
            some[-1].send(texts[i % len(texts)])
        if len(some) > 500:
            some.pop(0).close()


def test_10000_hostile_connections_let_nobody_in_and_delay_no_rank_by_a_second(rank_0):
    """Rank 1 comes in the midst of them, rank 2 when all have come."""
    port, accepted = rank_0
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood, port)
        time.sleep(0.3)
        for rank in (1, 2):
            assert flooding.done() == (rank == 2) and len(accepted) == rank - 1
            began = time.monotonic()
            with handshake.connect("127.0.0.1", port, KEY, rank):
                assert time.monotonic() - began < 1
                until(lambda rank=rank: rank in accepted)
            flooding.result()


def test_the_secret_is_the_environments_or_in_a_file_that_nobody_else_can_read(tmp_path):
    home, other = {"HOME": str(tmp_path)}, tmp_path / "other"
    with ThreadPoolExecutor(8) as pool:  # all ranks of a machine may be the first
        made = set(pool.map(find_secret, [home] * 8))
    path = tmp_path / ".llm.cupy.secret"
    assert len(made) == 1 and len(made.pop()) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert find_secret(home | {"LLMC_SECRET": "words"}) == b"words"
    other.write_text("of a file\n")
    other.chmod(0o600)
    assert find_secret({"LLMC_SECRET_FILE": str(other)}) == b"of a file"
    (tmp_path / "readable").touch()
    (tmp_path / "readable").chmod(0o640)
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "link").symlink_to(other)
    for name, said in {
        "readable": "nobody else can read", "empty": "is empty", "link": "set LLMC_SECRET", "nowhere": "cannot be used",
        ".": "LLMC_SECRET",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=said):
            find_secret({"LLMC_SECRET_FILE": str(tmp_path / name)})
    with pytest.raises(UserError, match="cannot be used"):
        find_secret({"HOME": "/proc/none"})


@on("cpu", long="cuda")
@pytest.mark.parametrize("version, said", [
    (handshake.version(), "rank 1 on h\\x1b[2J: \\x1b[2J\\nstep 1/1: all is well"),
    (bytes(32), "rank 1 runs another version of the code than rank 0: have the same on all machines"),
], ids=["words", "version"])  # fmt: skip
def test_a_peers_words_are_escaped_and_set_no_exit_status_and_another_version_is_named(
    folder, version, said, monkeypatch
):
    port, key = free_port(), make_key(b"of the tests", "", 2)
    process = start(folder, **torchrun_env(0, 2, port))
    monkeypatch.setattr(handshake, "version", lambda: version)

    def connected() -> socket.socket | None:
        with suppress(OSError):
            return handshake.connect("127.0.0.1", int(port), key, 1)

    with until(connected) as peer:
        for message in b'["value", "h\\u001b[2J"]', b'["failed", "\\u001b[2J\\nstep 1/1: all is well", 0]':
            peer.sendall(LENGTH.pack(len(message)) + message)
        assert finish(process, 1)[1] == f"error: {said}\n"


def test_every_source_file_counts_in_the_version_of_the_code(tmp_path, monkeypatch):
    ours = {path.suffix for name in ("llmc", "kernels", "device") for path in (ROOT / name).rglob("*.*")}
    assert ours - {".pyc"} == set(handshake.SOURCES)
    monkeypatch.setattr(handshake, "ROOT", tmp_path)
    paths = [tmp_path / f"{folder}/one{suffix}" for folder in ("llmc/run", "kernels", "device/cpp") for suffix in ours]
    found = set()
    for path in (tmp_path / "train.py", *(path for path in paths if path.suffix != ".pyc")):
        path.parent.mkdir(parents=True, exist_ok=True)
        for text in "1", "2":
            path.write_text(text)
            assert handshake.version.__wrapped__() not in found, path
            found.add(handshake.version.__wrapped__())


# A rank that hangs


def test_a_rank_hangs_that_is_silent_or_stands_still_but_not_in_long_work_or_the_first_step():
    now = 0.0
    heart = Heartbeat(0, 30, lambda: now)

    def at(seconds: float, *counts: int) -> tuple:
        """What is found at this time if rank 1, or ranks 1 and 2, are then heard with these counts."""
        nonlocal now
        now = seconds
        for r, count in enumerate(counts, 1):
            heart.hear(r, count)
        return heart.silent(), heart.standing()

    assert at(0, 0, 0) == (None, None)
    assert at(29, 0) == (None, None)
    assert at(31, 0) == (2, None)
    assert at(1000, 0, 0) == (None, None)  # the first step may take any time
    heart.slowest = 1.0
    heart.progress()
    assert at(1001, 1, 0) == (None, None)
    assert at(1061, 1, 0) == (None, None)
    assert at(1062, 1, 0) == (None, ([2], 61))
    heart.slowest = 7.0
    assert at(1062, 1, 0) == (None, None)
    assert at(1072, 1, 1) == (None, None)
    assert at(1143, 1, 1) == (None, ([0, 1, 2], 71))
    heart.begin_anew()
    assert at(1150, 1, 1) == (None, None)
    with heart.long_work():
        assert at(9000, 1, 1) == (None, None)
    assert at(9070, 1, 1) == (None, None)
    assert at(9071, 1, 1) == (None, ([0, 1, 2], 71))
    heart.hear(2, 1, busy=True)
    assert at(9200, 1) == (2, None)


@pytest.mark.parametrize("wish", ["x", "0", "nan", "-3", "inf"])
def test_a_deadline_that_is_none_is_refused_before_ranks_are_started(wish, monkeypatch):
    monkeypatch.setenv("LLMC_HANG_AFTER", wish)
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    with pytest.raises(UserError, match=f"LLMC_HANG_AFTER is {wish}"):
        launcher.launch(2)
    assert hang_after({}) == 30 and hang_after({"LLMC_HANG_AFTER": "2.5"}) == 2.5


@pytest.mark.long
@pytest.mark.parametrize("victim", [1, 0])
def test_stopping_all_ranks_for_a_while_ends_nothing_and_stopping_one_ends_all(folder, victim):
    deadline = 2 if folder.name == "cpu" else 10
    process, pids = begun(folder, "--checkpoint-dir", "run", "-n", "1", LLMC_HANG_AFTER=str(deadline))
    for number, seconds in ((signal.SIGSTOP, 2 * deadline), (signal.SIGCONT, 1.5 * deadline)):
        for pid in (process.pid, *pids):
            os.kill(pid, number)
        time.sleep(seconds)
    assert process.poll() is None and not ended(pids)
    os.kill(pids[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    _, error = finish(process, 1)
    assert time.monotonic() - stopped < 10 * deadline + 20 and ended(pids)
    assert error.startswith(f"error: rank {victim} on {HOST} has said nothing for {deadline} s: ")
    assert newest_checkpoint(folder / "run") is not None


@pytest.mark.long
def test_a_rank_that_does_nothing_is_named_but_a_save_may_take_long(folder):
    path = patched(folder, """
import llmc.run.saver
from llmc.data.dataloader import DataLoader
real, next_batch, calls = llmc.run.saver.save_checkpoint, DataLoader.next_batch, []
def save(*arguments):
    time.sleep(3 * float(os.environ["LLMC_HANG_AFTER"]))
    return real(*arguments)
def hangs(self, inputs, targets):
    calls.append(0)
    while len(calls) > 12 and RANK == "1":
        time.sleep(1)
    next_batch(self, inputs, targets)
llmc.run.saver.save_checkpoint, DataLoader.next_batch = save, hangs
""")  # fmt: skip
    deadline = 2 if folder.name == "cpu" else 10
    flags = ["--gpus", str(most(folder)), "-x", "1000", "-z", "1", "--checkpoint-dir", "run", "-n", "8", "-v", "0"]
    out, error = run(folder, *flags, path=path, code=1, LLMC_HANG_AFTER=str(deadline))
    assert "saved run/step_00000008" in out
    found = re.fullmatch(rf"error: rank 1 on {HOST} hangs: it did nothing for (\d+) s \(LLMC_HANG_AFTER\)\n", error)
    assert 2 * deadline <= int(found[1]) <= 3 * deadline


# Breaks a rank at a moment after its imports, or while the second checkpoint is saved: all ranks then send their parts
# of AdamW's moments to rank 0.
BREAKS = """
import random, socket, threading, torch.distributed, train_gpt2_fp32
from llmc.ranks import collectives, ranks
from llmc.ranks.group import LENGTH
real, calls, kind, moment = collectives.whole, [], "{kind}", {moment}

def breaks():
    time.sleep(moment)
    if kind in ("SIGSTOP", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, kind))
    while not (ranks._group and ranks._group.peers):
        time.sleep(0.01)
    peer = random.Random(moment).choice(list(ranks._group.peers.values()))
    if kind == "closed":
        return peer.connection.shutdown(socket.SHUT_RDWR)
    with peer.sending:
        peer.connection.sendall(LENGTH.pack(1000) + b'["value", "')
        time.sleep(random.Random(moment).choice([0, 1000]))  # more messages follow, or nothing does

def whole(*arguments):
    calls.append(0)
    for i, piece in enumerate(real(*arguments)):
        if len(calls) == 5 and i == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece

if RANK == "{victim}" and kind == "saving":
    collectives.whole = whole
elif RANK == "{victim}":
    threading.Thread(target=breaks, daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind, victim, seed", [
    (kind, victim, seed) for kind in ("SIGSTOP", "SIGKILL", "closed", "half", "saving") for victim in range(4)
    for seed in range(1 if kind == "saving" else 10)
])  # fmt: skip
def test_a_rank_that_breaks_at_a_random_moment_is_named_and_leaves_no_rank_behind_and_a_whole_checkpoint(
    folder, kind, victim, seed
):
    count, longest, deadline = (4, 4, 5) if folder.name == "cpu" else (most(folder), 20, 10)
    if victim >= count:
        pytest.skip("there is no such rank")
    moment = np.random.default_rng(seed).uniform(0, longest)
    path = patched(folder, BREAKS.format(kind=kind, victim=victim, moment=moment))
    flags = ["--gpus", str(count), "-z", "1", "--checkpoint-dir", "run", "-n", "3", "-nk", "2", "-x", "1000000"]
    process = start(folder, *flags, path=path, LLMC_CPU_THREADS="1", LLMC_HANG_AFTER=str(deadline))
    pids = children(process)
    out, error = process.communicate(timeout=100)
    assert process.returncode != 0 and ended(pids), error
    # Before they have met, each waits, says so, and gives up by itself.
    error, *others = {line for line in error.splitlines() if not line.startswith(("waiting at", "rank "))}
    named = re.match(r"error: rank (\d)( |:)", error)
    either = kind in ("closed", "half") and victim == 0  # who is on the other side of its connection
    assert named and not others and (int(named[1]) == victim or either), (error, others)
    saved = re.findall(r"saved run/step_(\d+)", out)
    assert kind != "saving" or saved == ["00000003"]
    if saved:
        checkpoint = newest_checkpoint(folder / "run")
        assert load_checkpoint(checkpoint, GPT2Config)[-1]["step"] >= int(saved[-1])


# A step that is not finite


@pytest.mark.long
@pytest.mark.parametrize("ranks, when, where, value, zero, step, said", [
    ("1", "before", "grads.lnfb", np.nan, "0", 2, "so all parameters are"),
    ("1", "before", "grads.lnfb", np.nan, "1", 2, "so all parameters are"),
    ("1", "after", "params.lnfb", np.nan, "0", 3, "so all parameters are"),
    # Whose square overflows: with -z the owner of the weight alone sees it, which is rank 0 or another one.
    ("012", "before", "grads.fcprojw", 1e25, "1", 2, "and the others have taken the step"),
    ("012", "before", "grads.wte", 1e25, "1", 2, "and the others have taken the step"),
])  # fmt: skip
def test_a_number_that_is_not_finite_on_one_rank_alone_stops_all_before_it_spreads(
    folder, ranks, when, where, value, zero, step, said
):
    """It is in a gradient before the second update, or in a parameter after it."""
    path = patched(folder, f"""
import llmc.step.update
real = llmc.step.update.adamw_update
def spoil(model, t, when):
    if t == 2 and when == "{when}" and RANK in "{ranks}":
        model.{where}.reshape(-1)[5] = float("{value}")
def update(model, adamw, exchange, lr, t):
    spoil(model, t, "before")
    real(model, adamw, exchange, lr, t)
    exchange.gather_parameters()
    spoil(model, t, "after")
llmc.step.update.adamw_update = update
""")  # fmt: skip
    flags = ["--gpus", "2", "-z", zero, "--checkpoint-dir", "run", "-n", "1", "-x", "6", "-v", "0"]
    _, error = run(folder, *flags, path=path, code=1)
    assert re.match(rf"error: step {step}: its loss \(.*\) or gradients are not finite.* {said}", error)
    config, tensors, *_ = load_checkpoint(newest_checkpoint(folder / "run"), GPT2Config)
    assert all(np.isfinite(values).all() for values in tensors.values())
