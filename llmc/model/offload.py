"""AdamW's state on the host, and how it passes through the GPU (`--offload`).

It passes in pieces of PIECE bytes, through BUFFERS buffers. While one piece is stored, the next one is updated, and the
one after it is fetched. Fetches, updates and stores have a stream each, so bytes move in both directions at the same
time. A large tensor has many pieces, and small tensors share one.

Updates may begin once the norm of all gradients is known. They run beside the next step's forward pass if this follows
a plan (llmc/ranks/offloaded_updates.py), else at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import device

import numpy as np

# Bytes of m, v and, in bf16, low together, and the number of buffers. On an H100 a pass over Llama 3.2 1B's state
# then takes 303 ms, 49 GB/s in each direction. PCIe gives no more: large copies both ways at once reach 46. Two buffers
# of 64 MiB take 310 ms, three of 64 MiB 300.
PIECE = 1 << 25
BUFFERS = 3
VECTOR = 16  # numbers; a part begins at the same place modulo VECTOR in all buffers, so all arrays are aligned alike


class Part(NamedTuple):
    """A range of the parameters, its weight decay, and its place in each row of a buffer."""

    start: int
    end: int
    decay: float
    place: int


Piece = list[Part]


def buffer_bytes() -> int:
    """The bytes of all buffers."""
    return BUFFERS * PIECE


class Offload:
    """AdamW's state on the host, and the buffers on the device through which it passes.

    arrays            m, v and, in bf16, low of this rank's parameters (AdamW), in page-locked memory of the host
    first             the place of the first of these among all parameters
    buffers           on the device, each a row (numbers,) for each of the arrays
    free              for each buffer, a mark after the last store from it
    rates (3,)        on the device: a step's learning rate and its corrections of m and v (kernels/adamw.py)
    staged (2, 3)     the same on the host, for two steps in flight
    pending           the ranges of the parameters that still lack the last step's update
    """

    def __init__(self, arrays: list[np.ndarray], first: int):
        capacity = max(VECTOR, PIECE // sum(x.itemsize for x in arrays) // VECTOR * VECTOR)
        self.arrays, self.first, self.pending = arrays, first, []
        self.buffers, self.free = [[device.empty((capacity,), x.dtype) for x in arrays] for _ in range(BUFFERS)], []
        self.rates, self.staged = device.empty((3,)), device.pinned((2, 3), np.float32)

    @property
    def bytes(self) -> int:
        """How much of the host's memory the arrays take."""
        return sum(array.nbytes for array in self.arrays)

    def set_rates(self, lr: float, beta1: float, beta2: float, t: int) -> None:
        """Sets `rates` for step t, counted from 1. The updates that follow belong to this step."""
        staged = self.staged[t % 2]
        staged[:] = lr, 1.0 - beta1**t, 1.0 - beta2**t
        device.copy_in(self.rates, staged)

    def pieces(self, ranges: Iterable[tuple[int, int, float]]) -> list[Piece]:
        """Cuts ranges, each with its weight decay, into pieces, in their order."""
        capacity, pieces, used = self.buffers[0][0].size, [], 0
        for start, end, decay in ranges:
            while start < end:
                last = pieces[-1][-1] if pieces else None
                goes_on = last is not None and (last.end, last.decay) == (start, decay)
                place = used if goes_on else VECTOR * device.ceil_div(used, VECTOR) + start % VECTOR
                if not pieces or place >= capacity:
                    pieces.append([])
                    place, goes_on = start % VECTOR, False
                stop = min(end, start + capacity - place)
                if goes_on:
                    pieces[-1][-1] = last._replace(end=stop)
                else:
                    pieces[-1].append(Part(start, stop, decay, place))
                start, used = stop, place + stop - start
        return pieces

    def pass_through(self, piece: Piece, update: Callable[..., None], number: int, count: int) -> None:
        """Fetches a piece, calls update(start, end, decay, *arrays) for each of its parts, and stores the piece. Call
        it in the work of device.on_comm_stream, once for each of `count` pieces; `number` counts them from 0. The
        stream of this work then waits until the piece is updated, and after the last one until all are stored."""
        caller, fetches, updates, stores = device.stream, device.fetch_stream, device.update_stream, device.store_stream
        if number == 0:
            self.free = [device.mark(caller)] * BUFFERS
        buffer = self.buffers[number % BUFFERS]
        places = [(row[part.place :][: part.end - part.start], array[part.start - self.first : part.end - self.first])
                  for part in piece for row, array in zip(buffer, self.arrays, strict=True)]  # fmt: skip
        device.wait(fetches, self.free[number % BUFFERS])
        with device.on(fetches):
            for here, there in places:
                device.copy(here, there)
        device.wait(updates, device.mark(fetches))
        with device.on(updates):
            for start, end, decay, place in piece:
                update(start, end, decay, *(row[place:][: end - start] for row in buffer))
        updated = device.mark(updates)
        device.wait(caller, updated)
        device.wait(stores, updated)
        with device.on(stores):
            for here, there in places:
                device.copy(there, here)
        self.free[number % BUFFERS] = device.mark(stores)
        if number == count - 1:
            for stored in self.free:
                device.wait(caller, stored)
