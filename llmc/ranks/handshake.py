"""How ranks know one another: each proves that it has the same secret, and none sends it.

    rank 0 to rank r   32 random bytes, as soon as rank r has connected
    rank r to rank 0   HELLO: a word for this protocol, the version of the code, r, 32 random bytes; and its HMAC-SHA256
    rank 0 to rank r   the HMAC-SHA256 of all this

Each HMAC covers what the other side has just chosen, so a recorded message is of no use. Its key is made of the secret,
the job and the number of ranks: to rank 0 a rank of another run is a stranger. Rank 0 serves all who have connected at
once, and closes a connection that does not say the right thing in time.

`--gpus` makes a secret for each run. Otherwise it is LLMC_SECRET, or what is in the file LLMC_SECRET_FILE, by default
SECRET_FILE in the home directory, which the first rank makes. What ranks say afterwards is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import selectors
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from device.errors import ROOT, UserError

HELLO = struct.Struct(">8s32sI32s")  # MAGIC, version of the code, rank, random bytes
MAGIC = b"llmcupy2"
RANDOM = PROOF = 32    # bytes
SECONDS = 10           # until a connection that has not said the right thing is closed
MAX_WAITING = 256      # connections that may be open at once and have not said it yet: of more, the oldest are closed
SECRET_FILE = ".llm.cupy.secret"
SOURCES = ".py", ".cu", ".cuh", ".h", ".cpp"


def find_secret(env: Mapping[str, str]) -> bytes:
    """The secret that all ranks of a run have. Raises UserError if there is none, or if others can read its file."""
    if env.get("LLMC_SECRET"):
        return env["LLMC_SECRET"].encode(errors="surrogateescape")
    named = env.get("LLMC_SECRET_FILE")
    path = named or os.path.join(env.get("HOME") or "/", SECRET_FILE)
    try:
        if not named and not os.path.lexists(path):
            make_secret(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise UserError(f"{path} must be a file of yours that nobody else can read: chmod 600, or LLMC_SECRET")
            secret = file.read(4096).strip()
    except OSError as error:
        raise UserError(
            f"{path}, the secret by which ranks know one another, cannot be used ({error.strerror.lower()}): set "
            "LLMC_SECRET to the same words for all ranks"
        ) from None
    if not secret:
        raise UserError(f"{path} is empty: write a secret into it, such as `openssl rand -hex 32` prints")
    return secret


def make_secret(path: str) -> None:
    """Makes the file of the secret, unless another rank does so first."""
    part = f"{path}.{secrets.token_hex(8)}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    try:
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.unlink(part)


@cache
def version() -> bytes:
    """The SHA-256 of all source files that a training run consists of."""
    digest = hashlib.sha256()
    paths = [*ROOT.glob("*.py"), *(path for name in ("llmc", "kernels", "device") for path in (ROOT / name).rglob("*"))]
    for path in sorted(path for path in paths if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.digest()


def prove(key: bytes, who: bytes, *said: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(said), "sha256")


def make_key(secret: bytes, job: str, size: int) -> bytes:
    return prove(secret, b"key", f"{job}/{size}".encode())


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at this address of this machine and at no other. Raises UserError if that is not possible.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        reason = (error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno)).lower()
        raise UserError(
            f"rank 0 cannot listen at {address}, port {port} ({reason}): for all ranks set MASTER_ADDR to an address "
            "of rank 0's machine and MASTER_PORT to a free port"
        ) from None


@dataclass
class Stranger:
    """A connection that has proved nothing yet.

    challenge: the random bytes that rank 0 has sent to it. said: what has come from it. came: when it connected.
    """

    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(RANDOM))
    said: bytes = b""
    came: float = field(default_factory=time.monotonic)


def accept(listener: socket.socket, key: bytes, size: int) -> Iterator[tuple[int, socket.socket, bytes] | None]:
    """Rank 0's side: each rank that connects, with its connection and its version of the code, until all have; and None
    now and then, at least once per second. Then nobody else is connected, and nobody can connect."""
    waiting: dict[socket.socket, Stranger] = {}  # in the order in which they came
    missing = set(range(1, size))
    listener.setblocking(False)
    with listener, selectors.DefaultSelector() as selector:

        def let_go(connection: socket.socket, close: bool = True) -> None:
            selector.unregister(connection)
            del waiting[connection]
            if close:
                connection.close()

        selector.register(listener, selectors.EVENT_READ)
        while missing:
            for connection in [key.fileobj for key, _ in selector.select(1)]:
                if connection is listener:
                    with suppress(OSError):  # whoever it was has left
                        connection, _ = listener.accept()
                        waiting[connection] = Stranger()
                        selector.register(connection, selectors.EVENT_READ)
                        connection.setblocking(False)
                        connection.send(waiting[connection].challenge)
                    continue
                try:
                    rank, version = read_hello(connection, waiting[connection], key, missing)
                except BlockingIOError:
                    continue
                except (OSError, ValueError):
                    let_go(connection)
                    continue
                let_go(connection, close=False)
                connection.setblocking(True)
                missing.remove(rank)
                yield rank, connection, version
            late = time.monotonic() - SECONDS
            while waiting and (len(waiting) > MAX_WAITING or next(iter(waiting.values())).came < late):
                let_go(next(iter(waiting)))
            yield None
        for connection in list(waiting):
            let_go(connection)


def read_hello(connection: socket.socket, stranger: Stranger, key: bytes, missing: set[int]) -> tuple[int, bytes]:
    """The rank and the version of who has connected, and answers it. Raises BlockingIOError if more has to come, and
    OSError or ValueError for who is no missing rank of this run."""
    said = connection.recv(HELLO.size + PROOF - len(stranger.said))
    if not said:
        raise ConnectionResetError
    stranger.said += said
    if len(stranger.said) < HELLO.size + PROOF:
        raise BlockingIOError
    hello, proof = stranger.said[: HELLO.size], stranger.said[HELLO.size :]
    magic, version, rank, _ = HELLO.unpack(hello)
    proved = hmac.compare_digest(proof, prove(key, b"rank", stranger.challenge, hello))
    if not proved or magic != MAGIC or rank not in missing:
        raise ValueError(rank)
    connection.send(prove(key, b"rank 0", stranger.challenge, hello))
    return rank, version


def connect(address: str, port: int, key: bytes, rank: int) -> socket.socket:
    """Another rank's side: its connection to rank 0. Raises OSError if rank 0 does not answer there."""
    connection = socket.create_connection((address, port), timeout=SECONDS)
    try:
        challenge = read_exactly(connection, RANDOM)
        hello = HELLO.pack(MAGIC, version(), rank, secrets.token_bytes(RANDOM))
        connection.sendall(hello + prove(key, b"rank", challenge, hello))
        try:
            answer = read_exactly(connection, PROOF)
        except ConnectionResetError:
            raise OSError("what answers there is another run, or has another secret (LLMC_SECRET)") from None
        if not hmac.compare_digest(answer, prove(key, b"rank 0", challenge, hello)):
            raise OSError("what answers there is not this run")
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes of a connection. Raises OSError if it ends before."""
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        data += piece
    return data
