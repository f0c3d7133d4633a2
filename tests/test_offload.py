"""--offload: AdamW's state lies on the host, and passes through buffers on the device, beside the next step where
that is recorded. tests/test_equivalence.py has the bits, tests/test_happens_before.py the order of what several streams
do with it."""

import ctypes
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import device
from conftest import refusal
from device import host, progress, recording
from llmc.model import offload
from llmc.model.weights import randomize
from llmc.ranks import plan
from llmc.step import memory as training_parts
from llmc.step.training import make_training
from llmc.step.update import adamw_update
from models import ODD
from support.runs import Found, same, train
from train_gpt2_fp32 import GPT2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lazy import LazyDevice, Threads

T = 8
TYPES = {"fp32": (np.float32, np.float32), "bf16": (np.float32, np.float32, np.uint16)}  # of m, v and low


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A tensor has several, and several tensors share one. Each test begins in fp32 on the CPU."""
    device.use("cpu")
    monkeypatch.setattr(offload, "PIECE", 4800)
    monkeypatch.setattr(plan, "MIN_BUCKET", 500)


def trained_on(kind: type[device.CpuDevice], *arguments, **flags) -> Found:
    """`train` on a device of this kind."""
    device.current.device = kind()
    try:
        return train(*arguments, **flags)
    finally:
        device.use("cpu")


def test_a_gradient_whose_square_is_too_large_changes_nothing_without_clipping_either(rng):
    """Without --offload its own parameter alone would stay, and AdamW would tell the next step."""
    training = make_training(GPT2, ODD, 2, T, "softmax", offload=True)
    model, adamw = training.model, training.adamw
    randomize(model, adamw, 42)
    before = model.params_memory.copy()
    model.grads_memory[:] = 0
    model.grads.layer[1].fcw[0, 0] = 1e30
    adamw_update(model, adamw, training.exchange, 1e-2, 1)
    training.exchange.gather_parameters()
    assert np.array_equal(model.params_memory, before) and not adamw.m.any()
    assert (adamw.grad_norm[2], adamw.grad_norm[3]) == (1, 0)


# What passes through the device


@given(
    ranges=st.lists(st.integers(0, 2000), max_size=12).map(
        lambda at: list(zip(*[iter(sorted(set(at)))] * 2, strict=False))),
    types=st.sampled_from([TYPES["fp32"], TYPES["bf16"]]), order=st.randoms(),
)  # fmt: skip
def test_pieces_have_all_numbers_in_their_order_and_keep_their_alignment(ranges, types, order):
    device.use("cpu")
    order.shuffle(ranges)
    of = offload.Offload([np.zeros(2000, dtype) for dtype in types], 0)
    room = of.buffers[0][0].size
    pieces = of.pieces((start, end, 0.1) for start, end in ranges)
    assert all(sum(row.nbytes for row in buffer) <= offload.PIECE for buffer in of.buffers)
    assert all([(row.dtype, row.size) for row in buffer] == [(dtype, room) for dtype in types] for buffer in of.buffers)
    assert [i for piece in pieces for part in piece for i in range(part.start, part.end)] == [
        i for start, end in ranges for i in range(start, end)
    ]
    for piece in pieces:
        ends = [part.place + part.end - part.start for part in piece]
        assert piece and ends[-1] <= room
        assert all(part.place >= end for part, end in zip(piece[1:], ends, strict=False))
        assert all((part.place - part.start) % offload.VECTOR == 0 for part in piece)


class Watched(LazyDevice):
    """Leaves out a copy: the skipped-th one of an update from or to the host, counted from 0."""

    skipped, copies = None, 0

    def __init__(self):
        super().__init__()
        copy = self.copy

        def some(dst, src) -> None:
            if self.stream not in (self.fetch_stream, self.store_stream):
                copy(dst, src)
                return
            number, Watched.copies = Watched.copies, Watched.copies + 1
            if number != Watched.skipped:
                copy(dst, src)

        self.copy = some


@pytest.mark.parametrize("precision, piece", [("fp32", 32 << 10), ("bf16", 27 << 10)])
def test_a_fetch_or_a_store_that_is_left_out_is_noticed(precision, piece, rng, monkeypatch):
    """Whichever copy it is, in the update of the second step. No part of these pieces has the zeros of the vocabulary's
    padding alone, whose store would not be missed."""
    config = replace(ODD, num_layers=1)
    monkeypatch.setattr(offload, "PIECE", piece)
    batches = rng.integers(0, config.vocab_size, (3, 1, 2, 2, T), dtype=np.int32)

    def trained(skipped: int | None) -> tuple[Found, int]:
        monkeypatch.setattr(Watched, "skipped", skipped)
        monkeypatch.setattr(Watched, "copies", 0)
        return trained_on(Watched, config, batches, precision=precision, offload=True), Watched.copies

    want, count = trained(None)
    of_update = count // 3
    assert same(want, trained_on(device.CpuDevice, config, batches, precision=precision))
    # In the first update m and v are 0 on the host, and a buffer's first contents are, too, so only later ones tell.
    left_out = [i for i in range(of_update, 2 * of_update) if same(trained(i)[0], want)]
    assert 10 < of_update < 200 and left_out == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_that_is_not_waited_for_is_noticed(precision, monkeypatch, rng):
    """Whichever piece it is: the first launch that needs it would come too early."""
    batches, init, counts = rng.integers(0, 101, (4, 1, 2, 2, T), dtype=np.int32), recording.Plan.__init__, []
    monkeypatch.setattr(offload, "PIECE", 1 << 15)
    want = trained_on(device.CpuDevice, ODD, batches, precision=precision)

    def trained(left_out: int) -> Found:
        def planned(self, launches, gradients, hooks) -> None:
            if hooks:
                counts.append(len(hooks))
                # Nor may another hook be waited for that comes after it.
                hooks = [replace(one, before=None) if i >= left_out else one for i, one in enumerate(hooks)]
            init(self, launches, gradients, hooks)

        with monkeypatch.context() as patch:
            patch.setattr(recording.Plan, "__init__", planned)
            return trained_on(LazyDevice, ODD, batches, precision=precision, offload=True)

    assert same(trained(1000), want)
    assert 3 < counts[0] < 20
    assert not any(same(trained(i), want) for i in range(counts[0]))


# Memory


def test_a_host_that_has_too_little_memory_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(training_parts, "free_memory", lambda: 100 << 10)
    message = "^--offload needs 0 MiB of the host's memory for AdamW's state, and 0 MiB are free: leave --offload out, "
    assert re.match(message, refusal(make_training, GPT2, ODD, 2, T, "softmax", offload=True))

    def of_rank(rank: int) -> str:
        return refusal(make_training, GPT2, ODD, 2, T, "softmax", offload=True)

    monkeypatch.setattr(training_parts, "free_memory", lambda: 200 << 10)
    make_training(GPT2, ODD, 2, T, "softmax", offload=True)  # it needs 114 KiB
    assert all("of 2 ranks, and" in one for one in Threads(2, monkeypatch).run(of_rank))


def test_pages_are_touched_on_all_threads_locked_once_and_unlocked_before_they_go(monkeypatch):
    locked, unlocked = [], []
    monkeypatch.setattr(host, "STRETCH", 1 << 16)

    def unlock(address: int) -> None:
        unlocked.append((address, ctypes.string_at(address, 2)))  # the memory is still there

    array = host.page_locked(1_000_004, "no:such:gpu", lambda address, size: locked.append((address, size)), unlock)
    assert array.shape == (1_000_004,) and not array.any() and array.flags.writeable
    assert locked == [(array.ctypes.data, 1_000_004)]
    array[:2] = 1, 2
    part = array.view(np.float32).reshape(-1, 1)[7:]
    del array
    assert unlocked == []
    del part
    assert unlocked == [(locked[0][0], b"\1\2")]
    assert host.page_locked(0, "", lambda address, size: 1 / 0, unlock).size == 0


def test_a_machine_that_refuses_page_locked_memory_is_told_in_one_line(monkeypatch):
    why = "cudaErrorMemoryAllocation: out of memory"

    def refuse(address: int, size: int) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(host, "free_memory", lambda: 3 << 30)
    monkeypatch.setattr(host, "locked_limit", lambda: "64 KiB")
    assert refusal(host.page_locked, 5 << 20, "0:1:0", refuse, None) == (
        f"--offload: this machine refuses 5 MiB of page-locked memory ({why}); 3072 MiB are free, and ulimit -l is "
        "64 KiB: raise the limit, or leave --offload out"
    )
    huge = refusal(host.page_locked, 1 << 62, "0:1:0", refuse, None)  # there is no such address space
    assert "refuses 4398046511104 MiB" in huge


def test_a_line_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setenv("LLMC_QUIET", "0")
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    host.page_locked(1 << 20, "0:1:0", lambda address, size: time.sleep(0.1), lambda address: None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and set(lines) == {"page-locked memory: 0 of 0.0 GiB are ready after 0 s"}


def test_memory_lies_on_the_gpus_node(monkeypatch):
    texts = {
        "/sys/bus/pci/devices/0000:4f:00.0/numa_node": "1\n", "/sys/bus/pci/devices/0000:01:00.0/numa_node": "-1\n",
        "/sys/devices/system/node/node1/cpulist": "8-11,20\n",
    }  # fmt: skip

    def read_text(path: Path, encoding: str) -> str:
        if str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(10)))
    assert host.cpus_near("0:4f:0") == {8, 9}
    assert host.cpus_near("0:1:0") == host.cpus_near("0:2:0") == host.cpus_near("") == set(range(10))


def test_a_container_may_have_less_memory_than_its_machine(tmp_path):
    assert host.container_memory(tmp_path) > 1 << 60
    for name, text in (("memory.max", "max"), ("memory.current", "700"), ("memory.stat", "anon 5\ninactive_file 200")):
        (tmp_path / name).write_text(f"{text}\n")
    assert host.container_memory(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert host.container_memory(tmp_path) == 500
    assert host.free_memory() <= device.host_memory()[0]
