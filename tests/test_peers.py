"""What several ranks do together, in one process: the exchange of a recorded step, with peer access and without.

Ranks are threads on devices that do nothing before they must (lazy.py). tests/test_ranks.py has processes and GPUs.
"""

import ast
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import device
from device.errors import UserError
from llmc.model.ranges import parameter_ranges
from llmc.model.tensors import num_parameters
from llmc.model.weights import randomize
from llmc.ranks import collectives, exchange, plan, ranks
from llmc.step.training import make_training
from llmc.step.update import adamw_update
from models import EVEN, MODELS, ODD, kind_of
from support.runs import resume, same, save, train

import numpy as np
import pytest
from lazy import LazyDevice, Threads

T = 8
ROOT = Path(__file__).resolve().parents[1]


def test_a_step_of_gpt2_has_the_plan_that_the_book_shows(monkeypatch, rng):
    """That of doc/exchange.md, of GPT-2 124M, here with 32 times fewer channels."""
    page = {}
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "doc" / "exchange.md").read_text(), re.M | re.S):
        exec(block, page)
    config = replace(ODD, num_layers=12, num_heads=2, channels=24)
    monkeypatch.setattr(plan, "MIN_BUCKET", (1 << 22) // 32**2)
    plans = []
    monkeypatch.setattr(exchange, "StepPlan", lambda kind=exchange.StepPlan: plans.append(kind()) or plans[-1])
    batches = rng.integers(0, config.vocab_size, (2, 2, 2, 1, T), dtype=np.int32)
    Threads(2, monkeypatch).run(lambda rank: train(config, batches, sharded=True), LazyDevice)

    layers = [(name, range(config.num_layers) if of[0] == "L" else [0]) for name, of in config.parameters()]
    names = [(name, layer) for name, of in layers for layer in of]
    found = dict(zip(parameter_ranges(config), names, strict=True))
    embedding, *buckets = plans[0].sum_buckets
    assert [found[one] for one in embedding.ranges] == [("wte", 0)]
    assert [[found[one] for one in bucket.ranges] for bucket in buckets] == page["buckets"]
    assert [found[one] for one in plans[0].tail_grads if one in found][: len(page["tail"])] == page["tail"]
    first = [found[one] for one in plans[0].first_params if one in found]
    assert first[:3] == [("qkvw", 0), ("attprojw", 0), ("fcw", 0)]
    gathered = [[found[one] for one in bucket.ranges] for bucket in plans[0].gather_buckets]
    assert gathered[:2] == [[("fcprojw", 0), ("qkvw", 1), ("attprojw", 1)], [("fcw", 1), ("fcprojw", 1)]]
    assert gathered[-1] == [("wte", 0)]


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("peers", [False, True])
def test_the_memory_of_an_exchange_is_counted(peers, bitwise, monkeypatch):
    """All but the barrier's words, four bytes per rank."""
    N, B = 3, 2

    def of_rank(rank: int) -> int:
        training = make_training(kind_of(ODD), ODD, B, T, "softmax", sharded=True, bitwise=bitwise)
        own, allocated = device.current.device, []
        empty = own.empty
        own.empty = lambda *of: allocated.append(empty(*of)) or allocated[-1]
        exchange.Exchange(training.model, training.adamw, training.batch, True, bitwise)
        counted = exchange.exchange_bytes(ODD, B, T, bitwise)
        return sum(array.nbytes for array in allocated) - sum(counted.values())

    assert Threads(N, monkeypatch, peers).run(of_rank) == [4 * N * peers] * N


def test_what_is_shared_out_is_saved_and_loaded_without_a_whole_copy_on_any_rank(tmp_path, monkeypatch):
    """To save, all ranks together, which are threads here, take the memory of a few pieces; to save or load, none makes
    room for more than a piece."""
    config, sizes, empty = replace(EVEN, num_layers=4), [], device.CpuDevice.empty
    monkeypatch.setattr(device, "STAGED", 500)

    def counted(self, shape, *dtype):
        sizes.append(np.prod(shape))
        return empty(self, shape, *dtype)

    def of_rank(rank: int) -> int:
        device.use_precision("bf16")
        training = make_training(kind_of(config), config, 1, T, "softmax", sharded=True)
        randomize(training.model, training.adamw, 42)
        ranks.all_gather(None)
        monkeypatch.setattr(device.CpuDevice, "empty", counted)
        save(training, tmp_path, 1)  # what is made once, such as a module, has been made
        ranks.all_gather(None)
        tracemalloc.start()
        save(training, tmp_path, 2)
        peak = ranks.all_gather(tracemalloc.get_traced_memory()[1])[rank]
        resume(training, tmp_path / "step_00000001")
        return peak

    peak = max(Threads(3, monkeypatch, peers=False).run(of_rank))
    tracemalloc.stop()
    n = num_parameters(config)
    assert (tmp_path / "step_00000002" / "optimizer.bin").stat().st_size > 8 * n
    assert max(sizes) == 500 and 0 < peak < 4 * n / 8, (max(sizes), peak)


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_step_gathers_parameters_once(bitwise, monkeypatch, rng):
    """However many batches it has: they change at its end."""
    gathered, threads = [], Threads(2, monkeypatch, peers=False)

    def broadcast(pieces: list) -> None:
        threads.broadcast(pieces)
        threads.together(lambda: gathered.append(sum(x.size for x, _ in pieces)))

    def floats_of(batches: int) -> int:
        gathered.clear()
        of_steps = rng.integers(0, ODD.vocab_size, (4, 2 * batches, 2, 1, T), dtype=np.int32)
        threads.run(lambda rank: train(ODD, of_steps, sharded=True, bitwise=bitwise), LazyDevice)
        return sum(gathered)

    monkeypatch.setattr(collectives, "broadcast", broadcast)
    monkeypatch.setattr(plan, "MIN_BUCKET", 500)
    assert floats_of(1) == floats_of(3) > 0


# What a script shares with others by name: the output of its last norm, the tensors of attention and of the loss; and
# modules of kernels and places of dropout that are called as a tensor is.
SHARED = {"head", "dln", "ln", "logits", "losses", "qkv", "gelu", "swiglu"}


def test_nothing_outside_a_script_knows_a_tensor_by_its_name():
    """Neither as an attribute nor as a text."""
    tables = [(*kind.Config.PARAMETERS, *kind.ACTIVATIONS, *kind.GRADIENTS) for kind in MODELS]
    names = {row[0] for table in tables for row in table} - SHARED
    for path in (path for folder in ("model", "ranks", "step") for path in (ROOT / "llmc" / folder).glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        said = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        said |= {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert not said & names, path


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("spoilt, precision", [(4, "fp32"), (5, "bf16")])
@pytest.mark.parametrize("N, flags", [
    (1, {"offload": True}), (2, {}), (2, {"sharded": True}), (2, {"sharded": True, "offload": True}),
], ids=str)  # fmt: skip
def test_a_step_that_is_not_finite_changes_nothing(N, flags, precision, spoilt, skips, monkeypatch, rng):
    """In whichever batch of the third step, on any rank: one that had not seen it would update its shard. Nor do the
    steps after it, unless they are to go on."""
    batches, threads = rng.integers(0, ODD.vocab_size, (4, 2, 2, 2, T), dtype=np.int32), Threads(N, monkeypatch)

    def trained(batches, **flags) -> list:
        return threads.run(lambda rank: train(ODD, batches, precision=precision, skip_nonfinite=skips, **flags))

    found, before = trained(batches, spoilt=spoilt, **flags), trained(batches[:2])
    assert same(*found, *trained(batches, spoilt=spoilt)) and same(found[0], *before) == (not skips)


@pytest.mark.parametrize("peers", [True, False])
def test_a_gradient_that_overflows_on_one_rank_is_known_to_all(peers, monkeypatch):
    """With -z only the owner of a parameter sees that AdamW leaves it out; the next step must hold back on all."""
    device.use("cpu")

    def flags_of(rank: int) -> tuple[float, float]:
        training = make_training(kind_of(ODD), ODD, 2, T, "softmax", sharded=True)
        model, adamw, transport = training.model, training.adamw, training.exchange.transport
        randomize(model, adamw, 42)
        model.grads_memory[:] = 0
        model.grads.layer[ODD.num_layers - 1].fcw[0, 0] = 1e30
        adamw_update(model, adamw, training.exchange, 1e-2, 1)
        own = float(adamw.grad_norm[3])
        for work in transport.wait_for_ranks, transport.share_overflow, transport.wait_for_ranks:
            work()
        return own, float(adamw.grad_norm[3])

    own, of_all = zip(*Threads(3, monkeypatch, peers).run(flags_of), strict=True)
    assert sorted(own) == [0, 0, 1] and of_all == (1, 1, 1)


class Driver(Threads):
    """Ranks with peer access, on the CPU device; rank 1's fail at something."""

    def __init__(self, N: int, monkeypatch, fails: str = "", hosts: tuple[str, ...] = ("here",)):
        super().__init__(N, monkeypatch)
        self.fails = fails
        # One that fails at being "here" knows by itself that it reaches no other.
        monkeypatch.setattr(ranks, "hosts", lambda: [*hosts, *["there"] * self.fails_at("here")])
        for name in ("memory_handle", "open_memory"):
            monkeypatch.setattr(device.CpuDevice, name, staticmethod(getattr(self, name)))

    def fails_at(self, what: str) -> bool:
        return what == self.fails and self.own.rank == 1

    def memory_handle(self, array):
        if self.fails_at("shares"):
            raise RuntimeError("cudaErrorNotSupported: not here")
        return array, 0

    def open_memory(self, handle, like):
        if self.fails_at("opens"):
            raise RuntimeError("cudaErrorNotSupported: not here")
        return np.empty_like(like) if self.fails_at("reaches") else handle[0]


@pytest.mark.parametrize("why, disabled", [
    ({}, "0"), ({}, "1"), ({"hosts": ("here", "there")}, "0"),
    *(({"fails": what}, "0") for what in ("here", "shares", "opens", "reaches")),
], ids=str)  # fmt: skip
def test_ranks_have_peer_access_where_all_of_them_can_share_their_memory(why, disabled, monkeypatch):
    device.use("cpu")
    monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    driver = Driver(3, monkeypatch, **why)
    assert driver.run(lambda rank: collectives.reach_one_another()) == [not why and disabled == "0"] * 3


@pytest.mark.parametrize("fails", ["shares", "opens"])
def test_memory_that_cannot_be_shared_after_all_is_one_line(fails, monkeypatch):
    device.use("cpu")
    map_memory, driver = collectives.map_memory, Driver(2, monkeypatch, fails)
    with pytest.raises(UserError, match=r"^GPUs cannot share their memory \(.*not here\): set NCCL_P2P_DISABLE=1 .*$"):
        driver.run(lambda rank: map_memory(params=device.zeros((4,)), absent=None))
