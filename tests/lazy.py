"""A device that does nothing before it must, as a GPU may, and ranks that are threads of one process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import device
from llmc.ranks import collectives, peer_transport, ranks

import numpy as np


class LazyEvent:
    """A work of the main stream that notes the device's time."""

    def __init__(self, of: "LazyDevice"):
        self.of, self.time = of, None
        of.main_stream.append(self)
        self.count = len(of.main_stream)

    def __call__(self) -> None:
        self.time = self.of.time

    def wait(self) -> None:
        self.of.advance(self.of.main_stream, self.count)

    def since(self, begin: "LazyEvent") -> float:
        self.wait()
        return self.time - begin.time


class LazyDevice(device.CpuDevice):
    """Gives its work to streams as CudaDevice does, and does a stream's work only where somebody waits for it. What
    is given to the other streams is then done as late as the waits allow; with `eagerly`, as early as they allow."""

    has_streams, eagerly = True, False

    def __init__(self):
        super().__init__()
        self.main_stream, self.side_stream, self.urgent_stream = ([] for _ in range(3))
        self.fetch_stream, self.update_stream, self.store_stream = ([] for _ in range(3))
        self.done = {id(stream): 0 for stream in self.streams}
        self.stream, self.comm_stream, self.tape = self.main_stream, False, None
        self.time = 0.0  # its clock: each work takes a millisecond
        for name in ("copy_in", "copy_out", "fill_zero", "copy", "gemm", "gemm_strided_batched"):
            setattr(self, name, partial(self.put, getattr(self, name)))

    @property
    def streams(self) -> list[list]:
        passing = [self.fetch_stream, self.update_stream, self.store_stream]
        return [self.main_stream, self.side_stream, self.urgent_stream, *passing]

    def put(self, work, *arguments, **options) -> None:
        self.give("put", self.stream, partial(work, *arguments, **options))

    def kernel(self, path, name):
        return partial(self.put, super().kernel(path, name))

    def memory_operations(self, operations) -> None:
        self.put(super().memory_operations, operations)

    def mark(self, stream: list) -> SimpleNamespace:
        mark = SimpleNamespace()
        self.give("mark", stream, mark)
        return mark

    def wait(self, stream: list, mark: SimpleNamespace) -> None:
        self.give("wait", stream, mark)

    def give(self, what: str, stream: list, item) -> None:
        """Gives a stream something to do, or, while a graph is captured, notes it for the graph's replays. A mark's
        place is (stream, how many works come before it)."""
        if self.tape is not None:
            self.tape.append((what, stream, item))
        elif what == "mark":
            item.place = stream, len(stream)
        else:
            stream.append(item.place if what == "wait" else item)

    @contextmanager
    def on(self, stream: list) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def on_comm_stream(self, work, urgent=True, after=None) -> None:
        for mark in after or [self.mark(self.stream)]:
            self.wait(self.urgent_stream, mark)
        with self.on(self.urgent_stream):
            super().on_comm_stream(work)
        self.comm_stream = True

    def mark_comm(self) -> SimpleNamespace:
        return self.mark(self.urgent_stream)

    def wait_comm(self) -> None:
        if self.comm_stream:
            self.wait(self.stream, self.mark_comm())
            self.comm_stream = False

    def capture(self, work):
        """Runs `work` once, as CUDA does, and replays the launches that `work` gave to the device."""
        self.tape = tape = []
        self.wait(self.side_stream, self.mark(self.main_stream))
        work()
        self.wait(self.main_stream, self.mark(self.side_stream))
        self.wait_comm()
        self.tape = None
        return SimpleNamespace(launch=lambda stream: [self.give(*one) for one in tape])

    def advance(self, stream: list, count: int) -> None:
        """Does the first `count` works of a stream, and what they wait for."""
        while self.done[id(stream)] < count:
            item = stream[self.done[id(stream)]]
            if isinstance(item, tuple):
                self.advance(*item)
            else:
                if self.eagerly and stream is self.main_stream:
                    for other in self.streams[1:]:
                        self.advance_freely(other)
                item()
                self.time += not isinstance(item, LazyEvent)
            self.done[id(stream)] += 1

    def advance_freely(self, stream: list) -> None:
        """Does all of a stream's works that wait for nothing which is not done yet."""
        while self.done[id(stream)] < len(stream):
            item = stream[self.done[id(stream)]]
            if isinstance(item, tuple):
                if self.done[id(item[0])] < item[1]:
                    return
            else:
                item()
            self.done[id(stream)] += 1

    def synchronize(self) -> None:
        self.advance(self.main_stream, len(self.main_stream))

    def event(self) -> LazyEvent:
        return LazyEvent(self)

    def to_host(self, array):
        self.synchronize()
        return super().to_host(array)


class EagerDevice(LazyDevice):
    eagerly = True


class Threads:
    """Ranks as threads of one process, each with a device of its own. One of them runs at a time; another may go on
    where it waits for others. With peers they have peer access; else what gloo sums, they sum in their order."""

    def __init__(self, N: int, monkeypatch, peers: bool = True):
        self.N, self.own, self.baton = N, threading.local(), threading.Lock()
        self.meeting, self.said = threading.Barrier(N, timeout=60), [None] * N
        for module, name, stands in (
            (ranks, "size", lambda: N), (ranks, "rank", lambda: self.own.rank), (ranks, "all_gather", self.all_gather),
            (collectives, "peer_access", lambda: peers and N > 1), (collectives, "map_memory", self.map_memory),
            (collectives, "all_reduce", self.all_reduce), (collectives, "reduce", self.reduce),
            (collectives, "broadcast", self.broadcast), (collectives, "exchange", self.exchange),
            (peer_transport, "barrier", self.barrier),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, stands)

    def meet(self) -> None:
        mine = device.current.device, device.current.observers
        self.baton.release()
        try:
            self.meeting.wait()
        finally:
            self.baton.acquire()
            device.current.device, device.current.observers = mine

    def barrier(self, words: list, rank: int) -> None:
        self.later(self.meet)

    def later(self, work) -> None:
        """Does work when the device comes to it."""
        of = device.current.device
        of.put(work) if isinstance(of, LazyDevice) else work()

    def all_gather(self, value) -> list:
        self.said[self.own.rank] = value
        self.meet()
        values = list(self.said)
        self.meet()
        return values

    def map_memory(self, **arrays) -> SimpleNamespace:
        of_ranks, mapped = self.all_gather(arrays), {}
        for name in arrays:
            found = [of_rank[name] for of_rank in of_ranks]
            if found[0] is not None:
                mapped[name] = collectives.Mapped(found, np.array([device.address(x) for x in found], np.uint64))
        return SimpleNamespace(**mapped)

    def together(self, work) -> None:
        """Gives work, in which all ranks take part, to the device, as a collective of NCCL is."""
        device.on_comm_stream(lambda _: self.later(work))

    def sum_of(self, x: np.ndarray) -> np.ndarray:
        """What the ranks have in x, added up in their order."""
        total, *others = map(np.copy, self.all_gather(np.copy(x)))
        for other in others:
            total += other
        return total

    def set_each(self, pieces: list, values_of) -> None:
        """Sets each array of pieces (x, root) to values_of(x, root), in which all ranks take part."""

        def work() -> None:
            for x, root in pieces:
                x[:] = values_of(x, root)

        if pieces:
            self.together(work)

    def all_reduce(self, arrays: list) -> None:
        self.set_each([(x, None) for x in arrays], lambda x, _: self.sum_of(x))

    def reduce(self, pieces: list) -> None:
        self.set_each(pieces, lambda x, root: np.where(root == self.own.rank, self.sum_of(x), np.float32(np.nan)))

    def broadcast(self, pieces: list) -> None:
        self.set_each(pieces, lambda x, root: self.all_gather(np.copy(x))[root])

    def exchange(self, sent: list, received: list) -> None:
        def work() -> None:
            of_ranks = self.all_gather([(np.copy(x), to) for x, to in sent])
            for x, peer in received:
                (x[:],) = [values for values, to in of_ranks[peer] if to == self.own.rank]

        self.together(work)

    def run(self, work, kind: type[device.CpuDevice] = device.CpuDevice) -> list:
        """What work(rank) returns on each rank, on devices of this kind."""
        results, errors = [None] * self.N, []

        def of_rank(r: int) -> None:
            self.own.rank = r
            with self.baton:
                try:
                    device.current.device, device.current.observers = kind(), []
                    results[r] = work(r)
                except BaseException as error:
                    errors.append(error)
                    self.meeting.abort()

        threads = [threading.Thread(target=of_rank, args=(r,)) for r in range(self.N)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        device.use("cpu")
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results
