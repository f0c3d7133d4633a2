"""What all ranks do together with device arrays: sums, broadcasts, exchanges. NCCL does it for GPUs, and gloo, through
PyTorch, for the CPU device.

On CUDA all of it goes to streams of its own, beside those that compute (`device.on_comm_stream`).
`device.wait_comm` waits for it. A step that is recorded as a graph records it, too. Every rank must ask for
the same things in the same order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import device
from device.errors import UserError, first_line
from llmc.ranks import ranks
from llmc.ranks.handshake import listen

import numpy as np

# Fixed, because NCCL otherwise chooses an algorithm by what it measures, and a sum's bits depend on the algorithm.
REPEATABLE = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
UINT8, FLOAT32, SUM = 1, 7, 0  # NCCL's numbers for them

Pieces = list[tuple[object, int]]  # device arrays, each with a rank


class Nccl:
    """NCCL through CuPy."""

    def __init__(self):
        for name, value in REPEATABLE.items():
            os.environ.setdefault(name, value)
        if len(set(ranks.hosts())) == 1:  # NCCL takes any connection: on one machine, from this machine alone
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's warning has many lines if NCCL is missing
            from cupy.cuda import nccl  # here, because one GPU needs no NCCL
        if not nccl.available:
            raise UserError("several GPUs need NCCL, which is missing: pip install nvidia-nccl-cu13 (or -cu12)")
        self.nccl = nccl
        unique_id = ranks.of_rank_0(lambda: list(nccl.get_unique_id()))
        self.communicator = nccl.NcclCommunicator(ranks.size(), bytes(unique_id), ranks.rank())

    def group(self, calls: list[tuple]) -> None:
        """Makes several calls as one. Each is a function of NCCL, and its arguments but the last, the stream."""

        def work(stream: int) -> None:
            self.nccl.groupStart()
            for function, *arguments in calls:
                function(*arguments, stream)
            self.nccl.groupEnd()

        device.on_comm_stream(work)

    def all_reduce(self, arrays: list) -> None:
        all_reduce = self.communicator.allReduce
        self.group([(all_reduce, x.data.ptr, x.data.ptr, x.size, FLOAT32, SUM) for x in arrays])

    def reduce(self, pieces: Pieces) -> None:
        reduce = self.communicator.reduce
        self.group([(reduce, x.data.ptr, x.data.ptr, x.size, FLOAT32, SUM, root) for x, root in pieces])

    def broadcast(self, pieces: Pieces) -> None:
        self.group([(self.communicator.bcast, x.data.ptr, x.nbytes, UINT8, root) for x, root in pieces])

    def exchange(self, sent: Pieces, received: Pieces) -> None:
        sends = [(self.communicator.send, x.data.ptr, x.size, FLOAT32, peer) for x, peer in sent]
        receives = [(self.communicator.recv, x.data.ptr, x.size, FLOAT32, peer) for x, peer in received]
        self.group(sends + receives)


class Gloo:
    """gloo through PyTorch, which only this needs. All is done when a call returns."""

    def __init__(self):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # if a rank ends, its warning has fifty lines
        try:
            import torch
            import torch.distributed
        except ImportError as error:
            raise UserError(
                f"several processes on the CPU need PyTorch's gloo ({first_line(error)}): pip install torch"
            ) from None
        self.torch, self.distributed = torch, torch.distributed
        own, host = None, ranks.address()
        if len(set(ranks.hosts())) == 1:
            host = "127.0.0.1"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if ranks.rank() == 0:
            listener = listen(host, 0)  # its own would listen at all addresses of this machine
            own = torch.distributed.TCPStore(
                host, listener.getsockname()[1], ranks.size(), is_master=True, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        port = ranks.of_rank_0(lambda: own.port)
        store = own or torch.distributed.TCPStore(host, port, ranks.size(), is_master=False)
        torch.distributed.init_process_group("gloo", store=store, rank=ranks.rank(), world_size=ranks.size())

    def sum_arrays(self, arrays: list[np.ndarray], root: int | None = None) -> None:
        """Sets each array to its sum over all ranks, on rank `root`, or on all if it is None.

        All arrays are sent as one, because each call costs more time than a few small arrays. The order of gloo's own
        sums depends on how it cuts an array into parts. Ours is the order of the ranks, so that a sum has the same bits
        whatever else is in the array.
        """
        flat = self.torch.from_numpy(np.concatenate([x.reshape(-1) for x in arrays]))
        receives = root in (None, ranks.rank())
        parts = [self.torch.empty_like(flat) for _ in range(ranks.size())] if receives else None
        if root is None:
            self.distributed.all_gather(parts, flat)
        else:
            self.distributed.gather(flat, parts, dst=root)
        if receives:
            sums = sum(parts[1:], start=parts[0]).numpy()
            for x, values in zip(arrays, np.split(sums, np.cumsum([x.size for x in arrays])[:-1]), strict=True):
                x.reshape(-1)[:] = values

    def all_reduce(self, arrays: list) -> None:
        self.sum_arrays(arrays)

    def reduce(self, pieces: Pieces) -> None:
        for root in sorted({root for _, root in pieces}):
            self.sum_arrays([x for x, r in pieces if r == root], root)

    def broadcast(self, pieces: Pieces) -> None:
        for x, root in pieces:
            self.distributed.broadcast(self.torch.from_numpy(x.view(np.uint8)), root)

    def exchange(self, sent: Pieces, received: Pieces) -> None:
        works = [self.distributed.isend(self.torch.from_numpy(x), peer) for x, peer in sent]
        works += [self.distributed.irecv(self.torch.from_numpy(x), peer) for x, peer in received]
        for work in works:
            work.wait()


_collectives: Nccl | Gloo | None = None
_peers_reached = False


def start() -> None:
    """Connects the ranks' devices. Raises UserError if they are not of one kind, if two ranks have the same GPU, or if
    the library that connects them is missing."""
    global _collectives, _peers_reached
    _collectives, _peers_reached = None, False
    if ranks.size() > 1:
        check_devices()
        _collectives = Nccl() if device.kind == "cuda" else Gloo()
        _peers_reached = device.kind == "cuda" and reach_one_another()


def reach_one_another() -> bool:
    """Whether all ranks are GPUs of one machine with peer access. Ranks try this, unless NCCL_P2P_DISABLE forbids it: a
    container may prevent peer access, the GPUs of a machine may not be connected, and CUDA may lack the operations by
    which ranks wait for one another. So each rank writes a word into the memory of every rank, as it does to signal,
    and checks whether all words have come."""
    allowed = len(set(ranks.hosts())) == 1 and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    words, handles, rank = device.zeros((ranks.size(),), np.uint32), [None], ranks.rank()
    device.synchronize()  # the words are 0 before another rank writes
    if all(ranks.all_gather(allowed)):
        with suppress(Exception):
            handles = [device.memory_handle(words)]
        handles = [handle for of_rank in ranks.all_gather(handles) for handle in of_rank]
    if None not in handles:
        with suppress(Exception):
            of_ranks = [words if r == rank else device.open_memory(handle, words) for r, handle in enumerate(handles)]
            written = [("write", of_rank[rank : rank + 1], 1) for of_rank in of_ranks]
            device.memory_operations([*written, ("wait", words[rank : rank + 1], 1)])
            device.synchronize()
    ranks.all_gather(None)  # all have written by now
    return all(ranks.all_gather(bool(device.to_host(words).all())))


def peer_access() -> bool:
    """Whether `map_memory` can be used."""
    return _peers_reached


def way() -> str:
    """How ranks exchange gradients and parameters, in a word or two."""
    if _peers_reached:
        return "copies from GPU to GPU"
    return "NCCL" if isinstance(_collectives, Nccl) else "gloo"


@dataclass(frozen=True)
class Mapped:
    """An array that every rank has. arrays: one for each rank; this rank's device loads and stores in all of them.
    addresses: of these, uint64 (ranks,), on the device."""

    arrays: list
    addresses: object


def map_memory(**arrays) -> SimpleNamespace:
    """These arrays of all ranks, which have peer access: each is a Mapped under its name. None stands for an array that
    no rank has. All ranks must call it alike. Raises UserError if CUDA does not let another rank access one of them."""
    arrays = {name: array for name, array in arrays.items() if array is not None}
    device.synchronize()  # so other ranks see what this one has put into the arrays
    mapped = {}
    try:
        handles = ranks.all_gather([device.memory_handle(array) for array in arrays.values()])
        for i, (name, own) in enumerate(arrays.items()):
            mapped[name] = [
                own if r == ranks.rank() else device.open_memory(handles[r][i], own) for r in range(ranks.size())
            ]
    except Exception as error:  # of CuPy, or of the driver
        raise UserError(
            f"GPUs cannot share their memory ({first_line(error)}): set NCCL_P2P_DISABLE=1 for all ranks, and NCCL "
            "finds another way"
        ) from None
    for name, found in mapped.items():
        mapped[name] = Mapped(found, device.asarray(np.array([device.address(x) for x in found], np.uint64)))
    return SimpleNamespace(**mapped)


def check_devices() -> None:
    """Raises UserError unless each rank has a device of its own, and all are of one kind."""
    if device.why_not_cuda:
        raise UserError(f"CUDA does not work here ({device.why_not_cuda}); --device cpu trains on the CPU")
    ranks.check_same("the device", device.kind, "choose one for all with --device")
    gpus = ranks.all_gather([ranks.hosts()[ranks.rank()], device.identity])
    first = {}
    for r, (host, gpu) in enumerate(gpus):
        if gpu and first.setdefault((host, gpu), r) != r:
            raise UserError(
                f"rank {r} on {host} has the same GPU as rank {first[host, gpu]}: there are more ranks than GPUs; "
                "start fewer (--gpus)"
            )


def all_reduce(arrays: list) -> None:
    """Starts setting each array, contiguous and fp32, to the sum of all ranks' arrays. It begins after the work that
    the device has been given. As with all functions here, later work must wait for it with
    `device.wait_comm`."""
    if _collectives and arrays:
        ranks.progress()
        _collectives.all_reduce(arrays)


def reduce(pieces: Pieces) -> None:
    """The same for arrays that only one rank each needs. On the other ranks they are then undefined."""
    if _collectives and pieces:
        ranks.progress()
        _collectives.reduce(pieces)


def broadcast(pieces: Pieces) -> None:
    """Starts copying each array, contiguous and of any type, from one rank to all others."""
    if _collectives and pieces:
        ranks.progress()
        _collectives.broadcast(pieces)


def exchange(sent: Pieces, received: Pieces) -> None:
    """Starts to send each of some arrays to a rank, and to receive each of others from a rank. What one rank sends to
    another, the other must receive: as many arrays, of the same sizes, in the same order."""
    if _collectives and sent + received:
        ranks.progress()
        _collectives.exchange(sent, received)


def whole(read: Callable[[int, object], None], shards: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The pieces of a flat fp32 array, one after another on the host. shards: the range that each rank has of it, and
    then all ranks must ask for all pieces; or the only range, which every rank has. read(start, piece): sets a piece on
    the device to this rank's numbers, from the start-th on."""
    staged = device.empty((min(device.STAGED, shards[0][1]),))
    for r, (start, end) in enumerate(shards):
        for at in range(start, end, device.STAGED):
            piece = staged[: min(device.STAGED, end - at)]
            if r == ranks.rank() or len(shards) == 1:
                read(at, piece)
            if len(shards) > 1:
                broadcast([(piece, r)])
                device.wait_comm()
            yield device.to_host(piece)


def shared(values: np.ndarray | None, n: int) -> Iterator[tuple[int, object]]:
    """`device.staged` of values (n,) on the host of rank 0, on the devices of all ranks. The others give None."""
    for at, piece in device.staged(values, n):
        broadcast([(piece, 0)])
        device.wait_comm()
        yield at, piece
