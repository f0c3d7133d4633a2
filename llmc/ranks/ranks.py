"""The processes that train one model together: how they find one another, exchange small values, and end.

Each process has a number, its rank, and one GPU (on the CPU device they share the cores). The program that starts it
tells it its rank, the number of ranks, and where rank 0 listens. This program is torchrun, Slurm's srun, Open MPI's
mpirun, or `launch` here, for `--gpus`. A process stays connected to rank 0 for the whole run, for small values that all
must know (`all_gather`), and so that all end if one cannot go on. Gradients go another way: llmc/ranks/collectives.py.

A connection begins with the handshake of llmc/ranks/handshake.py. It turns away who does not know the run's secret. All
later messages are JSON behind its length in four bytes. Some of them only serve to notice that a rank hangs
(llmc/ranks/heartbeat.py).
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

from device.errors import UserError, escaped
from llmc.ranks import handshake
from llmc.ranks.handshake import read_exactly
from llmc.ranks.heartbeat import Heartbeat, hang_after

LENGTH = struct.Struct(">I")
LONGEST = 1 << 24      # bytes of a message
PATIENCE = 10          # times LLMC_HANG_AFTER: how long ranks wait for one another at the start
BEATS = 5              # within LLMC_HANG_AFTER seconds
MOST = 1024            # processes that `launch` starts
LAST_GASP = 10         # seconds that `launch` gives the other processes once one has failed
GRACE = 5              # seconds that a failing rank waits before it ends, so that rank 0 can report first
# How ranks notice that a machine is gone: seconds, seconds, times; and milliseconds while something is being sent.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
LAUNCHED = "LLMC_JOB"  # in the environment of processes that `launch` has started
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Place:
    """What the program that starts a process tells it: its rank among `size`, its rank on its machine, where rank 0
    listens, a word that all processes of the job know, and after how many seconds a silent rank hangs."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    job: str
    hang_after: float


def find_place(env: Mapping[str, str]) -> Place | None:
    """This process's place, by the environment, or None if it is alone. Raises UserError if the environment lacks
    something."""
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, or launch
        rank, size, local = env["RANK"], env["WORLD_SIZE"], env.get("LOCAL_RANK", env["RANK"])
        job, address = env.get(LAUNCHED) or env.get("TORCHELASTIC_RUN_ID", ""), env.get("MASTER_ADDR")
    elif "OMPI_COMM_WORLD_RANK" in env and "OMPI_COMM_WORLD_SIZE" in env:  # before Slurm, because srun may call mpirun
        rank, size = env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"]
        local = env.get("OMPI_COMM_WORLD_LOCAL_RANK", rank)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        alone = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if alone else None)
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:  # srun sets the latter; a batch script lacks it
        rank, size, local = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env.get("SLURM_LOCALID", "0")
        job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", ""))
    else:
        return None
    port = env.get("MASTER_PORT", 20000 + zlib.crc32(job.encode()) % 10000)
    told = f"rank {rank} of {size}, {local} on its machine, MASTER_ADDR {address}, MASTER_PORT {port}"
    try:
        rank, size, local, port = int(rank), int(size), int(local), int(port)
        (address or "").encode("idna")  # fails if it cannot be a machine's name
        if not 0 <= rank < size or not 0 < port < 65535:
            raise ValueError(told)
    except ValueError:
        raise UserError(f"the environment of this process is wrong: {told}; set it right for all ranks") from None
    if size == 1:
        return None
    if not address:
        raise UserError("MASTER_ADDR is not set: name rank 0's machine in it for all ranks (mpirun -x MASTER_ADDR=...)")
    taken = LAUNCHED not in env and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens there itself
    return Place(rank, size, local, address, port + taken, job, hang_after(env))


def first_host(nodes: str) -> str:
    """The first of Slurm's list of machines, "gpu[07-09,12]-ib,cpu1" for example."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    return found[1] + (found[2] or "") + found[3]


class Group:
    """A process's connections: rank 0's to all others, theirs to rank 0."""

    def __init__(self, place: Place, secret: bytes, listener: socket.socket | None = None):
        self.rank, self.size, self.place = place.rank, place.size, place
        self.hosts = ["?"] * self.size
        self.inbox = {r: SimpleQueue() for r in range(self.size)}
        self.peers: dict[int, Peer] = {}
        self.heart, self.over, self.status = Heartbeat(self.rank, place.hang_after), threading.Event(), 1
        self.ending = threading.RLock()
        threading.Thread(target=self.beat, daemon=True).start()
        key = handshake.make_key(secret, place.job, self.size)
        if self.rank == 0:
            self.accept_all(listener or handshake.listen(place.address, place.port), key)
        else:
            self.add(0, self.connect(key))
        self.hosts = [escaped(host) for host in self.all_gather(socket.gethostname())]

    def accept_all(self, listener: socket.socket, key: bytes) -> None:
        """Rank 0 waits until it is connected to all others. It listens no longer than that."""
        patience, started, other = PATIENCE * self.place.hang_after, time.monotonic(), None
        (host, port), said = listener.getsockname()[:2], started
        for found in handshake.accept(listener, key, self.size):
            if found:
                rank, connection, version = found
                other = rank if other is None and version != handshake.version() else other
                self.add(rank, connection)
            missing = sorted(set(range(1, self.size)) - self.peers.keys())
            if missing and time.monotonic() - started > patience:
                self.end(f"rank {missing[0]} has not connected: start all {self.size} ranks, with one secret and code")
            if missing and time.monotonic() - said > 10:
                said = time.monotonic()
                say(f"waiting at {host}, port {port} for ranks {', '.join(map(str, missing[:8]))}")
        if other is not None:
            self.end(f"rank {other} runs another version of the code than rank 0: have the same on all machines")

    def connect(self, key: bytes) -> socket.socket:
        """The connection of another rank to rank 0, which may start later."""
        address, port, started, reason, said = self.place.address, self.place.port, time.monotonic(), "", False
        while time.monotonic() - started < PATIENCE * self.place.hang_after:
            if time.monotonic() - started > 30 and not said:
                said = True
                say(f"rank {self.rank} waits for rank 0 at {address}, port {port} ({reason})")
            try:
                return handshake.connect(address, port, key, self.rank)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            time.sleep(0.2)
        raise UserError(
            f"rank 0 cannot be reached at {address}, port {port} ({reason}): MASTER_ADDR must name it, and all ranks "
            "have the same WORLD_SIZE and secret"
        )

    def add(self, r: int, connection: socket.socket) -> None:
        """Rank r is there. From now on this rank listens to it."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # A rank that is stopped takes no more messages than its system has room for.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self.place.hang_after), 0))
        self.heart.hear(r)
        self.peers[r] = Peer(connection, threading.Lock(), threading.Thread(target=self.listen, args=(r,), daemon=True))
        self.peers[r].listener.start()

    def send(self, r: int, *message: object, patience: float = -1) -> None:
        """patience: seconds to wait while another thread sends something to rank r; then raises TimeoutError."""
        data, peer = json.dumps(message).encode(), self.peers[r]
        if not peer.sending.acquire(timeout=patience):
            raise TimeoutError
        try:
            peer.connection.sendall(LENGTH.pack(len(data)) + data)
        finally:
            peer.sending.release()

    def listen(self, r: int) -> None:
        """The work of a thread: it receives the messages of rank r, until that rank takes its leave."""
        connection = self.peers[r].connection
        try:
            while True:
                (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
                if length > LONGEST:
                    raise ValueError(length)
                kind, *rest = json.loads(read_exactly(connection, length))
                if kind == "beat":
                    count, busy = rest
                    self.heart.hear(r, int(count), busy is True)
                    continue
                self.heart.hear(r)
                if kind == "value":
                    self.inbox[r].put(rest[0])
                elif kind == "failed" and self.rank == 0:
                    time.sleep(1)  # if all have the same error, rank 0 has time to report its own
                    self.end(f"rank {r} on {self.hosts[r]}: {rest[0]}")
                elif kind in ("failed", "over"):  # rank 0 has said why
                    os._exit(self.status if kind == "failed" else 0)
                elif kind == "bye":
                    del self.heart.heard[r]
                    return
                else:
                    raise ValueError(kind)
        except OSError:
            self.end(f"rank {r} on {self.hosts[r]} is gone: it was killed, or its machine cannot be reached")
        except Exception:
            self.end(f"rank {r} on {self.hosts[r]} has sent what is no message of a rank")

    def beat(self) -> None:
        """The work of a thread: it tells the others how far this rank is, and ends all if one of them hangs."""
        heart, pause = self.heart, self.place.hang_after / BEATS
        while True:
            slept = time.monotonic()
            if self.over.wait(pause):
                return
            if time.monotonic() - slept > self.place.hang_after / 2:  # this process was stopped itself
                heart.begin_anew()
            self.tell_all("beat", heart.counts[self.rank], self.rank in heart.busy)
            silent, standing = heart.silent(), heart.standing() if self.rank == 0 else None
            if silent is not None:
                self.end(
                    f"rank {silent} on {self.hosts[silent]} has said nothing for {self.place.hang_after:g} s: it is "
                    "stopped, or its machine cannot be reached (LLMC_HANG_AFTER sets the seconds)"
                )
            if standing:
                hanging, seconds = standing
                names = ", ".join(f"rank {r} on {self.hosts[r]}" for r in hanging)
                who = "all ranks wait, perhaps for a network," if len(hanging) == self.size else f"{names} hangs: it"
                self.end(f"{who} did nothing for {seconds:.0f} s (LLMC_HANG_AFTER)")

    def all_gather(self, value) -> list:
        self.heart.progress()
        try:
            if self.rank > 0:
                self.send(0, "value", value)
                return self.inbox[0].get()
            values = [value, *(self.inbox[r].get() for r in range(1, self.size))]
            for r in self.peers:
                self.send(r, "value", values)
            return values
        except OSError:  # the thread that listens to this rank ends the process
            threading.Event().wait()

    def end(self, text: str, status: int = 1) -> NoReturn:
        """Ends this process, and all others. Rank 0 prints the text, if there is one. If rank 0 cannot, rank 1 does."""
        with self.ending:
            self.status = status
            if self.rank > 0:
                self.tell_all("failed", text)
                time.sleep(GRACE)  # rank 0 reports it meanwhile, and ends this process
            if text and self.rank < 2:
                say(f"error: {text}")
            if self.rank == 0:
                self.tell_all("failed" if status else "over")
            os._exit(status)

    def tell_all(self, *message: object) -> None:
        for r in list(self.peers):
            with suppress(OSError):  # this rank has ended, or takes no messages
                self.send(r, *message, patience=0.5)

    def leave(self) -> None:
        """Takes leave of the others. Closes each connection once the other side has taken leave, too."""
        self.over.set()
        self.tell_all("bye")
        for peer in self.peers.values():
            peer.listener.join(GRACE)
            peer.connection.close()


@dataclass
class Peer:
    """A rank that this one is connected to. Who sends holds `sending`. listener: the thread that receives."""

    connection: socket.socket
    sending: threading.Lock
    listener: threading.Thread


def say(text: str) -> None:
    """Prints a line to stderr. It is no error if nobody reads it."""
    with suppress(OSError, ValueError):
        print(escaped(text), file=sys.stderr, flush=True)


_group: Group | None = None


def meet() -> None:
    """Joins the other ranks, if several have been started, and returns once all are there. From then on the prints of
    all ranks except 0 are dropped. Raises UserError if the ranks cannot meet."""
    global _group
    place = find_place(os.environ)
    if LAUNCHED in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # launch has blocked them, so that they end no import
    if _group is not None or place is None:
        return
    if place.rank > 0:
        sys.stdout = nowhere = open(os.devnull, "w")
        atexit.register(nowhere.close)
    listener, secret = None, handshake.find_secret(os.environ)
    if "LLMC_PIPE" in os.environ:
        threading.Thread(target=end_with_launcher, args=(int(os.environ.pop("LLMC_PIPE")),), daemon=True).start()
    if "LLMC_LISTENER" in os.environ:
        listener = socket.socket(fileno=int(os.environ.pop("LLMC_LISTENER")))
    _group = Group(place, secret, listener)


def start(count: int | None) -> None:
    """`meet`. But if no ranks have been started and count is more than 1, starts `count` processes on this machine, and
    exits when they have ended. Raises UserError also if ranks have been started, but not `count` of them."""
    meet()
    if _group is None and (count or 1) > 1:
        sys.exit(launch(count))
    if _group is not None and count not in (None, _group.size):
        raise UserError(f"--gpus {count}: {_group.size} processes have been started already; leave --gpus out")


def rank() -> int:
    """This process's number, from 0 on."""
    return _group.rank if _group else 0


def size() -> int:
    """How many processes train together."""
    return _group.size if _group else 1


def local_rank() -> int:
    """This process's number on its machine."""
    return _group.place.local_rank if _group else 0


def address() -> str:
    """Where rank 0 listens at the start: an address of its machine."""
    return _group.place.address if _group else "127.0.0.1"


def hosts() -> list[str]:
    """The machine of each rank, by name."""
    return _group.hosts if _group else [socket.gethostname()]


def all_gather(value) -> list:
    """Returns on each rank the list of all ranks' values, in the order of the ranks. A value is anything that JSON can
    hold. All ranks must call it alike."""
    return _group.all_gather(value) if _group else [value]


def of_rank_0(work: Callable[[], object]):
    """Does work on rank 0 only, and returns its result on each rank: anything that JSON can hold."""
    return all_gather(work() if rank() == 0 else None)[0]


def check_same(what: str, value, remedy: str) -> None:
    """Raises UserError on all ranks, naming the first rank whose value differs from rank 0's."""
    values = all_gather(value)
    for r, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"rank {r} on {hosts()[r]}: {what} is {other}, and rank 0's is {values[0]}; {remedy}")


def finish() -> None:
    """Takes leave of the other ranks, once all have come to this point."""
    global _group
    if _group:
        all_gather(None)
        _group.leave()
        _group = None


def progress() -> None:
    """Call it when this rank begins something that all ranks do alike, in the same order, and wait for."""
    if _group:
        _group.heart.progress()


def long_work() -> AbstractContextManager[None]:
    """Within it this rank may do something for long while the others wait for it. It does not count as hanging."""
    return _group.heart.long_work() if _group else nullcontext()


def step_took(seconds: float) -> None:
    """Call it after each step: the slowest so far says how long a step may take."""
    if _group:
        _group.heart.slowest = max(_group.heart.slowest, seconds)


def fail(text: str, status: int = 1) -> None:
    """Call it in a process that cannot go on. If the process is alone, this returns. If it is one of several, all end
    here, and rank 0 prints the text, if there is one. The others end with status 1, or with 0 if rank 0 does."""
    if _group is not None:
        _group.end(text, status)


def give_way() -> None:
    """Call it when something has failed in which other ranks take part. If one of them is the reason, this process ends
    here, with all others."""
    if _group is not None:
        time.sleep(2 * GRACE)


def launch(count: int) -> int:
    """Runs this program once for each of `count` ranks on this machine. Returns the exit status: the first that is not
    0, if possible of a rank that this process did not kill. It passes signals on to the ranks, and a second signal ends
    all at once. If this process is killed, the ranks stop as for SIGTERM. Raises UserError if not all can be started.
    """
    if count > MOST:
        raise UserError(f"--gpus {count}: no machine has that many GPUs; it must be at most {MOST}")
    hang_after(os.environ)  # else each rank would refuse a wrong number
    listener = handshake.listen("127.0.0.1", 0)
    watched, held = os.pipe()
    env = os.environ | {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
        LAUNCHED: secrets.token_hex(16), "LLMC_SECRET": secrets.token_hex(32), "LLMC_PIPE": str(watched),
    }  # fmt: skip
    env.setdefault("LLMC_CPU_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    processes, handed_on = [], []
    for r in range(count):
        own = {"RANK": str(r), "LOCAL_RANK": str(r)} | ({"LLMC_LISTENER": str(listener.fileno())} if r == 0 else {})
        try:
            processes.append(subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]], env=env | own, stdin=subprocess.DEVNULL, start_new_session=True,
                pass_fds=[watched, *([listener.fileno()] if r == 0 else [])],
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
            ))  # fmt: skip
        except OSError as error:
            for process in processes:
                process.kill()
            raise UserError(f"--gpus {count}: rank {r} cannot be started ({error.strerror}); start fewer") from None
    listener.close()
    os.close(watched)

    def hand_on(number, frame) -> None:
        again = len(handed_on) > 0 and time.monotonic() - handed_on[0] > 1
        handed_on.append(time.monotonic())
        for process in processes:
            process.kill() if again else process.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    deadline, killed = None, set()
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        failed = [r for r, process in enumerate(processes) if process.poll()]
        if failed and deadline is None:
            deadline = time.monotonic() + LAST_GASP
        if failed and failed[0] == 0 and processes[0].returncode > 0:  # it has said why, and nobody else need do so
            deadline = min(deadline, time.monotonic() + 3)
        if deadline and time.monotonic() > deadline and not killed:
            killed = {process for process in processes if process.poll() is None}
            for process in killed:
                process.kill()
            status = processes[failed[0]].returncode
            if status < 0:
                say(f"error: rank {failed[0]} ended with status {status}, and the others with it")
    os.close(held)
    ended = [process for process in processes if process not in killed] + list(killed)
    status = next((process.returncode for process in ended if process.returncode), 0)
    return 128 - status if status < 0 else status


def end_with_launcher(pipe: int) -> None:
    """The work of a thread: it stops this process once the launcher, which holds the other end of the pipe, is gone."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)
    os._exit(1)  # it has not stopped
