"""Ranks of one memory give their GPUs' streams work that reads and writes one another's arrays. Of two accesses to the
same bytes, one of them a write, one must happen before the other, however fast each stream is.

Here a device computes nothing, but notes for each rank what would be read and written on which stream, which stream
waits for which, and where ranks meet. From that vector clocks follow (Fidge, 1988; Mattern, 1988): how many works of
each stream have certainly been done when a work begins.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_beside import WRITTEN

from kernels import exchange
from kernels.adamw import adamw_update
from llmc import collectives, device, model, ranks
from models import LLAMA_ODD, ODD, PYTHIA_ODD, kind_of

N, B, T = 2, 2, 8
SHARED = ("params_memory", "grads_memory", "received", "sums", "m_memory", "v_memory", "norm")
SPARSE = ("wte_values", "wte_indices")


def span(x: np.ndarray, length: int | None = None) -> tuple[int, int]:
    """The addresses of an array's bytes, or of its first floats."""
    start = x.__array_interface__["data"][0]
    return start, start + (x.nbytes if length is None else 4 * length)


@dataclass(eq=False)
class Stream:
    rank: int
    name: str
    log: list
    captured: bool = False
    ptr: int = 0

    def use(self) -> None:
        pass

    def wait_event(self, mark: "Mark") -> None:
        self.captured |= mark.captured
        self.log.append(("wait", self, mark))

    def begin_capture(self) -> None:
        self.captured = True

    def end_capture(self) -> None:
        self.captured = False
        self.log.append(("joined", self))


@dataclass(eq=False)
class Mark:
    stream: Stream
    captured: bool


class Gpu(device.CpuDevice):
    """Streams as CudaDevice uses them. log: in the order of the host program ("mark", stream, mark), ("wait", stream,
    mark), ("meet", stream), ("work", stream, name, reads, writes) and, behind a recorded graph, ("joined", stream)."""

    beside, on, join = device.CudaDevice.beside, device.CudaDevice.on, device.CudaDevice.join
    communicate, communicated = device.CudaDevice.communicate, device.CudaDevice.communicated
    join_communication, wait_for = device.CudaDevice.join_communication, device.CudaDevice.wait_for
    capture, blas_handle, second_blas_handle = device.CudaDevice.capture, None, None
    blas = captured_blas = SimpleNamespace(setStream=lambda *_: None, set_workspace=lambda *_: None)
    workspaces = [SimpleNamespace(data=SimpleNamespace(ptr=0), nbytes=0)] * 2

    def begin(self, rank: int, rows: int) -> None:
        self.rows, self.rank, self.log = rows, rank, []
        self.capturing, self.communicating, self.stream = False, None, Stream(rank, "first", self.log)
        self.new_streams()

    def new_streams(self) -> None:
        self.second_stream, self.third_stream, self.fourth_stream = (
            Stream(self.rank, name, self.log) for name in ("second", "third", "fourth")
        )

    def mark(self, stream: Stream) -> "Mark":
        assert stream.captured or not self.capturing, "a graph waits for a stream that it does not have"
        self.log.append(("mark", stream, mark := Mark(stream, stream.captured)))
        return mark

    def note(self, name: str, reads: list, writes: list) -> None:
        self.log.append(("work", self.stream, name, reads, writes))

    def copy(self, dst, src) -> None:
        self.note("copy", [span(src)], [span(dst)])

    def memory_operations(self, operations) -> None:
        self.log.append(("meet", self.stream))

    def launch(self, name: str, arguments: dict, work) -> None:
        if name == "sum_kernel":
            self.note(name, *touched_by_sum(SimpleNamespace(**{f"{key}_": value for key, value in arguments.items()})))
        elif name == "gather_rows_kernel":
            self.note(name, *touched_by_rows(SimpleNamespace(**arguments), self.rows))
        else:
            arrays = {key: value for key, value in arguments.items() if isinstance(value, np.ndarray)}
            of_x = arguments["n"] if name == "squares_partials_kernel" else None  # which is given more than it reads
            spans = {key: span(x, of_x if key == "x" else None) for key, x in arrays.items()}
            written = [spans[key] for key in spans if key in WRITTEN[name]]
            self.note(name, [spans[key] for key in spans if key not in WRITTEN[name]], written)

    def recorded(self, work) -> None:
        """As a graph that is replayed: what it does beside the first stream waits for nothing that the other streams
        have been given before, and CUDA wants that it ends on the first."""
        assert self.communicating is None, "nobody waits for what has been communicated before a graph"
        outside = self.second_stream, self.third_stream, self.fourth_stream
        self.new_streams()
        self.capture(work)
        self.second_stream, self.third_stream, self.fourth_stream = outside


def touched_by_sum(a: SimpleNamespace) -> tuple[list, list]:
    """What a call of sum_kernel reads and writes, by its definition."""
    pieces = a.pieces_.reshape(-1, 4).tolist()
    vectors = pieces[-1][0] + -(-(pieces[-1][2] - pieces[-1][1]) // 4)
    begin, stop = vectors * a.share_ // a.shares_, vectors * (a.share_ + 1) // a.shares_
    reads, writes = [], []
    for before, start, end, shift in pieces:
        first = start + 4 * max(0, begin - before)
        last = min(end, start + 4 * (stop - before))
        if first < last:
            of_buffers = [(int(x), 0 if r == a.own_ else shift) for r, x in enumerate(a.from_)]
            reads += [(x + 4 * (first + shift), x + 4 * (last + shift)) for x, shift in of_buffers]
            writes += [(int(x) + 4 * first, int(x) + 4 * last) for x in a.to_]
    return reads, writes


def touched_by_rows(a: SimpleNamespace, rows: int) -> tuple[list, list]:
    """What a call of gather_rows_kernel reads and writes where a batch takes all rows."""
    reads, writes = [span(x) for x in (a.inp, a.order, a.count)], []
    for r, buffer in enumerate(a.buffers.tolist()):
        first, last = max(a.start, r * a.length), min(a.start + rows * a.C, (r + 1) * a.length)
        if first < last:
            reads.append((buffer + 4 * first, buffer + 4 * last))
        if first < last and r != a.rank:
            writes.append((int(a.buffers[a.rank]) + 4 * first, int(a.buffers[a.rank]) + 4 * last))
    return reads, writes


def program(gpu: Gpu, of, count: int, grad_clip: float, record: bool) -> None:
    """Three steps of so many batches, as a rank: of a step the first is not recorded."""
    for step in range(1, 4):
        for i in range(count):
            first, last = of.bitwise or i == 0, of.bitwise or i == count - 1

            def work(begins=i == 0, first=first, last=last) -> None:
                if begins:
                    exchange.gather_beside_forward(of)
                if first:
                    of.zero_grad()
                of.forward(B, T, training=True)
                of.loss(B, T, dloss=1.0)
                of.backward(B, T, accumulate=not first, last=last)
                exchange.add_batch(of)

            gpu.recorded(work) if record and step > 1 else work()
        adamw_update(of, 1e-2, 0.9, 0.999, 1e-8, 0.1, step, grad_clip)
        if step == 2:
            of.gather_parameters()
            of.forward(B, T)  # as a validation does


def logs_of(config, monkeypatch, count=1, grad_clip=0.0, record=True, **flags) -> tuple[list[list], dict]:
    """The log of each rank, and where the arrays lie that are looked at, by their names."""
    monkeypatch.setattr(device, "CpuDevice", Gpu)
    device.use("cpu")
    gpu, rank, shared = device._device, [0], {}

    def map_memory(**arrays) -> SimpleNamespace:
        for name, x in arrays.items():
            if x is not None:
                if name not in shared:
                    shared[name] = collectives.Mapped([], np.zeros(N, np.uint64))
                shared[name].addresses[rank[0]] = span(x)[0]
                shared[name].arrays.append(x)
        return SimpleNamespace(**shared)

    def all_reduce(arrays: list) -> None:
        def work(_) -> None:
            gpu.log.append(("meet", gpu.stream))
            gpu.note("all_reduce", [], [span(x) for x in arrays])

        device.communicate(work)

    for module, name, stands in (
        (ranks, "size", lambda: N), (ranks, "rank", lambda: rank[0]), (collectives, "one_memory", lambda: True),
        (collectives, "map_memory", map_memory), (collectives, "all_reduce", all_reduce), (model, "BUCKET", 400),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, stands)
    models, logs, places = [], [], {}
    for rank[0] in range(N):
        models.append(kind_of(config)(config, B, T, "softmax", **flags))
        arrays = {name: getattr(models[-1], name) for name in SHARED}
        arrays |= {name: shared[name].arrays[-1] for name in SPARSE if name in shared}
        places |= {f"{name} of rank {rank[0]}": span(x) for name, x in arrays.items() if x is not None}
    for rank[0], of in enumerate(models):
        gpu.begin(rank[0], len(of.params.wte))
        with device.observe(gpu.launch):
            program(gpu, of, count, grad_clip, record)
        logs.append(gpu.log)
    return logs, places


def accesses(logs: list[list]) -> list[tuple]:
    """(start, end, written, stream, which work of the stream, the clock when it began, name) of all."""
    clocks, found = {}, []
    rest = [iter(log) for log in logs]

    def clock(stream: Stream) -> Counter:
        return clocks.setdefault(stream, Counter())

    while rest:
        meeting = []
        for log in rest:
            for what, stream, *more in log:
                if what == "meet":
                    meeting.append(stream)
                    break
                if what == "mark":
                    clocks[more[0]] = Counter(clock(stream))
                elif what == "wait":
                    clocks[stream] = clock(stream) | clocks[more[0]]  # of each stream the larger count
                elif what == "joined":
                    own = [clock(other) for other in clocks if isinstance(other, Stream) and other.rank == stream.rank]
                    assert all(other <= clock(stream) for other in own), "a graph ends with streams that are not joined"
                else:
                    name, reads, writes = more
                    clock(stream)[stream] += 1
                    now = Counter(clock(stream))
                    found += [(*one, False, stream, now[stream], now, name) for one in reads]
                    found += [(*one, True, stream, now[stream], now, name) for one in writes]
        assert len(meeting) in (0, len(logs)), "not all ranks come to a barrier"
        together = Counter()
        for stream in meeting:
            together |= clock(stream)
        clocks |= {stream: Counter(together) for stream in meeting}
        rest = rest if meeting else []
    return found


def races(logs: list[list], places: dict) -> set[str]:
    """Two works each that touch the same bytes in no certain order."""
    found, of_all = set(), sorted(accesses(logs), key=lambda one: one[0])
    for place, (low, high) in places.items():
        before = []
        for one in [one for one in of_all if one[0] < high and one[1] > low]:
            start, _, written, stream, count, clock, name = one
            before = [other for other in before if other[1] > start]
            for _, _, other_written, other_stream, other_count, other_clock, other_name in before:
                ordered = clock[other_stream] >= other_count or other_clock[stream] >= count
                if (written or other_written) and not ordered:
                    found.add(f"{place}: {name} on {stream.name}, {other_name} on {other_stream.name}")
            before.append(one)
    return found


CONFIGS = [replace(ODD, num_layers=3), LLAMA_ODD, PYTHIA_ODD, replace(ODD, num_layers=1)]
FLAGS = [{}, {"grad_clip": 0.1}, {"sharded": True}, {"sharded": True, "grad_clip": 0.1}, {"bitwise": True},
         {"sharded": True, "bitwise": True}]
CASES = [(config, 1, True) for config in CONFIGS] + [(CONFIGS[0], 2, True), (CONFIGS[0], 1, False)]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("config, count, record", CASES, ids=str)
def test_what_streams_and_ranks_do_to_the_same_bytes_has_an_order(config, count, record, flags, monkeypatch):
    assert not races(*logs_of(config, monkeypatch, count, record=record, **flags))


def without_meeting(which: str):
    return lambda log: [one for one in log if one[0] != "meet" or one[1].name != which]


def without_waits(name: str, other: str):
    return lambda log: [one for one in log if one[0] != "wait" or (one[1].name, one[2].stream.name) != (name, other)]


@pytest.mark.parametrize("change, record, sharded", [
    (without_meeting("third"), True, False),           # what is late
    (without_meeting("fourth"), True, False),          # sums beside backward
    (without_waits("first", "third"), True, False),    # AdamW for what is late
    (without_waits("first", "third"), False, False),
    (without_waits("fourth", "second"), True, False),  # sums beside backward for the weights' gradients
    (without_waits("third", "fourth"), False, False),  # what is late for the sums beside backward
    (without_meeting("third"), True, True),            # what other ranks have updated
    (without_waits("first", "third"), False, True),    # forward for that
    (without_waits("third", "first"), False, True),    # what other ranks have updated for what reads it before
])  # fmt: skip
def test_a_wait_that_is_missing_is_noticed(change, record, sharded, monkeypatch):
    logs, places = logs_of(CONFIGS[0], monkeypatch, record=record, sharded=sharded)
    with pytest.raises(AssertionError):
        assert not races(list(map(change, logs)), places)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_layer_that_is_not_waited_for_is_noticed(config, monkeypatch):
    """Whichever it is, but for layer 0, which has come before forward begins; "first" are the encoder's rows."""
    script, wait = sys.modules[kind_of(config).forward.__module__], exchange.wait_for_parameters
    for left_out in ("first", *range(1, config.num_layers), None):
        def wait_but_once(of, part, left_out=left_out):
            with monkeypatch.context() as patch:
                if part == left_out:
                    patch.setattr(device, "join_communication", lambda mark=None: None)
                wait(of, part)

        monkeypatch.setattr(script, "wait_for_parameters", wait_but_once)
        with pytest.raises(AssertionError):
            assert not races(*logs_of(config, monkeypatch, sharded=True))
