"""How much memory training takes, and what makes a model fit."""

from __future__ import annotations

import socket
from bisect import bisect_right
from collections.abc import Callable
from math import gcd
from typing import NamedTuple

import device
from device.errors import UserError
from device.host import free_memory
from kernels.fp8.quantized import MULTIPLE
from llmc.model.activations import cache_bytes, cache_scratch, training_bytes, training_scratch
from llmc.model.fp8 import dequantized_bytes, quantized_bytes, quantized_count
from llmc.model.model import Model
from llmc.model.offload import buffer_bytes
from llmc.model.ranges import Range
from llmc.model.tensors import Config, num_parameters
from llmc.ranks import ranks
from llmc.ranks.exchange import exchange_bytes

CHUNK = 1024  # positions whose logits exist at a time, if those of a whole batch do not fit
MAX_SEQUENCES = 1 << 20  # of a batch, in a search for what fits
# Bytes that CUDA takes of a GPU, measured on an H100. CONTEXT: the driver's own (480 MiB), CUDA's context (527) and
# cuBLAS (200). We count it only for a GPU that is not there (--memory): of one that is there, it is no longer free.
# RESERVE: what page tables of the host's memory, kernels and graphs take later (255 MiB for Qwen3-4B with --offload).
CONTEXT, RESERVE = 1210 << 20, 256 << 20

# The flags that save memory, and what they change of a Plan.
SAVING = {
    "": {"recompute": False, "offload": False},
    "--recompute": {"recompute": True, "offload": False},
    "--offload": {"recompute": False, "offload": True},
    "--recompute --offload": {"recompute": True, "offload": True},
}


class Plan(NamedTuple):
    """What the memory of training depends on, besides the model.

    B, T          a batch has B sequences of T tokens
    attention     its kind
    logit_rows    the number of positions whose logits exist at a time; 0: all
    recompute     of each layer only its input is kept
    offload       AdamW's state lies on the host
    bitwise       the exchange sums batch by batch
    shard         the range of the parameters whose AdamW state this rank keeps; None: all
    """

    B: int
    T: int
    attention: str
    logit_rows: int = 0
    recompute: bool = False
    offload: bool = False
    bitwise: bool = False
    shard: Range | None = None


def training_sizes(kind: type[Model], config: Config, plan: Plan) -> dict[str, int]:
    """The bytes of each buffer that training allocates on the device, by name."""
    n, X, B, T = num_parameters(config), device.floatX, plan.B, plan.T
    activations, gradients = training_bytes(kind, config, B, T, plan.attention, plan.logit_rows, plan.recompute)
    state = {"AdamW's pieces": buffer_bytes()} if plan.offload else state_sizes(config, plan.shard)
    quantized = {"quantized weights": quantized_bytes(kind, config)} if device.precision == "fp8" else {}
    scratch = training_scratch(kind, config, B, T, plan.attention, plan.logit_rows)
    return {
        "parameters": X.itemsize * n, **quantized, "gradients": 4 * n, **state, "activations": activations,
        "activation gradients": gradients, "scratch": sum(scratch.values()),
        **exchange_bytes(config, B, T, plan.bitwise),
    }  # fmt: skip


def state_sizes(config: Config, shard: Range | None) -> dict[str, int]:
    """The bytes of AdamW's state for a shard, or for all parameters, by name."""
    length = shard[1] - shard[0] if shard else num_parameters(config)
    low = {"master copy, low half": 2 * length} if device.floatX == device.BF16 else {}
    return low | {"AdamW m": 4 * length, "AdamW v": 4 * length}


def inference_sizes(kind: type[Model], config: Config, B: int, T: int) -> dict[str, int]:
    """The bytes of each buffer of a model that writes B texts of up to T tokens, by name."""
    others = num_parameters(config) - quantized_count(kind, config)
    return {
        "parameters": device.floatX.itemsize * others + quantized_bytes(kind, config, inference=True),
        "activations": cache_bytes(kind, config, B, T),
        "scratch": sum(cache_scratch(config, B, T).values()) + dequantized_bytes(kind, config),
    }


def in_chunks(plan: Plan) -> Plan:
    """The plan with the logits of at most CHUNK positions at a time."""
    return plan._replace(logit_rows=min(plan.logit_rows or CHUNK, CHUNK))


def largest(sizes: Callable[[int], dict[str, int]], memory: int, most: int = MAX_SEQUENCES, step: int = 1) -> int:
    """The largest number of sequences, a multiple of `step` up to `most`, whose buffers fit into so many bytes, or 0.
    sizes(b): the bytes of each buffer for b sequences."""
    return step * bisect_right(range(step, most + 1, step), memory, key=lambda b: sum(sizes(b).values()))


def largest_batches(kind: type[Model], config: Config, plan: Plan, memory: int) -> dict[str, int]:
    """For each way of SAVING the largest B that fits into so many bytes; 0 if no B does. The plan says the rest."""
    step = MULTIPLE // gcd(plan.T, MULTIPLE) if device.precision == "fp8" else 1  # a run takes no other B

    def fitting(changes: dict) -> int:
        changed = plan._replace(**changes)
        return largest(lambda b: training_sizes(kind, config, changed._replace(B=b)), memory, step=step)

    return {flags: fitting(changes) for flags, changes in SAVING.items()}


def room_for_buffers() -> int:
    """The bytes that are free on the device, without those that CUDA will take."""
    return device.memory()[0] - (RESERVE if device.kind == "cuda" else 0)


def check_memory(kind: type[Model], config: Config, plan: Plan) -> dict[str, int]:
    """The MiB of each buffer on the device. Raises UserError if the device has too little memory or, with offload, if
    the host has. The message says what would fit. All ranks must call it."""
    sizes, room = training_sizes(kind, config, plan), room_for_buffers()
    if sum(sizes.values()) > room:
        found = largest_batches(kind, config, plan, room)
        if plan != in_chunks(plan):
            chunks = largest_batches(kind, config, in_chunks(plan), room)
            found |= {f"{flags} --logit-rows {CHUNK}": B for flags, B in chunks.items() if B > found[flags]}
        host = sum(state_sizes(config, plan.shard).values()) * ranks.hosts().count(socket.gethostname())
        offloads = device.kind == "cuda" and host <= free_memory()  # on the CPU there is no other memory
        fits = [f"-b {B} {flags}".strip() for flags, B in found.items() if B and (offloads or "--offload" not in flags)]
        remedy = f"at most {' or '.join(fits)} fits" if fits else "no flag makes -b 1 fit, so lower -t"
        raise does_not_fit(plan.B, plan.T, sum(sizes.values()), room, remedy)
    if plan.offload:
        check_host_memory(sum(state_sizes(config, plan.shard).values()))
    return {name: round(size / 2**20) for name, size in sizes.items()}


def check_text_memory(kind: type[Model], config: Config, B: int, T: int) -> None:
    """Raises UserError if the device has too little memory to write B texts of up to T tokens."""

    def sizes(b: int) -> dict[str, int]:
        return inference_sizes(kind, config, b, T)

    needed, room = sum(sizes(B).values()), room_for_buffers()
    if needed > room:
        fitting = largest(sizes, room, B)
        most = f"at most {fitting} texts fit at once, so lower --samples or give fewer prompts"
        raise does_not_fit(B, T, needed, room, most if fitting else "not even one text fits, so lower -t")


def does_not_fit(B: int, T: int, needed: int, room: int, remedy: str) -> UserError:
    return UserError(
        f"the model at B={B}, T={T} needs {needed >> 20} MiB of memory, and {room >> 20} MiB are free for it on "
        f"{device.name}: {remedy}, or choose a smaller model (-e)"
    )


def check_host_memory(needed: int) -> None:
    """Raises UserError if this machine has too little memory for AdamW's state, which takes `needed` bytes on this
    rank. All ranks must call it."""
    everywhere = ranks.all_gather([socket.gethostname(), needed, free_memory()])
    here = [(size, free) for host, size, free in everywhere if host == socket.gethostname()]
    needed, free = sum(size for size, _ in here), min(free for _, free in here)
    if needed > free:
        together = f" of {len(here)} ranks" if len(here) > 1 else ""
        raise UserError(
            f"--offload needs {needed >> 20} MiB of the host's memory for AdamW's state{together}, and {free >> 20} "
            "MiB are free: leave --offload out, end other programs, or choose a smaller model (-e)"
        )
