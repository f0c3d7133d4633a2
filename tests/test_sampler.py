"""The generator against worked values."""

from llmc.step.sampler import Sampler, samplers_of

import numpy as np


def test_the_first_numbers_from_llm_cs_seed():
    """Worked out by a C program, whose 64-bit integers wrap by themselves."""
    sampler = Sampler(1337)
    drawn = [sampler.random_u32() for _ in range(5)]
    assert drawn == [989205090, 818269915, 1335155955, 3876892996, 2941700015]
    assert sampler.state == 12737515200271808181


def test_coins_are_exact_in_fp32_and_below_one():
    sampler, same = Sampler(1337), Sampler(1337)
    coins = []
    for _ in range(20000):
        number, coin = same.random_u32(), sampler.random_f32()
        assert coin == (number >> 8) / 16777216 == float(np.float32(coin))
        coins.append(coin)
    assert 0 <= min(coins) and max(coins) < 1
    # The mean of n uniform numbers has a standard deviation of sqrt(1 / 12 n) = 0.002; five of them.
    assert abs(np.mean(coins) - 0.5) < 0.01
    counts, _ = np.histogram(coins, 20, (0, 1))
    assert counts.min() > 1000 - 5 * 31 and counts.max() < 1000 + 5 * 31  # binomial: sqrt(20000 / 20 * 19 / 20) = 31


def test_seed_zero_gives_coins_too():
    sampler = Sampler(0)
    assert len({sampler.random_f32() for _ in range(100)}) == 100


def test_the_first_sample_has_the_generator_of_the_seed_and_the_others_their_own():
    samplers = samplers_of(1337, 100)
    assert samplers[0].state == Sampler(1337).state
    assert len({sampler.random_f32() for sampler in samplers}) == 100
    coins = [samplers_of(seed, 2)[1].random_f32() for seed in range(2000)]
    counts, _ = np.histogram(coins, 10, (0, 1))
    assert abs(counts - 200).max() < 5 * 200**0.5
