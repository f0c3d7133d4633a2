"""exchange.cu: sums in the order of the ranks, and checksums; and how flat buffers are shared out among ranks."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.exchange import add_in_order, checksum, overlaps, without
from llmc import device, ranks
from llmc.model import shards_of
from models import ODD
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
