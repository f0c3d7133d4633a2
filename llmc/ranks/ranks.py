"""The processes that train one model together: how they find one another, exchange small values, and end.

Each process has a number, its rank, and one GPU (on the CPU device they share the cores). The program that starts it
tells it its rank, the number of ranks, and where rank 0 listens. This program is torchrun, Slurm's srun, Open MPI's
mpirun, or `launch` here, for `--gpus`. A process stays connected to rank 0 for the whole run, for small values that all
must know (`all_gather`), and so that all end if one cannot go on. Gradients go another way: llmc/ranks/collectives.py.

A connection begins with a message of fixed size in both directions (HELLO), which names the run and the rank. A process
that sends anything else is turned away. All later messages are JSON behind its length in four bytes.
"""

from __future__ import annotations

import atexit
import hashlib
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
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

from device.errors import UserError

HELLO = struct.Struct(">8s32sII")  # MAGIC, the run's identity, rank, number of ranks
MAGIC = b"llm.cupy"
LENGTH = struct.Struct(">I")
LONGEST = 1 << 24      # bytes of a message
PATIENCE = 300         # seconds that ranks wait for one another at the start
MOST = 1024            # processes that `launch` starts
LAST_GASP = 20         # seconds that `launch` gives the other processes once one has failed
GRACE = 5              # seconds that a failing rank waits before it ends, so that rank 0 can report first
# How ranks notice that a machine is gone: seconds, seconds, times; and milliseconds while something is being sent.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
LAUNCHED = "LLMC_JOB"  # in the environment of processes that `launch` has started
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Place:
    """What the program that starts a process tells it: its rank among `size`, its rank on its machine, where rank 0
    listens, and a word that all processes of the job know."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    job: str


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
    return Place(rank, size, local, address, port + taken, job)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of machines, "gpu[07-09,12]-ib,cpu1" for example."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    return found[1] + (found[2] or "") + found[3]


class Group:
    """A process's connections: rank 0's to all others, theirs to rank 0."""

    def __init__(self, place: Place, listener: socket.socket | None = None):
        self.rank, self.size, self.place = place.rank, place.size, place
        self.hosts = ["?"] * self.size
        self.inbox = {r: SimpleQueue() for r in range(self.size)}
        self.sending, self.ending = threading.Lock(), threading.RLock()
        identity = hashlib.sha256(f"{place.job}/{place.size}".encode()).digest()
        self.hello = [HELLO.pack(MAGIC, identity, r, self.size) for r in range(self.size)]
        self.peers = self.accept_all(listener) if self.rank == 0 else {0: self.connect()}
        self.listeners = []
        for r, connection in self.peers.items():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self.listeners.append(threading.Thread(target=self.listen, args=(r, connection), daemon=True))
            self.listeners[-1].start()
        self.hosts = self.all_gather(socket.gethostname())

    def accept_all(self, listener: socket.socket | None) -> dict[int, socket.socket]:
        """Rank 0's connections to all others. It listens until it has them."""
        address, port = self.place.address, self.place.port
        if listener is None:
            local = address in ("localhost", "127.0.0.1")
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listener = socket.create_server(("127.0.0.1" if local else "", port), family=family, backlog=self.size)
            except OSError as error:
                reason = os.strerror(error.errno).lower() if error.errno else str(error)
                raise UserError(
                    f"rank 0 cannot listen at port {port} ({reason}): set MASTER_PORT to a free one "
                    "for all ranks"
                ) from None
        peers, started = {}, time.monotonic()
        with listener:
            listener.settimeout(10)
            while len(peers) < self.size - 1:
                missing = sorted(set(range(1, self.size)) - peers.keys())
                if time.monotonic() - started > PATIENCE:
                    raise UserError(f"rank {missing[0]} has not connected: start all {self.size} ranks")
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    say(f"waiting for ranks {', '.join(map(str, missing[:8]))}")
                    continue
                try:
                    rank = self.hello.index(read_exactly(connection, HELLO.size, seconds=5))
                    if rank == 0 or rank in peers:
                        raise ValueError(rank)
                    connection.sendall(self.hello[0])
                    peers[rank] = connection
                except (ValueError, OSError):  # a rank of another run, which says that it waits, or a stranger
                    connection.close()
        return peers

    def connect(self) -> socket.socket:
        """The connection of another rank to rank 0, which may start later."""
        address, port, started, reason, said = self.place.address, self.place.port, time.monotonic(), "", False
        while time.monotonic() - started < PATIENCE:
            if time.monotonic() - started > 30 and not said:
                said = True
                say(f"rank {self.rank} waits for rank 0 at {address}, port {port} ({reason})")
            try:
                connection = socket.create_connection((address, port), timeout=10)
                connection.sendall(self.hello[self.rank])
                if read_exactly(connection, HELLO.size, seconds=PATIENCE) == self.hello[0]:
                    return connection
                reason = "what answers there is not this run"
                connection.close()
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            time.sleep(0.2)
        raise UserError(
            f"rank 0 cannot be reached at {address}, port {port} ({reason}): MASTER_ADDR must name it, and all ranks "
            "have the same WORLD_SIZE"
        )

    def send(self, r: int, *message: object) -> None:
        data = json.dumps(message).encode()
        with self.sending:
            self.peers[r].sendall(LENGTH.pack(len(data)) + data)

    def listen(self, r: int, connection: socket.socket) -> None:
        """The work of a thread: it receives the messages of rank r, until this rank takes its leave."""
        try:
            while True:
                (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
                if length > LONGEST:
                    raise ValueError(length)
                kind, *rest = json.loads(read_exactly(connection, length))
                if kind == "value":
                    self.inbox[r].put(rest[0])
                elif kind == "failed" and self.rank == 0:
                    text, status = rest
                    time.sleep(1)  # if all have the same error, rank 0 has time to report its own
                    self.end(f"rank {r} on {self.hosts[r]}: {text}" if text else "", int(status))
                elif kind == "failed":
                    os._exit(int(rest[1]))  # rank 0 has said why
                elif kind == "bye":
                    return
                else:
                    raise ValueError(kind)
        except Exception:  # the connection is closed, or the message is not one of a rank
            text = f"rank {r} on {self.hosts[r]} is gone: it was killed, or its machine cannot be reached"
            self.end(text if self.rank < 2 else "")  # if rank 0 is gone, one of the others must say so

    def all_gather(self, value) -> list:
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
        """Ends this process; rank 0 also ends all others. The first thread that calls it prints the text, if there is
        one."""
        with self.ending:
            if text:
                say(f"error: {text}")
            if self.rank == 0:
                self.tell_all("failed", text, status)
            os._exit(status)

    def tell_all(self, *message: object) -> None:
        for r in self.peers:
            try:
                self.send(r, *message)
            except OSError:
                pass  # this rank has already ended

    def leave(self) -> None:
        """Takes leave of the others. Closes each connection once the other side has taken leave, too."""
        self.tell_all("bye")
        for listener in self.listeners:
            listener.join(GRACE)
        for connection in self.peers.values():
            connection.close()


def read_exactly(connection: socket.socket, size: int, seconds: float | None = None) -> bytes:
    """The next `size` bytes of a connection. Raises OSError if it ends before, or if they take longer than
    `seconds`."""
    data, started = b"", time.monotonic()
    while len(data) < size:
        if seconds is not None:
            connection.settimeout(max(0.01, started + seconds - time.monotonic()))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        data += piece
    return data


def say(text: str) -> None:
    """Prints to stderr. It is no error if nobody reads it."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


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
    listener = None
    if "LLMC_PIPE" in os.environ:
        threading.Thread(target=end_with_launcher, args=(int(os.environ.pop("LLMC_PIPE")),), daemon=True).start()
    if "LLMC_LISTENER" in os.environ:
        listener = socket.socket(fileno=int(os.environ.pop("LLMC_LISTENER")))
    _group = Group(place, listener)


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


def fail(text: str, status: int = 1) -> None:
    """Call it in a process that cannot go on. If the process is alone, this returns. If it is one of several, all end
    here, and rank 0 prints the text, if there is one."""
    if _group is None:
        return
    if _group.rank == 0:
        _group.end(text, status)
    _group.tell_all("failed", text, status)
    time.sleep(GRACE)  # until rank 0 has reported it; the other ranks only notice that this process ends
    os._exit(status)


def give_way() -> None:
    """Call it when something has failed in which other ranks take part. If one of them is the reason, this process ends
    here, with all others."""
    if _group is not None:
        time.sleep(GRACE)


def launch(count: int) -> int:
    """Runs this program once for each of `count` ranks on this machine. Returns the exit status: the first that is not
    0. It passes signals on to the ranks, and a second signal ends all at once. If this process is killed, the ranks
    stop as for SIGTERM. Raises UserError if not all can be started."""
    if count > MOST:
        raise UserError(f"--gpus {count}: no machine has that many GPUs; it must be at most {MOST}")
    listener = socket.create_server(("127.0.0.1", 0))
    watched, held = os.pipe()
    env = os.environ | {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
        LAUNCHED: secrets.token_hex(16), "LLMC_PIPE": str(watched),
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
    deadline = None
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        failed = [r for r, process in enumerate(processes) if process.poll()]
        if failed and deadline is None:
            deadline = time.monotonic() + LAST_GASP
        if deadline and time.monotonic() > deadline:
            for process in processes:
                process.kill()
            say(f"error: rank {failed[0]} ended with status {processes[failed[0]].wait()}, and the others with it")
            deadline = None
    os.close(held)
    status = next((process.returncode for process in processes if process.returncode), 0)
    return 128 - status if status < 0 else status


def end_with_launcher(pipe: int) -> None:
    """The work of a thread: it stops this process once the launcher, which holds the other end of the pipe, is gone."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)  # it has not stopped
