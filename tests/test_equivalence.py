"""Ways to run that promise the same bits have the same bits.

A row below is a way to run: a value for each of AXES. Some of these decide what is computed: the model, the precision,
--grad-clip. All others may change no bit: --recompute, --offload, -z, the order in which a device does its work, a
checkpoint in the middle. So each row is compared with the plain way to compute the same. Between them the rows have
each pair of two axes' values.
"""

import functools
import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory

import device
from conftest import DEVICES
from dev.scripts import small_model
from llmc.model import fp8, offload
from llmc.ranks import peer_transport, plan
from models import GROUPS_OF_64, HEADS_OF_64, LLAMA_ODD, ONE_OF_EACH, TINY, VARIANTS, name_of
from support.folders import checkpoint_bytes, make_folder, samples_of, steps_of
from support.runs import Found, differing, first_parameters, same, train
from train_gpt2_fp32 import GPT2

import numpy as np
import pytest
from lazy import EagerDevice, LazyDevice, Threads

ROOT, FILES = Path(__file__).resolve().parents[1], ("model.bin", "optimizer.bin")
CUDA = ["cuda"] if "cuda" in DEVICES else []
CAPABILITY = device.current.device.compute_capability if CUDA else 0
# All of its matrices can be quantized.
LLAMA_64 = replace(GROUPS_OF_64, num_layers=2, num_heads=2, num_kv_heads=1, channels=128, hidden=96)
MODELS = *(config for config, _ in ONE_OF_EACH if config is not GROUPS_OF_64), replace(LLAMA_ODD, tied=True), LLAMA_64
KINDS = {"cpu": device.CpuDevice, "warp32": device.CpuDevice, "lazy": LazyDevice, "eager": EagerDevice}

# What decides which bits are computed, and then what must not change them.
COMPUTED = {
    "model": MODELS, "attention": ("softmax", "relu", "flash"),
    "precision": ("fp32", "bf16", "fp8", "fp16", *["tf32"] * len(CUDA)), "logit_rows": (0, 7), "grad_clip": (0.0, 0.1),
    "bitwise": (False, True), "ranks": (1, 2, 3), "peers": (True, False), "batches_a_rank": (1, 2),
}  # fmt: skip
SAME = {
    "recompute": (False, True), "offload": (False, True), "sharded": (False, True),
    "device": ("cpu", "lazy", "eager", *CUDA), "looks": (True, False),
    "recorded": (True, True, True, False),  # so that most rows follow a plan
    # resumed: stopped and started again; killed: also after the checkpoint; then: with other flags before, or after it
    "history": ("undisturbed", "resumed", "killed", "plain, then as here", "as here, then plain"),
}  # fmt: skip
AXES, STEPS, B, T = COMPUTED | SAME, 4, 1, 16
FLAGS = "recompute", "offload", "sharded", "logit_rows", "bitwise"


def settled(way: dict) -> dict:
    """The nearest way that exists."""
    config, way = way["model"], dict(way)
    if way["device"] == "cuda":
        way["ranks"] = 1  # tests/test_ranks.py has GPUs that train together
        if CAPABILITY < {"bf16": 80, "tf32": 80, "fp8": 89}.get(way["precision"], 0):
            way["precision"] = "fp32"
    elif way["precision"] == "tf32":
        way["precision"] = "fp32"
    if way["precision"] == "fp8" and config.channels % 16:
        way["precision"] = "bf16"  # which nothing would be quantized in
    no_flash = way["device"] == "cuda" and way["precision"] == "fp32"
    if way["attention"] == "flash" and (no_flash or config.head_size != 64):
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


def on_ranks(way: dict, steps: slice, total: int, **files) -> list[Found]:
    """What each rank finds that trains for these of all steps, with `total` batches per step on all ranks."""
    config = way["model"]
    batches = np.random.default_rng(total).integers(0, config.vocab_size, (STEPS, total, 2, B, T), dtype=np.int32)
    options = {name: way[name] for name in (*FLAGS, "attention", "precision", "grad_clip", "looks")} | files

    def work(rank: int) -> Found:
        device.use_recording(way["recorded"])
        return train(config, batches[steps], **options)

    with pytest.MonkeyPatch.context() as patch:
        # All weights are large enough for fp8. Pieces and buckets are smaller than a tensor.
        patch.setattr(fp8, "MIN_GAIN", 0)
        patch.setattr(offload, "PIECE", 4800)
        patch.setattr(peer_transport, "MAX_ROUND", 1000)
        patch.setattr(device, "STAGED", 3000)
        patch.setattr(plan, "MIN_BUCKET", 1 << 22 if way["device"] == "eager" else 500)  # or all is one bucket
        patch.setenv("LLMC_CPU_WARP", "32" if way["device"] == "warp32" else "1")
        if way["device"] == "cuda":
            device.use("cuda")
            return [work(0)]
        return Threads(way["ranks"], patch, way["peers"]).run(work, KINDS[way["device"]])


def outcome(way: dict) -> list[Found]:
    """What each rank finds at the end of a run that may be stopped and started again before its third step."""
    total, history, other = way["ranks"] * way["batches_a_rank"], way["history"], plain(way) | {"looks": way["looks"]}
    if history == "undisturbed":
        return on_ranks(way, slice(None), total)
    before = other if history.startswith("plain") else way
    after = other if history.endswith("plain") else way
    with TemporaryDirectory() as folder:
        stop = slice(3 if history == "killed" else 2)
        first = on_ranks(before, stop, total, directory=Path(folder), saves=2)
        second = on_ranks(after, slice(2, None), total, checkpoint=Path(folder) / "step_00000002")
    return [first[0] | found for found in second]


@functools.cache
def plain_outcome(way: tuple) -> Found:
    found, *others = outcome(dict(way))
    assert same(found, *others) and all(np.isfinite(found[name]).all() for name in ("parameters", "m", "v"))
    return found


def assert_same_bits(way: dict) -> None:
    assert differing(plain_outcome(tuple(plain(way).items())), *outcome(way)) == set()


ROWS = covering(AXES, settled)


@pytest.mark.parametrize("way", ROWS, ids=lambda way: "-".join(map(name_of, way.values())))
def test_no_flag_and_no_disturbance_changes_a_bit(way):
    assert_same_bits(way)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(150))
def test_nor_do_any_of_them_together_in_any_model(seed):
    """Rows drawn at random, some in the warps of 32 that a GPU has."""
    draw = random.Random(seed)
    config, attention = draw.choice(VARIANTS)
    axes = AXES | {"device": (*AXES["device"], "warp32"), "attention": (attention,), "model": (config,)}
    assert_same_bits(settled({name: draw.choice(values) for name, values in axes.items()}))


DEFAULT = {name: values[0] for name, values in AXES.items()} | {"model": HEADS_OF_64}


def test_what_decides_which_bits_are_computed_does_so():
    """Else rows would be compared that ignore a flag."""
    first = DEFAULT | {"ranks": 2}
    others = {"attention": "relu", "precision": "bf16", "logit_rows": 7, "grad_clip": 0.1, "bitwise": True}
    ways = [first, *(first | {name: value} for name, value in others.items())]
    ways += [first | {"precision": precision} for precision in ("fp8", "fp16")]
    found = [outcome(settled(way))[0]["parameters"].tobytes() for way in ways]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("precision, allowed", [("fp32", 1e-3), ("bf16", 3e-2)])
@pytest.mark.parametrize("model, change", [
    (HEADS_OF_64, {"ranks": 3, "peers": True, "sharded": True, "device": "lazy"}),
    (LLAMA_64, {"ranks": 3, "peers": True, "sharded": True, "device": "lazy"}),
    (HEADS_OF_64, {"ranks": 3, "sharded": True, "device": "lazy"}), (LLAMA_64, {"ranks": 3, "device": "lazy"}),
    *((model, {"logit_rows": 7, "device": kind}) for model in (HEADS_OF_64, LLAMA_64) for kind in ("cpu", *CUDA)),
], ids=name_of)  # fmt: skip
def test_sums_in_another_order_are_the_same_but_for_rounding(model, change, precision, allowed):
    """Without --bitwise, ranks add up gradients; chunks of the logits add up the classifier's. A sum that is rounded
    otherwise may round a bf16 parameter the other way, by 2^-8 of itself."""
    batches = {"batches_a_rank": 3 // change.get("ranks", 1)}
    way = settled(DEFAULT | {"model": model, "precision": precision} | batches | change)
    found, whole = outcome(way), {"ranks": 1, "peers": False, "batches_a_rank": 3, "logit_rows": 0}
    want = plain_outcome(tuple(plain(way | whole).items()))
    moved = want["parameters"] - first_parameters(model)
    assert same(*found)
    assert np.linalg.norm(found[0]["parameters"] - want["parameters"]) < allowed * np.linalg.norm(moved)
    for name in want:
        if name.startswith(("loss", "validation")):
            np.testing.assert_allclose(found[0][name], want[name], allowed)


@pytest.mark.parametrize("one, other", [("fp32", "bf16"), ("bf16", "fp8"), ("fp8", "fp16"), ("fp16", "fp32")])
def test_a_run_in_another_precision_keeps_the_fp32_numbers_of_a_checkpoint(one, other, tmp_path):
    way = DEFAULT | {"ranks": 2, "sharded": True}
    on_ranks(way | {"precision": one}, slice(2), 2, directory=tmp_path)
    checkpoint, again = (folder / "step_00000002" for folder in (tmp_path, tmp_path / "again"))
    on_ranks(way | {"precision": other}, slice(0), 2, checkpoint=checkpoint, directory=tmp_path / "again")
    for file in "model.bin", "optimizer.bin":
        assert (again / file).read_bytes() == (checkpoint / file).read_bytes()


# Runs of the program


SMALL = ["-e", "layers=2,heads=2,channels=32,maxT=64", "-i", "data", "-b", "2", "-t", "16", "-d", "64", "-n", "2",
         "-x", "4", "-v", "2", "-s", "2", "-g", "4", "--device", "cpu", "--checkpoint-dir", "run"]  # fmt: skip


@pytest.mark.parametrize("flags, other, says, changes", [
    ("--recompute", "--recompute 0", "recomputed, but for each layer's input", "--recompute was True and is now False"),
    ("--offload", "--offload 0", "MiB of the host's memory", "--offload was True and is now False"),
    ("--logit-rows 7", "--logit-rows 0", "of 7 positions at a time", "--logit-rows was 7 and is now 0"),
])  # fmt: skip
def test_a_run_says_how_it_runs_and_goes_on_so_or_otherwise(flags, other, says, changes, tmp_path, trainer_here):
    folder = make_folder(tmp_path / "data")
    plain, _ = trainer_here(GPT2, folder, SMALL)
    shutil.move(folder / "run", folder / "plain")
    out, _ = trainer_here(GPT2, folder, [*SMALL, *flags.split()])
    want, losses, other_bits = checkpoint_bytes(folder, 4), steps_of(out), "rows" in flags
    assert says in out and says not in plain and (losses, samples_of(out)) == (steps_of(plain), samples_of(plain))
    assert other_bits or want == [(folder / "plain" / "step_00000004" / name).read_bytes() for name in FILES]
    for more in [], other.split():
        shutil.rmtree(folder / "run" / "step_00000004")
        out, _ = trainer_here(GPT2, folder, [*SMALL, "-y", "1", *more])
        assert (changes in out, says in out) == (bool(more), not more)
        assert steps_of(out) == {step: losses[step] for step in (3, 4)}
        assert more and other_bits or checkpoint_bytes(folder, 4) == want


# The same run twice


WIDE = {  # so that products are shared out among threads, and a norm's rows among blocks; heads of 64
    f"{name}-{attention}": (kind.Config.described(small_model(kind.Config), 317), attention)
    for name, (kind, _) in TINY.items() for attention in ("softmax", "flash")
}  # fmt: skip


def digest(name: str) -> str:
    """Of all that three steps of a wide model lead to, on the device in use."""
    config, attention = WIDE[name]
    batches = np.random.default_rng(7).integers(0, config.vocab_size, (3, 1, 2, 2, 21), dtype=np.int32)
    found = train(config, batches, 1.0, attention, device.precision, looks=True)
    return hashlib.sha256(b"".join(values.tobytes() for values in found.values())).hexdigest()


@pytest.mark.parametrize("name", [each if each == "gpt2-flash" else pytest.param(each, marks=pytest.mark.long)
                                  for each in WIDE])  # fmt: skip
def test_two_runs_have_the_same_bits(model_dev, name):
    assert digest(name) == digest(name)


def digests() -> list[str]:
    device.use("cpu")
    return [digest(name) for name in ("gpt2-flash", "llama3-softmax")]


def test_a_run_on_the_cpu_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("LLMC_CPU_WARP", "1")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    env |= dict.fromkeys(("LLMC_CPU_THREADS", "OPENBLAS_NUM_THREADS"), "5")  # here: as many as cores, and 1
    command = "import test_equivalence; print(test_equivalence.digests())"
    out = subprocess.run([sys.executable, "-c", command], env=env, check=True, capture_output=True, text=True).stdout
    assert out == f"{digests()}\n"
