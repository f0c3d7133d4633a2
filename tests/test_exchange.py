"""What ranks exchange: sums in the order of the ranks, checksums, which gradients are sent and when."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_beside import Watch
from test_model import MODELS, name_of

from kernels.adamw import adamw_update
from kernels.exchange import LATE, add_in_order, checksum, overlaps, ranges_of, without
from llmc import collectives, device, ranks
from llmc.model import shards_of
from models import ODD, kind_of
from oracle import guarded, normal
from train_gpt2_fp32 import GPT2

SPECIAL = np.array([0x7FFFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32).view(np.float32)


@given(n=st.integers(1, 3000), N=st.integers(1, 5), own=st.integers(0, 4))
@example(n=8, N=1, own=0)
@example(n=1025, N=4, own=3)
def test_add_in_order_adds_one_rank_after_another(dev, n, N, own):
    """The same bits as these additions in NumPy; this rank's row of parts is poison."""
    rank, rng = own % N, np.random.default_rng([n, N])
    given_parts, before = normal(rng, N, n), normal(rng, n)
    expected = before.copy()
    for part in given_parts:
        expected += part
    poisoned = given_parts.copy()
    poisoned[rank] = np.nan
    with guarded(dev) as memory:
        sums = memory.update(before)
        add_in_order(sums, memory.read(given_parts[rank]), memory.read(poisoned) if N > 1 else None, rank, N, n)
    assert np.array_equal(dev.to_host(sums), expected)


def test_sums_in_order_hand_on_what_is_not_finite(dev):
    parts = np.ones((3, 16), np.float32)
    parts[1, :5] = SPECIAL
    sums = dev.zeros((16,))
    add_in_order(sums, dev.asarray(parts[0]), dev.asarray(parts), 0, 3, 16)
    found = dev.to_host(sums)
    assert np.isnan(found[:3]).all() and (found[3], found[4]) == (np.inf, -np.inf) and (found[5:] == 3).all()


def checksum_of(dev, values: np.ndarray) -> str:
    return checksum(SimpleNamespace(params_memory=dev.asarray(values)))


def test_a_checksum_is_splitmix64_of_each_word_and_its_place(dev, rng):
    values = rng.standard_normal(70_001, dtype=np.float32)
    z = values.view(np.uint32) + np.arange(values.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    assert checksum_of(dev, values) == f"{int((z ^ (z >> np.uint64(31))).sum()):016x}"


@given(n=st.integers(1, 200_000), seed=st.integers(0, 1000))
def test_a_checksum_tells_a_changed_bit_and_exchanged_numbers(dev, n, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n, dtype=np.float32)
    changed, place, other = values.copy(), *rng.integers(0, n, 2)
    changed.view(np.uint32)[place] ^= np.uint32(1 << rng.integers(32))
    assert checksum_of(dev, values) != checksum_of(dev, changed)
    changed = values.copy()
    changed[[place, other]] = values[[other, place]]
    assert (checksum_of(dev, values) == checksum_of(dev, changed)) == (values[place] == values[other])


RANGES = st.lists(st.integers(0, 40), max_size=8).map(lambda at: list(zip(*[iter(sorted(set(at)))] * 2, strict=False)))


@given(ranges=RANGES, others=RANGES)
def test_ranges_are_sets_of_numbers(ranges, others):
    def members(found) -> set[int]:
        numbers = [number for start, end in found for number in range(start, end)]
        assert len(numbers) == len(set(numbers)) and all(start < end for start, end in found)
        return set(numbers)

    assert members(overlaps(ranges, others)) == members(ranges) & members(others)
    assert members(without(ranges, others)) == members(ranges) - members(others)


@given(n=st.integers(1, 200), N=st.integers(1, 9))
def test_shards_are_all_of_the_parameters_in_pieces_of_whole_vectors(n, N):
    """Any number of parameters and of ranks, also fewer of the first than of the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "size", lambda: N)
        shards = shards_of(n)
    assert len(shards) == N and shards[0][0] == 0 and shards[-1][1] == n
    assert all(a[1] == b[0] and a[1] % 4 == 0 or a[1] == b[0] == n for a, b in pairwise(shards))


@pytest.mark.parametrize("sharded, grad_clip", [(False, 0.0), (True, 0.0), (True, 1.0)])
@pytest.mark.parametrize("config, attention", MODELS, ids=name_of)
def test_every_gradient_is_sent_once_and_then_left_alone(config, attention, sharded, grad_clip, monkeypatch):
    """Of all that backward and AdamW do, for three ranks of which this is the second. AdamW reads a gradient once its
    sum has been waited for."""
    device.use("cpu")
    watch, sent, conflicts = Watch(), [], []
    monkeypatch.setattr(ranks, "size", lambda: 3)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    model = kind_of(config)(replace(config, num_layers=4), 1, 16, attention, sharded=sharded)
    base = model.grads_memory.__array_interface__["data"][0]

    def note(arrays):
        for array in arrays:
            start = (array.__array_interface__["data"][0] - base) // 4
            if 0 <= start < model.grads_memory.size:
                sent.append((start, start + array.size))

    def observe(name, arguments, work):
        watch(name, arguments, work)
        for value in arguments.values():
            start = (value.__array_interface__["data"][0] - base) // 4 if isinstance(value, np.ndarray) else -1
            if 0 <= start < model.grads_memory.size and overlaps([(start, start + value.size)], sent[len(waited) :]):
                conflicts.append(name)
            if 0 <= start < model.grads_memory.size and name in ("adamw_kernel", "squares_partials_kernel"):
                read = [(start, start + (value.size if name == "adamw_kernel" else arguments["n"]))]
                conflicts.extend((name, one) for one in without(read, waited))

    waited = []
    monkeypatch.setattr(device, "join_communication", lambda: waited.extend(sent[len(waited) :]))
    monkeypatch.setattr(collectives, "all_reduce", note)
    monkeypatch.setattr(collectives, "reduce", lambda pieces: note([array for array, _ in pieces]))
    with device.observe(observe):
        model.backward(1, 16)
        assert not conflicts and not watch.open
        early = sum(end - start for start, end in sent)
        adamw_update(model, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, grad_clip)
        assert not conflicts
    whole = [(0, model.grads_memory.size)]
    assert sum(end - start for start, end in sent) == sum(end - start for start, end in overlaps(whole, sent))
    assert sorted(sent)[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(sorted(sent)))
    assert sorted(sent)[-1][1] == model.grads_memory.size
    assert early == model.grads_memory.size - sum(end - start for start, end in ranges_of(model, *LATE))


def test_a_batch_that_is_not_the_last_sends_nothing(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(collectives, "all_reduce", lambda arrays: arrays and pytest.fail("sent"))
    model = GPT2(ODD, 1, 16)
    with device.observe(lambda name, arguments, work: None):
        model.backward(1, 16, accumulate=False, last=False)


@pytest.mark.parametrize("N", [2, 3, 8])
def test_sharded_moments_take_a_rank_less_memory(N, monkeypatch):
    """8 / N bytes a parameter, to a vector of four floats."""
    device.use("cpu")
    whole = GPT2.lengths(ODD, 1, 16, "softmax")
    monkeypatch.setattr(ranks, "size", lambda: N)
    shared = GPT2.lengths(ODD, 1, 16, "softmax", sharded=True)
    n = whole["parameters"]
    assert {name for name in whole if whole[name] != shared[name]} == {"AdamW m", "AdamW v"}
    assert n / N <= shared["AdamW m"] == shared["AdamW v"] < n / N + 4
