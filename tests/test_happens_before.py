"""GPUs with peer access give their streams work that reads and writes one another's arrays. Of two accesses to the same
bytes, one of them a write, one must happen before the other, however fast each stream is.

Here a device computes nothing, but notes for each rank what would be read and written on which stream, which stream
waits for which, and where ranks meet. From that vector clocks follow (Fidge, 1988; Mattern, 1988): how many works of
each stream have certainly been done when a work begins.
"""

from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import device
from device import recording
from llmc.model import fp8, offload
from llmc.model.batch import Batch
from llmc.model.ranges import range_in
from llmc.ranks import collectives, embedding_rows, peer_transport, plan, ranks
from llmc.step.training import Training, make_training
from models import ODD, ONE_OF_EACH, kind_of
from train_gpt2_fp32 import GPT2Config, training_step
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig

import numpy as np
import pytest

N, B, T = 2, 2, 8
OTHERS_OF_GPU = ("side", "urgent", "patient", "fetch", "update", "store")  # its streams beside the main one
RECEIVED = ("received", "wte_values", "wte_indices")


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

    def begin_capture(self) -> None:
        self.captured = True

    def end_capture(self) -> None:
        self.captured = False
        self.log.append(("joined", self))


class Mark(Stream):
    """What its stream was when it was made."""


class Gpu(device.CpuDevice):
    """Streams as CudaDevice uses them. log: in the order of the host program ("mark", stream, mark), ("wait", stream,
    mark), ("meet", stream), ("work", stream, name, reads, writes) and, behind a recorded graph, ("joined", stream)."""

    on, switch = device.CudaDevice.on, device.CudaDevice.switch
    on_comm_stream, mark_comm = device.CudaDevice.on_comm_stream, device.CudaDevice.mark_comm
    wait_comm = device.CudaDevice.wait_comm
    has_streams = True
    blas = SimpleNamespace(use_stream=lambda stream: None, captured=nullcontext)

    def begin(self, rank: int, rows: int) -> None:
        self.rows, self.rank, self.log, self.regions = rows, rank, [], defaultdict(list)
        self.capturing, self.comm_stream, self.main_stream = False, None, Stream(rank, "main", self.log)
        self.stream = self.main_stream
        self.new_streams()

    def new_streams(self) -> None:
        for name in OTHERS_OF_GPU:
            setattr(self, f"{name}_stream", Stream(self.rank, name, self.log))

    def mark(self, stream: Stream) -> Stream:
        assert stream.captured or not self.capturing, "a graph waits for a stream that it does not have"
        self.log.append(("mark", stream, mark := Mark(**vars(stream))))
        return mark

    def wait(self, stream: Stream, mark: Stream) -> None:
        stream.captured |= mark.captured
        self.log.append(("wait", stream, mark))

    def note(self, name: str, reads: list, writes: list) -> None:
        self.log.append(("work", self.stream, name, reads, writes))

    def memory_operations(self, operations) -> None:
        self.log.append(("meet", self.stream))

    def launch(self, name: str, arguments: dict, work) -> None:
        if name == "sum_kernel":
            self.note(name, *touched_by_sum(arguments))
        elif name == "gather_rows_kernel":
            self.note(name, *touched_by_rows(SimpleNamespace(**arguments), self.rows))
        else:
            reads, writes = [], []
            for key, access in device.accesses(name, arguments).items():
                # A partial sum of squares is given more than it reads.
                of_x = arguments["n"] if (name, key) == ("squares_partials_kernel", "x") else None
                (reads if access == "reads" else writes).append(span(arguments[key], of_x))
            self.note(name, reads, writes)

    def capture(self, work):
        """A graph, which when it is replayed waits for nothing that the other streams have been given before; and CUDA
        wants that it ends on the first."""

        def launch(stream: Stream) -> None:
            assert self.comm_stream is None, "nobody waits for the communication before a graph"
            outside = {f"{name}_stream": getattr(self, f"{name}_stream") for name in OTHERS_OF_GPU}
            self.new_streams()
            device.CudaDevice.capture(self, work)
            vars(self).update(outside)

        return SimpleNamespace(launch=launch)


def touched_by_sum(a: dict) -> tuple[list, list]:
    """What a call of sum_kernel reads and writes, by its definition."""
    pieces, width, reads, writes = a["pieces"].reshape(-1, 4).tolist(), device.width(), [], []
    vectors = pieces[-1][0] + -(-(pieces[-1][2] - pieces[-1][1]) // width)
    begin, stop = (vectors * share // a["shares"] for share in (a["share"], a["share"] + 1))
    for before, start, end, shift in pieces:
        first = start + width * max(0, begin - before)
        last = min(end, start + width * (stop - before))
        if first < last:
            of_buffers = [(int(x), 0 if r == a["own"] else shift) for r, x in enumerate(a["from"])]
            reads += [(x + 4 * (first + shift), x + 4 * (last + shift)) for x, shift in of_buffers]
            writes += [(int(x) + 4 * first, int(x) + 4 * last) for x in a["to"]]
    return reads, writes


def touched_by_rows(a: SimpleNamespace, rows: int) -> tuple[list, list]:
    """What a call of gather_rows_kernel reads and writes where a batch takes all rows."""
    reads, writes, size = [span(x) for x in (a.inp, a.order, a.count)], [], device.floatX.itemsize
    for r, buffer in enumerate(a.buffers.tolist()):
        first, last = max(a.start, r * a.length), min(a.start + rows * a.C, (r + 1) * a.length)
        if first < last:
            reads.append((buffer + size * first, buffer + size * last))
        if first < last and r != a.own:
            writes.append((int(a.buffers[a.own]) + size * first, int(a.buffers[a.own]) + size * last))
    return reads, writes


def program(training: Training, count: int, record: bool) -> None:
    """Four steps of so many batches, as a rank: of a step the first is not recorded."""
    device.use_recording(record)
    nothing = SimpleNamespace(device_batch=training.batch, count=count, step_tokens=1, **dict.fromkeys(
        ("read", "send", "fetch_losses"), lambda step, i: None), stopped=lambda: False)  # fmt: skip
    train_step = training_step(training, nothing)
    for step in range(4):
        train_step(step, 1e-2)
        if step == 2:
            training.exchange.gather_parameters()
            training.model.forward(training.acts, Batch(B, T))  # as a validation does


def logs_of(config, monkeypatch, count=1, record=True, precision="fp32", **flags) -> tuple[list[list], dict]:
    """The log of each rank, and where the arrays lie that are looked at, by their names."""
    rank, shared_arrays = [0], {}

    def map_memory(**arrays) -> SimpleNamespace:
        for name, x in arrays.items():
            if x is not None:
                if name not in shared_arrays:
                    shared_arrays[name] = collectives.Mapped([], np.zeros(N, np.uint64))
                shared_arrays[name].addresses[rank[0]] = span(x)[0]
                shared_arrays[name].arrays.append(x)
        return SimpleNamespace(**shared_arrays)

    def all_reduce(arrays: list) -> None:
        def work(_) -> None:
            gpu.log.append(("meet", gpu.stream))
            gpu.note("all_reduce", [], [span(x) for x in arrays])

        device.on_comm_stream(work)

    for module, name, stands in (
        (ranks, "size", lambda: N), (ranks, "rank", lambda: rank[0]), (collectives, "peer_access", lambda: True),
        (collectives, "map_memory", map_memory), (collectives, "all_reduce", all_reduce),
        (peer_transport, "MAX_ROUND", 400), (plan, "MIN_BUCKET", 1000),
        (offload, "PIECE", 4000), (fp8, "MIN_GAIN", 0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, stands)
    device.use("cpu")
    device.use_precision(precision)
    trainings, logs, places, scratch = [], [], {}, []
    for rank[0] in range(N):
        training = make_training(kind_of(config), config, B, T, "softmax", weight_decay=0.1, **flags)
        trainings.append(training)
        model, adamw = training.model, training.adamw
        arrays = {
            "parameters": model.params_memory, "gradients": model.grads_memory, "m": adamw.m, "v": adamw.v,
            "low": adamw.low, "grad_norm": adamw.grad_norm, "sums": training.exchange.sums,
            "quantized weights": model.fp8.memory if precision == "fp8" else None,
        } | {name: shared_arrays[name].arrays[-1] for name in RECEIVED if name in shared_arrays}  # fmt: skip
        if flags.get("offload"):
            rows = enumerate(adamw.offload.buffers)
            arrays |= {f"row {k} of buffer {i}": x for i, buffer in rows for k, x in enumerate(buffer)}
            arrays["rates"] = adamw.offload.rates
        places |= {f"{name} of rank {rank[0]}": span(x) for name, x in arrays.items() if x is not None}
    gpu = Gpu()
    device.current.device = gpu
    device.use_precision(precision)
    for rank[0], training in enumerate(trainings):
        gpu.begin(rank[0], len(training.model.params.wte))
        with device.observe(gpu.launch):
            program(training, count, record)
        logs.append(gpu.log)
        scratch.append(gpu.regions)  # else its memory would be the next rank's
        places |= {f"{purpose} {i} of rank {rank[0]}": span(x) for purpose, of in gpu.regions.items()
                   for i, x in enumerate(of)}  # fmt: skip
    device.use("cpu")
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
                    own = [clock(other) for other in clocks if type(other) is Stream and other.rank == stream.rank]
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


OTHERS = [config for config, attention in ONE_OF_EACH if attention == "softmax"]
CONFIGS = [replace(ODD, num_layers=3), *OTHERS, replace(ODD, num_layers=1)]
EVEN_CHANNELS = replace(ODD, num_layers=3, num_heads=2, channels=20)  # so that in bf16 tensors begin at words
QUANTIZED = Llama3Config(32, 101, 2, 4, 2, 64, 80, tied=False)  # with weights of several shapes
CASES = [  # precision, model, batches per step, recorded
    *(("fp32", config, 1, True) for config in CONFIGS), ("fp32", CONFIGS[0], 2, True), ("fp32", CONFIGS[0], 1, False),
    ("bf16", EVEN_CHANNELS, 1, True), ("fp8", QUANTIZED, 1, True), ("fp8", QUANTIZED, 2, True),
    ("fp8", GPT2Config(32, 101, 2, 2, 48), 1, True), ("fp8", PythiaConfig(32, 101, 2, 2, 32), 1, True),
    ("fp16", QUANTIZED, 2, True),
]  # fmt: skip
FLAGS = [{}, {"grad_clip": 0.1}, {"sharded": True}, {"sharded": True, "grad_clip": 0.1}, {"bitwise": True},
         {"sharded": True, "bitwise": True}, {"offload": True}, {"sharded": True, "offload": True},
         {"sharded": True, "bitwise": True, "offload": True}]  # fmt: skip


# The exchange knows no model: in the ordinary run the first case has all flags, and the others have some.
@pytest.mark.parametrize("precision, config, count, record, flags", [
    pytest.param(*case, flags, marks=[] if case is CASES[0] or flags in FLAGS[2::3] else pytest.mark.long)
    for case in CASES for flags in FLAGS
], ids=str)  # fmt: skip
def test_what_streams_and_ranks_do_to_the_same_bytes_has_an_order(precision, config, count, record, flags, monkeypatch):
    assert not races(*logs_of(config, monkeypatch, count, record=record, precision=precision, **flags))


@pytest.mark.parametrize("on_side", [True, False])
def test_a_quantized_gradient_that_is_not_waited_for_is_noticed(on_side, monkeypatch):
    """The side stream multiplies it, and the main stream then writes the next one there."""
    waits = recording.waits
    monkeypatch.setattr(recording, "waits", lambda launches, side: [
        None if side[i] == on_side else wait for i, wait in enumerate(waits(launches, side))
    ])  # fmt: skip
    found = races(*logs_of(QUANTIZED, monkeypatch, precision="fp8"))
    assert any(one.startswith("fp8 dout_T 64") for one in found)


OF_OFFLOAD = [
    ("fetch", "urgent"),   # the state for the gradients' norm
    ("fetch", "store"),    # a buffer until it is stored
    ("update", "fetch"),
    ("store", "update"),
    ("urgent", "update"),  # what reads parameters for their update
    ("urgent", "store"),   # the next step for the state
]  # fmt: skip


# Each pair is a wait: the first stream waits for the second. "meet": it waits for the other ranks.
@pytest.mark.parametrize("flags, waits", [
    ({}, [("urgent", "meet"),                 # what is late
          ("patient", "meet"),                # sums beside backward
          ("main", "urgent"),                 # AdamW for what is late
          ("patient", "side")]),              # sums beside backward for the weights' gradients
    ({"record": False}, [("main", "urgent"),
                         ("urgent", "patient")]),  # what is late for the sums beside backward
    ({"sharded": True}, [("urgent", "meet")]),     # what other ranks have updated
    ({"sharded": True, "record": False}, [("main", "urgent"),    # forward for that
                                          ("urgent", "main")]),  # that for what reads it before
    ({"offload": True}, OF_OFFLOAD), ({"sharded": True, "offload": True}, OF_OFFLOAD),
])  # fmt: skip
def test_a_wait_that_is_missing_is_noticed(flags, waits, monkeypatch):
    def which(one: tuple) -> tuple[str, str]:
        return one[1].name, one[2].name if one[0] == "wait" else one[0]

    logs, places = logs_of(CONFIGS[0], monkeypatch, **flags)
    for missing in waits:
        with pytest.raises(AssertionError):  # there is a race, or a graph ends with streams that nobody has joined
            assert not races([[one for one in log if which(one) != missing] for log in logs], places)


@pytest.mark.parametrize("config", [
    CONFIGS[0], CONFIGS[-1], *(pytest.param(config, marks=pytest.mark.long) for config in CONFIGS[1:-1])
], ids=str)  # fmt: skip
def test_a_gather_that_is_not_waited_for_is_noticed(config, monkeypatch):
    """Whichever it is, but for one that nothing reads in the same step; and without any left out there is no race."""
    init, counts = recording.Plan.__init__, []
    for left_out in range(12):
        if counts and left_out > max(counts):
            break
        def planned(self, launches, gradients, hooks, left_out=left_out):
            waited = [i for i, one in enumerate(hooks) if one.before is not None]
            counts.append(len(waited))
            if left_out < len(waited):
                hooks[waited[left_out]] = replace(hooks[waited[left_out]], before=None)
            init(self, launches, gradients, hooks)

        with monkeypatch.context() as patch:
            patch.setattr(recording.Plan, "__init__", planned)
            found = races(*logs_of(config, monkeypatch, sharded=True))
        assert bool(found) == (left_out < max(counts))
    assert 2 <= max(counts) < 12


def test_rows_of_the_embedding_that_are_not_waited_for_are_noticed(monkeypatch):
    monkeypatch.setattr(embedding_rows.EmbeddingRows, "gather", lambda self, wte, C: setattr(
        self, "embedding", [range_in(wte, self.model.params_memory)]))  # fmt: skip
    assert races(*logs_of(CONFIGS[0], monkeypatch, sharded=True))
