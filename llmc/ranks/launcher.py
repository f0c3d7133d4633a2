"""Starts a process for each rank on this machine (`--gpus`), passes signals on to them, and waits for their end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

from device.errors import UserError, say
from llmc.ranks import handshake
from llmc.ranks.environment import LAUNCHED
from llmc.ranks.heartbeat import hang_after

MAX_PROCESSES = 1024
LAST_GASP = 10  # seconds that the other processes get once one has failed
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def launch(count: int) -> int:
    """Runs this program once for each of `count` ranks on this machine. Returns the exit status: the first that is not
    0, if possible of a rank that this process did not kill. It passes signals on to the ranks, and a second signal ends
    all at once. If this process is killed, the ranks stop as for SIGTERM. Raises UserError if not all can be started.
    """
    if count > MAX_PROCESSES:
        raise UserError(f"--gpus {count}: no machine has that many GPUs; it must be at most {MAX_PROCESSES}")
    hang_after(os.environ)  # else each rank would refuse a wrong number
    listener = handshake.listen("127.0.0.1", 0)
    watched, held = os.pipe()
    env = os.environ | {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
        LAUNCHED: secrets.token_hex(16), "LLMC_SECRET": secrets.token_hex(32), "LLMC_PIPE": str(watched),
    }  # fmt: skip
    env.setdefault("LLMC_CPU_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    processes, forwarded = [], []
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

    def forward(number, frame) -> None:
        again = len(forwarded) > 0 and time.monotonic() - forwarded[0] > 1
        forwarded.append(time.monotonic())
        for process in processes:
            process.kill() if again else process.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
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


def join_launcher() -> socket.socket | None:
    """In a process that `launch` has started: takes signals from now on, ends the process with the launcher, and
    returns the socket on which rank 0 listens. Else does nothing."""
    if LAUNCHED in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked until now, so that they end no import
    if "LLMC_PIPE" in os.environ:
        threading.Thread(target=end_with_launcher, args=(int(os.environ.pop("LLMC_PIPE")),), daemon=True).start()
    return socket.socket(fileno=int(os.environ.pop("LLMC_LISTENER"))) if "LLMC_LISTENER" in os.environ else None


def end_with_launcher(pipe: int) -> None:
    """The work of a thread: it stops this process once the launcher, which holds the other end of the pipe, is gone."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)
    os._exit(1)  # it has not stopped
