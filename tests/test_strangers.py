"""Strangers neither join a run of several ranks, nor delay it, nor make it print; and a rank that hangs, is killed or
breaks off in the midst of a message is named in one line, ends the job, and costs no checkpoint."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from device.errors import UserError
from llmc.files.checkpoint import load_checkpoint
from llmc.files.checkpoint_dir import newest_checkpoint
from llmc.ranks import handshake, launcher
from llmc.ranks.group import LENGTH
from llmc.ranks.handshake import HELLO, MAGIC, PROOF, RANDOM, find_secret, make_key, prove
from llmc.ranks.heartbeat import Heartbeat, hang_after
from train_gpt2_fp32 import GPT2Config

import pytest
from test_ranks import (
    FLAGS,
    ROOT,
    SCRIPTS,
    begun,
    ended,
    finish,
    folder,
    free_port,
    most,
    on,
    run,
    start,
    torchrun_env,
)

__all__ = ["folder"]  # a fixture
HOST = socket.gethostname()
KEY = make_key(b"the secret", "a job", 3)


# Strangers


class Accepting:
    """Rank 0's side of three ranks, in a thread. accepted: the ranks that came in."""

    def __init__(self):
        self.accepted: dict[int, socket.socket] = {}
        self.listener = handshake.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        for found in handshake.accept(self.listener, KEY, 3):
            if found:
                self.accepted[found[0]] = found[1]

    def close(self) -> None:
        """Lets the last ranks in."""
        for rank in {1, 2} - self.accepted.keys():
            handshake.connect("127.0.0.1", self.port, KEY, rank).close()
        self.thread.join(10)
        assert not self.thread.is_alive() and self.accepted.keys() == {1, 2}
        with pytest.raises(ConnectionRefusedError):  # it listens no longer than it must
            socket.create_connection(("127.0.0.1", self.port), timeout=5)


@pytest.fixture
def accepting():
    found = Accepting()
    yield found
    found.close()


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
def test_rank_0_accepts_none_but_the_ranks_of_its_run(accepting, answer):
    with handshake.connect("127.0.0.1", accepting.port, KEY, 2):
        with socket.create_connection(("127.0.0.1", accepting.port), timeout=5) as stranger:
            stranger.sendall(answer(stranger.recv(RANDOM)))
            assert stranger.recv(100) == b""  # closed, and nothing was said
        assert accepting.accepted.keys() == {2}


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


FLOOD = """
import os, socket, sys
open_ones, port = [], int(sys.argv[1])
print(flush=True)
for i in range(10_000):
    one = socket.create_connection(("127.0.0.1", port), timeout=20)
    one.setblocking(False)
    try:
        one.send((b"", b"GET / HTTP/1.1\\r\\n", os.urandom(108), b"llmcupy2", bytes(2000))[i % 5])
    except OSError:
        pass  # it was closed already
    open_ones.append(one)
    if len(open_ones) > 500:
        open_ones.pop(0).close()
print(flush=True)
sys.stdin.read()
"""


def test_10000_hostile_connections_let_nobody_in_and_delay_no_rank_by_a_second(accepting):
    """Silent ones, garbage and half messages; rank 1 comes in the midst of them, rank 2 when all have come."""
    command = [sys.executable, "-c", FLOOD, str(accepting.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
        for rank in (1, 2):
            flood.stdout.readline()
            time.sleep(0.3 if rank == 1 else 0)
            assert flood.poll() is None and len(accepting.accepted) == rank - 1
            began = time.monotonic()
            with handshake.connect("127.0.0.1", accepting.port, KEY, rank):
                assert time.monotonic() - began < 1
        flood.stdin.close()
        assert flood.wait() == 0


def test_the_secret_is_the_environments_or_in_a_file_that_nobody_else_can_read(tmp_path):
    home = {"HOME": str(tmp_path)}
    with ThreadPoolExecutor(8) as pool:  # all ranks of a machine may be the first
        made = set(pool.map(find_secret, [home] * 8))
    path = tmp_path / ".llm.cupy.secret"
    assert len(made) == 1 and len(made.pop()) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert find_secret(home | {"LLMC_SECRET": "words"}) == b"words"
    (tmp_path / "other").write_text("of a file\n")
    (tmp_path / "other").chmod(0o600)
    assert find_secret({"LLMC_SECRET_FILE": str(tmp_path / "other")}) == b"of a file"
    path.chmod(0o640)
    with pytest.raises(UserError, match="nobody else can read"):
        find_secret(home)
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="set LLMC_SECRET"):
        find_secret(home)
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="LLMC_SECRET"):
            find_secret({"LLMC_SECRET_FILE": str(wrong)})
    with pytest.raises(UserError, match="cannot be used"):
        find_secret({"HOME": "/proc/none"})


@on("cpu", long="cuda")
def test_the_words_of_a_peer_are_escaped_and_set_no_exit_status(folder):
    port = free_port()
    env = torchrun_env(0, 2, port)
    process = start(folder, **env)
    key = make_key(find_secret(env), "", 2)
    for _ in range(100):
        try:
            peer = handshake.connect("127.0.0.1", int(port), key, 1)
            break
        except OSError:
            time.sleep(0.1)
    with peer:
        for message in b'["value", "h\\u001b[2J"]', b'["failed", "\\u001b[2J\\nstep 1/1: all is well", 0]':
            peer.sendall(LENGTH.pack(len(message)) + message)
        _, error = finish(process, 1)
    assert error == "error: rank 1 on h\\x1b[2J: \\x1b[2J\\nstep 1/1: all is well\n"


def patched(folder: Path, text: str) -> Path:
    """A trainer in which `text` is run first; RANK is this process's rank."""
    path = folder / "patched.py"
    path.write_text(f"""
import os, runpy, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
RANK = os.environ.get("RANK")
{text}
runpy.run_path({str(ROOT / "train_gpt2_fp32.py")!r}, run_name="__main__")
""")
    return path


@on("cpu", long="cuda")
def test_a_rank_with_another_version_of_the_code_is_named(folder):
    path = patched(folder, """
from llmc.ranks import handshake
if RANK == "1":
    handshake.version = lambda: bytes(32)
""")  # fmt: skip
    _, error = run(folder, "--gpus", "2", path=path, code=1)
    assert error == "error: rank 1 runs another version of the code than rank 0: have the same on all machines\n"


def test_every_source_file_counts_in_the_version_of_the_code(tmp_path, monkeypatch):
    for name in ("llmc", "kernels", "device"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(handshake, "ROOT", tmp_path)
    version, paths = handshake.version.__wrapped__, [path for path in tmp_path.rglob("*") if path.is_file()]
    found = version()
    for path in paths:
        text = path.read_bytes()
        path.write_bytes(text + b" ")
        assert version() != found, path
        path.write_bytes(text)
    assert version() == found and len(paths) > 100


# A rank that hangs


def test_a_rank_hangs_that_is_silent_or_stands_still_but_not_in_long_work_or_the_first_step():
    now = 0.0
    heart = Heartbeat(0, 30, lambda: now)

    def at(seconds: float, **counts: int) -> tuple:
        """What is found after rank 1 and rank 2 were heard at this time, with these counts."""
        nonlocal now
        now = seconds
        for r in (1, 2):
            if f"r{r}" in counts:
                heart.hear(r, counts[f"r{r}"])
        return heart.silent(), heart.standing()

    assert at(0, r1=0, r2=0) == (None, None)
    assert at(29, r1=0) == (None, None)
    assert at(31, r1=0) == (2, None)
    assert at(1000, r1=0, r2=0) == (None, None)  # the first step may take any time
    heart.slowest = 1.0
    heart.progress()
    assert at(1001, r1=1, r2=0) == (None, None)
    assert at(1060, r1=1, r2=0) == (None, None)
    assert at(1062, r1=1, r2=0) == (None, ([2], 61))
    heart.slowest = 7.0
    assert at(1062, r1=1, r2=0) == (None, None)
    assert at(1072, r1=1, r2=1) == (None, None)
    assert at(1143, r1=1, r2=1) == (None, ([0, 1, 2], 71))
    heart.begin_anew()
    assert at(1150, r1=1, r2=1) == (None, None)
    with heart.long_work():
        assert at(9000, r1=1, r2=1) == (None, None)
    assert at(9060, r1=1, r2=1) == (None, None)
    assert at(9071, r1=1, r2=1) == (None, ([0, 1, 2], 71))
    heart.hear(2, 1, busy=True)
    assert at(9200, r1=1) == (2, None)


@pytest.mark.parametrize("wish", ["x", "0", "nan", "-3", "inf"])
def test_a_deadline_that_is_none_is_refused(wish):
    with pytest.raises(UserError, match=f"LLMC_HANG_AFTER is {wish}"):
        hang_after({"LLMC_HANG_AFTER": wish})
    assert hang_after({}) == 30 and hang_after({"LLMC_HANG_AFTER": "2.5"}) == 2.5


def test_a_wrong_deadline_is_refused_before_ranks_are_started(monkeypatch):
    monkeypatch.setenv("LLMC_HANG_AFTER", "x")
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    with pytest.raises(UserError, match="LLMC_HANG_AFTER is x"):
        launcher.launch(2)


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
    assert error.count("\n") == 1
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


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_the_midst_of_a_save_leaves_the_checkpoint_before(folder, victim):
    """With -z 1 all ranks send their parts of AdamW's moments to rank 0 while it writes."""
    path = patched(folder, f"""
from llmc.ranks import collectives
real, calls = collectives.whole, []
def whole(*arguments):
    calls.append(0)
    for i, piece in enumerate(real(*arguments)):
        if len(calls) > 4 and i == 1 and RANK == "{victim}":  # m of the second checkpoint
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece
collectives.whole = whole
""")  # fmt: skip
    flags = ["--gpus", str(most(folder)), "-z", "1", "--checkpoint-dir", "run", "-n", "2", "-x", "6"]
    process = start(folder, *flags, path=path)
    out, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "saved run/step_00000002" in out and "step_00000004" not in out
    assert error.startswith(f"error: rank {victim} on {HOST} is gone") and error.count("\n") == 1
    assert newest_checkpoint(folder / "run").name == "step_00000002"
    out, error = run(folder, *flags, "-y", "1")
    assert "step    6/6" in out and error == ""
    assert sorted(one.name for one in (folder / "run").iterdir() if one.name.startswith("step")) == [
        "step_00000002", "step_00000004", "step_00000006",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("what, step, zero", [("grads", 2, "0"), ("grads", 2, "1"), ("params", 3, "0")])
def test_a_nan_in_one_rank_alone_stops_all_before_it_spreads(folder, what, step, zero):
    path = patched(folder, f"""
import llmc.step.update
real = llmc.step.update.adamw_update
def update(model, adamw, exchange, lr, t):
    spoilt = [model.{what}.lnfb] if t == 2 and RANK == "1" else []
    for array in spoilt if "{what}" == "grads" else []:
        array[:] = float("nan")
    real(model, adamw, exchange, lr, t)
    exchange.gather_parameters()
    for array in spoilt if "{what}" == "params" else []:
        array[:] = float("nan")
llmc.step.update.adamw_update = update
""")  # fmt: skip
    flags = ["--gpus", str(most(folder)), "-z", zero, "--checkpoint-dir", "run", "-n", "1", "-x", "6", "-v", "0"]
    _, error = run(folder, *flags, path=path, code=1)
    assert error.startswith(f"error: step {step}: its loss (nan) or gradients are not finite, so all parameters are") \
        or what == "grads" and error.startswith(f"error: step {step}: its loss (4.")
    assert error.count("\n") == 1
    config, tensors, *_ = load_checkpoint(newest_checkpoint(folder / "run"), GPT2Config)
    assert all((values == values).all() for values in tensors.values())


# Each rank, at random moments

# A process that has imported all that a rank needs. For each line of stdin, which is a moment in seconds, it makes
# ranks of four copies of itself, and one of them breaks at that moment; then it prints the exit status.
FORKED = """
import os, random, runpy, signal, socket, subprocess, sys, threading, time
root, kind, victim, script = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]
sys.path.insert(0, root)
import torch.distributed, train_gpt2_fp32
from llmc.ranks import ranks
from llmc.ranks.group import LENGTH
from llmc.ranks.launcher import launch

def breaks(moment):
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

class Forked:
    def __init__(self, command, env, preexec_fn, **rest):
        self.returncode, self.pid = None, os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.setsid()
            preexec_fn()
            subprocess.Popen = Popen
            os.environ.update(env)
            if env["RANK"] == victim:
                threading.Thread(target=breaks, args=(moment,), daemon=True).start()
            sys.argv = sys.argv[4:]
            sys.stdout = open(os.devnull, "w")
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
        finally:
            os._exit(status if isinstance(status, int) else 1)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

Popen, subprocess.Popen = subprocess.Popen, Forked
for line in sys.stdin:
    moment = float(line)
    launcher = os.fork()
    if not launcher:
        os._exit(launch(4))
    print(os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]), flush=True)
"""


ENV = {"LLMC_CPU_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the latter as llmc/ranks/collectives.py sets it


def break_one(folder: Path, kind: str, victim: int, moments: list[float], **env: str) -> None:
    """Runs four ranks for each moment, of which one breaks at it. All must end with one line that names it, and leave
    the newest checkpoint whole, and no older one than before."""
    if folder.name != "cpu":
        pytest.skip("once is enough")
    script, description = SCRIPTS["gpt2"]
    (folder / "forked.py").write_text(FORKED)
    command = [sys.executable, "forked.py", str(ROOT), kind, str(victim), str(ROOT / script), "-e", description,
               "--device", "cpu", *FLAGS, "-x", "1000000", "-z", "1", "--checkpoint-dir", "run", "-n", "3", "-nk", "2",
               "-y", "1"]  # fmt: skip
    errors = folder / "errors"
    with open(errors, "w") as stderr, subprocess.Popen(
        command, cwd=folder, env=os.environ | ENV | env, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1,
    ) as process:  # fmt: skip
        newest, total = -1, 0
        for moment in moments:
            stderr.seek(0)
            stderr.truncate()
            began = time.monotonic()
            print(moment, file=process.stdin)
            status, took = int(process.stdout.readline()), time.monotonic() - began - moment
            lines, trial = set(errors.read_text().splitlines()), (kind, victim, moment, took)
            # Before they have met, each waits, says so, and gives up by itself.
            error, *others = {line for line in lines if not line.startswith(("waiting at", "rank "))}
            named = re.match(r"error: rank (\d)( |:)", error)
            assert status != 0 and not others, (trial, status, lines)
            either = kind in ("closed", "half") and victim == 0  # who is on the other side of its connection
            assert named and (int(named[1]) == victim or either), (trial, error)
            checkpoint = newest_checkpoint(folder / "run") if (folder / "run").exists() else None
            step = load_checkpoint(checkpoint, GPT2Config)[-1]["step"] if checkpoint else 0
            assert step >= newest, trial
            total, newest = total + (step > newest), step
            print(*trial, step, error, flush=True)
        process.stdin.close()
    assert process.returncode == 0 and newest > 0 and total > 1 or len(moments) == 1


BREAKS = pytest.mark.parametrize("kind, victim", [
    (kind, victim) for kind in ("SIGSTOP", "SIGKILL", "closed", "half") for victim in range(4)
])  # fmt: skip


@pytest.mark.long
@BREAKS
def test_a_rank_that_breaks_at_any_moment_is_named_and_costs_no_checkpoint(folder, kind, victim, rng):
    break_one(folder, kind, victim, rng.uniform(0, 4, 20).round(3).tolist(), LLMC_HANG_AFTER="3")


@pytest.mark.long
@BREAKS
def test_the_same_with_the_deadline_that_is_the_default(folder, kind, victim):
    break_one(folder, kind, victim, [4.0])
