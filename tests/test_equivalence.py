"""Ways to run that promise the same bits have the same bits.

A row below is a way to run: a value for each of AXES. Some of these decide what is computed: the model, the precision,
--grad-clip. All others may change no bit: --recompute, --offload, -z, the order in which a device does its work, a
checkpoint in the middle. So each row is compared with the plain way to compute the same. Between them the rows have
each pair of two axes' values.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory

import device
from conftest import DEVICES
from llmc.model import fp8, offload
from llmc.model.tensors import Config
from llmc.ranks import peer_transport, plan
from models import GROUPS_OF_64, HEADS_OF_64, LLAMA_ODD, ODD, PYTHIA_HEADS_OF_64, PYTHIA_ODD, QWEN_HEADS_OF_64, QWEN_ODD
from models import VARIANTS, name_of
from support.runs import Found, first_parameters, same, train

import numpy as np
import pytest
from lazy import EagerDevice, LazyDevice, Threads

CUDA = ("cuda",) * ("cuda" in DEVICES)
CAPABILITY = device.current.device.compute_capability if CUDA else 0
MODELS = {
    "gpt2": ODD, "gpt2 64": HEADS_OF_64, "llama3": LLAMA_ODD, "llama3 tied": replace(LLAMA_ODD, tied=True),
    "llama3 64": replace(GROUPS_OF_64, num_layers=2, num_heads=2, num_kv_heads=1, channels=128, hidden=96),
    "pythia": PYTHIA_ODD, "pythia 64": PYTHIA_HEADS_OF_64, "qwen3": QWEN_ODD,
    "qwen3 64": replace(QWEN_HEADS_OF_64, num_layers=2, num_heads=2, num_kv_heads=1, hidden=96),
}  # fmt: skip
KINDS = {"cpu": device.CpuDevice, "warp32": device.CpuDevice, "lazy": LazyDevice, "eager": EagerDevice}

# What decides which bits are computed, and then what must not change them.
COMPUTED = {
    "model": tuple(MODELS), "attention": ("softmax", "relu", "flash"),
    "precision": ("fp32", "bf16", "fp8", *("tf32" for _ in CUDA)), "logit_rows": (0, 7), "grad_clip": (0.0, 0.1),
    "bitwise": (False, True), "ranks": (1, 2, 3), "peers": (True, False), "batches_a_rank": (1, 2),
}  # fmt: skip
SAME = {
    "recompute": (False, True), "offload": (False, True), "sharded": (False, True),
    "device": ("cpu", "lazy", "eager", *CUDA), "recorded": (True, False), "looks": (True, False),
    # resumed: stopped and started again; killed: also after the checkpoint; then: with other flags before, or after it
    "history": ("undisturbed", "resumed", "killed", "plain, then as here", "as here, then plain"),
}  # fmt: skip
AXES, STEPS, B, T = COMPUTED | SAME, 4, 2, 8
FLAGS = "recompute", "offload", "sharded", "logit_rows", "bitwise"


def settled(way: dict, config: Config | None = None) -> dict:
    """The nearest way that exists."""
    config, way = config or MODELS[way["model"]], dict(way)
    if way["device"] == "cuda":
        way["ranks"] = 1  # tests/test_ranks.py has GPUs that train together
        if CAPABILITY < {"bf16": 80, "tf32": 80, "fp8": 89}.get(way["precision"], 0):
            way["precision"] = "fp32"
    elif way["precision"] == "tf32":
        way["precision"] = "fp32"
    if way["precision"] == "fp8" and config.channels % 16:
        way["precision"] = "bf16"  # which nothing would be quantized in
    if way["attention"] == "flash" and (config.head_size != 64 or (way["device"], way["precision"]) == ("cuda", "fp32")):
        way["attention"] = "softmax"
    if way["ranks"] == 1:
        way["peers"] = False
    return way


def covering(axes: dict[str, tuple], settled: Callable[[dict], dict]) -> list[dict]:
    """Rows that have between them each pair of two axes' values, if a settled row can have it."""
    draw, rows = random.Random(1), []
    left = {
        ((one, x), (two, y)): None for one, two in combinations(axes, 2) for x, y in product(axes[one], axes[two])
    }  # a dict, because it keeps its order
    while left:
        aim = next(iter(left))
        drawn = [settled({name: draw.choice(axes[name]) for name in axes} | dict(aim)) for _ in range(50)]
        best = max(drawn, key=lambda row: (dict(aim).items() <= row.items(), count_new(row, left)))
        if count_new(best, left):
            rows.append(best)
        for pair in [aim, *combinations(best.items(), 2)]:
            left.pop(pair, None)
    return rows


def count_new(row: dict, left: dict) -> int:
    return sum(pair in left for pair in combinations(row.items(), 2))


def plain(way: dict) -> dict:
    """The plain way to compute the same."""
    found = way | {name: values[0] for name, values in SAME.items()}
    if way["device"] in ("cuda", "warp32"):
        found["device"] = way["device"]
    if way["bitwise"]:  # one rank has the same bits
        found |= {"ranks": 1, "peers": False, "batches_a_rank": way["ranks"] * way["batches_a_rank"]}
    elif way["grad_clip"]:  # ranks that have the sums of their own shard add up the norm in another order
        found["sharded"] = way["sharded"]
    return found


def on_ranks(way: dict, config: Config, steps: slice, total: int, **files) -> list[Found]:
    """What each rank finds that trains for these of all steps, with `total` batches a step on all ranks."""
    batches = np.random.default_rng(total).integers(0, config.vocab_size, (STEPS, total, 2, B, T), dtype=np.int32)
    options = {name: way[name] for name in (*FLAGS, "attention", "precision", "grad_clip", "looks")} | files

    def work(rank: int) -> Found:
        device.use_recording(way["recorded"])
        return train(config, batches[steps], **options)

    with pytest.MonkeyPatch.context() as patch:
        # All weights are large enough for fp8. Pieces and buckets are smaller than a tensor.
        for module, name, value in (
            (fp8, "MIN_GAIN", 0), (offload, "PIECE", 4800), (peer_transport, "MAX_ROUND", 1000), (device, "STAGED", 3000),
            (plan, "MIN_BUCKET", 1 << 22 if way["device"] == "eager" else 500),  # or all is one bucket
        ):  # fmt: skip
            patch.setattr(module, name, value)
        patch.setenv("LLMC_CPU_WARP", "32" if way["device"] == "warp32" else "1")
        if way["device"] == "cuda":
            device.use("cuda")
            return [work(0)]
        return Threads(way["ranks"], patch, way["peers"]).run(work, KINDS[way["device"]])


def outcome(way: dict, config: Config) -> list[Found]:
    """What each rank finds at the end of a run that may be stopped and started again before its third step."""
    total, history, other = way["ranks"] * way["batches_a_rank"], way["history"], plain(way) | {"looks": way["looks"]}
    if history == "undisturbed":
        return on_ranks(way, config, slice(None), total)
    before = other if history.startswith("plain") else way
    after = other if history.endswith("plain") else way
    with TemporaryDirectory() as folder:
        stop = slice(3 if history == "killed" else 2)
        first = on_ranks(before, config, stop, total, directory=Path(folder), saves=2)
        second = on_ranks(after, config, slice(2, None), total, checkpoint=Path(folder) / "step_00000002")
    return [first[0] | found for found in second]


@functools.cache
def plain_outcome(way: tuple, config: Config) -> Found:
    (found, *others) = outcome(dict(way), config)
    assert same(found, *others) and all(np.isfinite(found[name]).all() for name in ("parameters", "m", "v"))
    return found


def assert_same_bits(way: dict, config: Config) -> None:
    assert same(plain_outcome(tuple(plain(way).items()), config), *outcome(way, config))


ROWS = covering(AXES, settled)


@pytest.mark.parametrize("way", ROWS, ids=lambda way: "-".join(map(str, way.values())))
def test_no_flag_and_no_disturbance_changes_a_bit(way):
    assert_same_bits(way, MODELS[way["model"]])
