"""The generator against worked values."""

from llmc.step.sampler import Sampler, samplers_of

import numpy as np


def assert_uniform(coins, bins: int) -> None:
    """That each bin has its share, within five standard deviations of the binomial distribution."""
    counts, _ = np.histogram(coins, bins, (0, 1))
    share = 1 / bins
    assert abs(counts - len(coins) * share).max() < 5 * (len(coins) * share * (1 - share)) ** 0.5


def test_the_first_numbers_from_llm_cs_seed():
    """Worked out by a C program, whose 64-bit integers wrap by themselves."""
    sampler = Sampler(1337)
    drawn = [sampler.random_u32() for _ in range(5)]
    assert drawn == [989205090, 818269915, 1335155955, 3876892996, 2941700015]
    assert sampler.state == 12737515200271808181


def test_coins_are_exact_in_fp32_and_below_one():
    sampler, same = Sampler(1337), Sampler(1337)
    coins = [sampler.random_f32() for _ in range(20000)]
    assert coins == [(same.random_u32() >> 8) / 16777216 for _ in coins] == np.float32(coins).tolist()
    assert 0 <= min(coins) and max(coins) < 1
    assert_uniform(coins, 20)


def test_every_sample_has_a_generator_of_its_own_and_the_first_that_of_the_seed():
    for seed in 0, 1337:
        samplers = samplers_of(seed, 100)
        assert samplers[0].state == Sampler(seed).state
        assert len({sampler.random_f32() for sampler in samplers}) == 100
        assert len({samplers[0].random_f32() for _ in range(100)}) == 100
    assert_uniform([samplers_of(seed, 2)[1].random_f32() for seed in range(2000)], 10)
