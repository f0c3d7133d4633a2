"""exchange.cu: sums in the order of the ranks, rows of a table, checksums. llmc/ranks/: barriers, and how flat buffers
are shared out."""

from itertools import pairwise

import device
from kernels.encoder import sort_by_token
from kernels.exchange import addresses, checksum, cu, gather_rows, sum_buffers
from llmc.model.ranges import rounds, share_length, share_of
from llmc.model.tensors import num_parameters
from llmc.ranks import ranks
from llmc.ranks.peer_transport import barrier
from llmc.ranks.shards import shards_of
from llmc.step.memory import Plan, training_sizes
from models import ODD
from oracle import guarded, normal
from train_gpt2_fp32 import GPT2

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

RANGES = st.lists(st.integers(0, 40), max_size=8).map(lambda at: list(zip(*[iter(sorted(set(at)))] * 2, strict=False)))


@given(N=st.integers(1, 9), shares=st.integers(1, 5), scale=st.sampled_from([1, 4, 57]), ranges=RANGES,
       seed=st.integers(0, 99))  # fmt: skip
@example(N=4, shares=4, scale=4, ranges=[(0, 3), (5, 40)], seed=1)
@example(N=3, shares=2, scale=57, ranges=[(1, 40)], seed=2)
def test_sum_buffers_adds_one_buffer_after_another(dev, N, shares, scale, ranges, seed):
    """The same bits as these additions in NumPy, in some ranges of every second buffer and of one that is no summand;
    the shares of a sum need not come in order, as on ranks. What is outside of the ranges stays."""
    ranges = [(scale * start, scale * end) for start, end in ranges]
    rng, n = np.random.default_rng(seed), 40 * scale
    before = normal(rng, N, n)
    before[rng.random((N, n)) < 0.1] = -0.0
    total, expected = before[0].copy(), before.copy()
    for values in before[1:]:
        total += values
    with guarded(dev) as memory:
        buffers, out = [memory.update(values) for values in before], memory.update(np.full(n, 7e30, np.float32))
        if ranges:
            for share in rng.permutation(shares):
                sum_buffers(addresses(*buffers[::2], out), addresses(*buffers), ranges, 3, int(share), shares)
    changed = np.zeros(n, bool)
    for start, end in ranges:
        changed[start:end] = True
    expected[::2, changed] = total[changed]
    buffers.append(out)
    expected = [*expected, np.where(changed, total, np.float32(7e30))]
    assert all(dev.to_host(x).tobytes() == values.tobytes() for x, values in zip(buffers, expected, strict=True))


@given(N=st.integers(1, 6), own=st.integers(0, 5), scale=st.sampled_from([1, 4, 57]), ranges=RANGES.filter(len),
       seed=st.integers(0, 99))  # fmt: skip
def test_sum_buffers_finds_ranges_elsewhere_in_the_others_buffers(dev, N, own, scale, ranges, seed):
    """One after another, each from a multiple of 4 on; the own buffer, which gets the sums, is flat."""
    own, ranges = own % N, [(scale * start, scale * end) for start, end in ranges]
    rng, lengths = np.random.default_rng(seed), [4 * -(-(end - start) // 4) for start, end in ranges]
    places = [sum(lengths[:i]) for i in range(len(lengths))]
    flat, slots = normal(rng, 40 * scale), normal(rng, N, sum(lengths))
    expected = flat.copy()
    for (start, end), place in zip(ranges, places, strict=True):
        parts = [flat[start:end] if r == own else slots[r, place : place + end - start] for r in range(N)]
        expected[start:end] = parts[0]
        for part in parts[1:]:
            expected[start:end] += part
    with guarded(dev) as memory:
        out = memory.update(flat)
        sources = addresses(*(out if r == own else memory.read(slots[r]) for r in range(N)))
        sum_buffers(addresses(out), sources, ranges, 3, own=own, places=places)
    assert dev.to_host(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("start, rest, place, aligned", [
    (4, 0, 0, 1), (4, 0, 8, 1), (4, 0, 6, 0), (6, 0, 8, 0), (4, -1, 8, 0),
])  # fmt: skip
def test_a_sum_loads_vectors_only_if_all_that_it_reads_is_aligned(start, rest, place, aligned):
    """The ranges, and their places in other buffers: on a GPU a load of 16 bytes from another address fails."""
    device.use("cpu")
    n, seen = 2 * cu.width + rest, []
    flat, room = np.arange(n + 8, dtype=np.float32), np.arange(n + 8, dtype=np.float32)
    with device.observe(lambda name, arguments, work: (seen.append(arguments["aligned"]), work())):
        sum_buffers(addresses(flat), addresses(flat, room), [(start, start + n)], 1, places=[place])
    assert seen == [aligned]
    assert np.array_equal(flat[start : start + n], np.arange(start, start + n) + np.arange(place, place + n))


@given(N=st.integers(1, 40), V=st.integers(1, 30), C=st.integers(1, 90), ranks_=st.integers(1, 5),
       start=st.integers(0, 9), seed=st.integers(0, 99))  # fmt: skip
@example(N=2, V=1, C=90, ranks_=5, start=0, seed=0)
def test_rows_that_a_batch_takes_come_from_the_ranks_that_have_them(dev, N, V, C, ranks_, start, seed):
    """All of them to the bit, and no other float changes, on this rank or another. A row may be several ranks'."""
    rng, n = np.random.default_rng(seed), start + V * C + 3
    length, rank = 4 * -(-n // (4 * ranks_)), int(rng.integers(ranks_))
    flat, inp = normal(rng, ranks_, n), rng.integers(0, V, N, dtype=np.int32)
    order, count = sort_by_token(inp)
    places = np.unique(start + C * inp[:, None] + np.arange(C))
    expected = flat.copy()
    expected[rank, places] = flat[places // length, places]
    with guarded(dev) as memory:
        buffers = [memory.update(one) if r == rank else memory.read(one) for r, one in enumerate(flat)]
        inp, order, count = map(memory.read, (inp, order, count))
        gather_rows(addresses(*buffers), rank, length, start, inp, order, count, N, C)
    assert all(dev.to_host(x).tobytes() == values.tobytes() for x, values in zip(buffers, expected, strict=True))


def what_goes_wrong(N: int, times: int, left_out: int | None = None) -> set[str]:
    """What can happen where N ranks meet at a barrier so many times each, in every order in which their operations can
    be done. Rank 0 leaves out the operation of this number each time."""
    device.use("cpu")
    words, programs = np.zeros((N, N), np.uint32), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.current.device, "memory_operations", programs.append)
        for rank in range(N):
            barrier(list(words), rank)
    length, first = len(programs[0]), device.address(words)
    programs = [[(what, (device.address(word) - first) // 4, value) for what, word, value in one] for one in programs]
    if left_out is not None:
        programs[0][left_out] = "write", 0, 0  # of a word that is always 0
    start, end = (((done,) * N, (0,) * N * N) for done in (0, times * length))
    found, ahead, wrong = {start}, [start], set()
    while ahead:
        done, values = state = ahead.pop()
        following = []
        for r, program in enumerate(programs):
            what, at, value = program[done[r] % length]
            if done[r] < times * length and (what == "write" or values[at] == value):
                after = list(done), list(values)
                after[0][r], after[1][at] = done[r] + 1, value
                following.append(tuple(map(tuple, after)))
        if not following and state != end:
            wrong.add("not all ranks come to the end, with words that are 0")
        if max(done) // length > -(-min(done) // length):
            wrong.add("a rank is through before all have come")
        ahead += set(following) - found
        found.update(following)
    return wrong


@pytest.mark.parametrize("N, times", [(2, 4), (3, 3), (4, 2)])
def test_a_barrier_lets_nobody_through_before_all_have_come(N, times):
    assert what_goes_wrong(N, times) == set()
    assert all(what_goes_wrong(N, times, left_out) for left_out in range(3 * (N - 1)) if N < 4)


def test_operations_on_words_are_done_in_their_order(dev):
    words = [dev.asarray(np.array([7, before], np.uint32))[1:] for before in (0, 5)]
    dev.memory_operations([("write", words[0], 2**32 - 1), ("wait", words[0], 2**32 - 1), ("wait", words[1], 5),
                           ("write", words[1], 6), ("wait", words[1], 6), ("write", words[0], 3)])  # fmt: skip
    assert [dev.to_host(word).tolist() for word in words] == [[3], [6]]


@given(ranges=RANGES, slot=st.sampled_from([4, 8, 40]), N=st.integers(1, 5), scale=st.sampled_from([1, 4, 13]))
def test_rounds_are_all_of_the_ranges_and_a_share_of_one_fits_its_slot(ranges, slot, N, scale):
    ranges = [(scale * start, scale * end) for start, end in ranges]
    found = list(rounds(ranges, slot, N))
    members = [i for one in found for start, end in one for i in range(start, end)]
    assert members == [i for start, end in ranges for i in range(start, end)]
    assert all(0 < sum(share_length(one, N) for one in ranges) <= slot for ranges in found)
    for ranges in found:
        for one in ranges:
            shares = [share_of(one, r, N) for r in range(N)]
            assert shares[0][0] == one[0] and shares[-1][1] == one[1]
            assert all(a[1] == b[0] for a, b in pairwise(shares))
            assert all(end - start <= share_length(one, N) for start, end in shares)


@given(n=st.integers(1, 200_000))
@example(n=70_001)
def test_a_checksum_is_splitmix64_of_each_word_and_its_place(dev, n, rng):
    values = rng.standard_normal(n, dtype=np.float32)
    z = values.view(np.uint32) + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    assert checksum(dev.asarray(values)) == f"{int((z ^ (z >> np.uint64(31))).sum()):016x}"


@pytest.mark.parametrize("precision, width", [("fp32", 4), ("bf16", 8)])
@given(n=st.integers(1, 200), N=st.integers(1, 9))
def test_shards_are_all_of_the_parameters_in_pieces_of_whole_vectors(precision, width, n, N):
    """Any number of parameters and of ranks, also fewer of the first than of the second."""
    device.use("cpu")
    device.use_precision(precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "size", lambda: N)
        shards = shards_of(n)
    assert len(shards) == N and shards[0][0] == 0 and shards[-1][1] == n
    assert all(a[1] == b[0] and a[1] % width == 0 or a[1] == b[0] == n for a, b in pairwise(shards))


@pytest.mark.parametrize("precision, width", [("fp32", 4), ("bf16", 8)])
@pytest.mark.parametrize("N", [2, 3, 8])
def test_sharded_moments_take_a_rank_less_memory(N, precision, width, monkeypatch):
    """8 / N bytes per parameter, in bf16 10 / N, to a vector of 16 bytes of parameters."""
    device.use("cpu")
    device.use_precision(precision)
    monkeypatch.setattr(ranks, "size", lambda: N)
    n, sizes = num_parameters(ODD), {"AdamW m": 4, "AdamW v": 4, "master copy, low half": 2}
    whole, shared = (training_sizes(GPT2, ODD, Plan(1, 16, "softmax", shard=one)) for one in (None, shards_of(n)[0]))
    changed = {name for name in whole if whole[name] != shared[name]}
    assert changed == {name for name in sizes if width == 8 or name.startswith("AdamW")}
    assert all(n / N <= shared[name] / sizes[name] < n / N + width for name in changed)
