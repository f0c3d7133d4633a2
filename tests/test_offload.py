"""--offload: what passes through the device, and the host's memory. tests/test_equivalence.py has the bits, and
tests/test_happens_before.py the order of what several streams do."""

import ctypes
import os
import time
from functools import partial
from pathlib import Path

import device
from conftest import refusal
from device import host, progress
from llmc.model import offload
from llmc.model.weights import randomize
from llmc.step import memory as training_parts
from llmc.step.training import make_training
from llmc.step.update import adamw_update
from models import ODD
from train_gpt2_fp32 import GPT2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lazy import Threads

T = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A tensor has several, and several tensors share one."""
    device.use("cpu")
    monkeypatch.setattr(offload, "PIECE", 4800)


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
    low=st.sampled_from([[], [np.uint16]]), order=st.randoms(),
)  # fmt: skip
def test_pieces_have_all_numbers_in_their_order_and_keep_their_alignment(ranges, low, order):
    """Pieces of m, v and, in bf16, the low half of the parameters."""
    order.shuffle(ranges)
    types = [np.float32, np.float32, *low]
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


# Memory


def test_a_host_that_has_too_little_memory_is_told_in_one_line(monkeypatch):
    train = partial(make_training, GPT2, ODD, 2, T, "softmax", offload=True)
    monkeypatch.setattr(training_parts, "free_memory", lambda: 100 << 10)
    message = "--offload needs 0 MiB of the host's memory for AdamW's state, and 0 MiB are free: leave --offload out, "
    assert refusal(train).startswith(message)
    monkeypatch.setattr(training_parts, "free_memory", lambda: 200 << 10)
    train()  # it needs 114 KiB
    assert all("of 2 ranks, and" in one for one in Threads(2, monkeypatch).run(lambda rank: refusal(train)))


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
    monkeypatch.setattr(host.platform, "release", lambda: "6.8.0-generic")
    assert refusal(host.page_locked, 5 << 20, "0:1:0", refuse, None) == (
        f"--offload: this machine refuses 5 MiB of page-locked memory ({why}); 3072 MiB are free, and ulimit -l is "
        "64 KiB: raise the limit, or leave --offload out"
    )
    monkeypatch.setattr(host.platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    said = refusal(host.page_locked, 5 << 20, "0:1:0", refuse, None)
    assert said.endswith(": WSL page-locks little memory, whatever the limit is: run this under Linux itself, or leave "
                         "--offload out")  # fmt: skip
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


def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch):
    assert host.container_memory(tmp_path) > 1 << 60
    for name, text in (("memory.max", "max"), ("memory.current", "700"), ("memory.stat", "anon 5\ninactive_file 200")):
        (tmp_path / name).write_text(f"{text}\n")
    assert host.container_memory(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert host.container_memory(tmp_path) == 500
    monkeypatch.setattr(host, "container_memory", lambda: 500)
    for free in 400, 500, 600:
        monkeypatch.setattr(host, "host_memory", lambda free=free: (free, 1000))
        assert host.free_memory() == min(free, 500)
