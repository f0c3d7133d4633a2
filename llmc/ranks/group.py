"""The connections among the processes of a run: small values that all must know, and one end for all.

A process stays connected to rank 0 for the whole run. A connection begins with the handshake of handshake.py, which
turns away who does not know the run's secret. All later messages are JSON after its length in four bytes. Some of them
only serve to notice that a rank hangs (heartbeat.py).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

from device.errors import UserError, escaped, say
from llmc.ranks import handshake
from llmc.ranks.environment import Place
from llmc.ranks.handshake import read_exactly
from llmc.ranks.heartbeat import Heartbeat

LENGTH = struct.Struct(">I")
MAX_MESSAGE = 1 << 24  # bytes
PATIENCE = 10          # times LLMC_HANG_AFTER: how long ranks wait for one another at the start
BEATS = 5              # within LLMC_HANG_AFTER seconds
GRACE = 5              # seconds that a failing rank waits before it ends, so that rank 0 can report first
# How ranks notice that a machine is gone: seconds, seconds, times; and milliseconds while something is being sent.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


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
                if length > MAX_MESSAGE:
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
