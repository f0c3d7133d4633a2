"""The generator against worked values, and sampling against the probabilities that softmax gives."""

import generate
from llmc.sampler import Sampler, sample, sample_softmax

import numpy as np
import pytest


def test_the_first_numbers_from_llm_cs_seed():
    """Worked out by a C program, whose 64-bit integers wrap by themselves."""
    sampler = Sampler(1337)
    drawn = [sampler.random_u32() for _ in range(5)]
    assert drawn == [989205090, 818269915, 1335155955, 3876892996, 2941700015]
    assert sampler.state == 12737515200271808181


def test_the_state_never_leaves_64_bits():
    sampler = Sampler(2**64 - 1)
    for _ in range(1000):
        assert 0 <= sampler.random_u32() < 2**32 and 0 < sampler.state < 2**64


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


def test_a_sampler_carries_on_from_its_state():
    sampler = Sampler(1337)
    first = [sampler.random_f32() for _ in range(3)]
    other = Sampler(1)
    other.state = sampler.state
    assert other.random_f32() == sampler.random_f32() not in first
    assert first[0] == Sampler(1337).random_f32()


def test_seed_zero_gives_coins_too():
    sampler = Sampler(0)
    assert len({sampler.random_f32() for _ in range(100)}) == 100


def test_the_first_token_whose_cumulative_probability_exceeds_the_coin_is_drawn():
    logits = np.log(np.array([0.1, 0.2, 0.0001, 0.3, 0.3999], np.float32)) + 3
    edges = [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.30005, 2), (0.3002, 3), (0.6, 3), (0.6002, 4)]
    for coin, token in [*edges, (1 - 2**-24, 4)]:
        assert sample_softmax(logits, coin) == token


def test_an_impossible_token_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    assert [sample_softmax(logits, coin) for coin in (0.0, 0.4999, 0.5, 1 - 2**-24)] == [1, 1, 3, 3]


def test_logits_of_any_size_are_sampled_without_overflow():
    for shift in (-1e4, 0, 1e4, 3e38):
        assert sample_softmax(np.array([shift, shift], np.float32), 0.75) == 1


def test_a_diverged_model_still_gives_a_token():
    assert 0 <= sample_softmax(np.full(5, np.nan, np.float32), 0.5) < 5


@pytest.mark.parametrize("V", [3, 257, 50257])
def test_frequencies_are_those_of_softmax(rng, V):
    torch = pytest.importorskip("torch")
    logits = (3 * rng.standard_normal(V)).astype(np.float32)
    probability = torch.softmax(torch.from_numpy(logits).double(), 0).numpy()
    n = 2000
    coins = (np.arange(n) + 0.5) / n  # evenly spaced, so that each token is hit n times its probability, within 1
    counts = np.bincount([sample_softmax(logits, coin) for coin in coins], minlength=V)
    assert np.abs(counts - n * probability).max() <= 1


def test_temperature_divides_the_logits(rng):
    logits = rng.standard_normal(100).astype(np.float32)
    for coin in np.linspace(0, 0.999, 50):
        assert sample(logits, coin) == sample_softmax(logits, coin)
        assert sample(logits, coin, temperature=0.5) == sample_softmax(2 * logits, coin)
        assert sample(logits, coin, temperature=1e-30) == sample(logits, coin, temperature=0) == logits.argmax()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-40, 3e38])
def test_a_temperature_at_the_ends_of_fp32_draws_without_a_warning(rng, temperature):
    logits = rng.standard_normal(100).astype(np.float32)
    token = sample(logits, 0.5, temperature)
    assert token == (logits.argmax() if temperature < 1 else sample_softmax(np.zeros(100, np.float32), 0.5))


def test_only_the_k_largest_are_drawn(rng):
    logits = rng.standard_normal(100).astype(np.float32)
    largest = set(np.argsort(logits)[-7:])
    coins = np.linspace(0, 0.9999, 1000)
    assert {sample(logits, coin, top_k=7) for coin in coins} == largest
    assert {sample(logits, coin, temperature=2.0, top_k=1) for coin in coins} == {logits.argmax()}
    assert [sample(logits, coin, top_k=k) for coin in coins for k in (100, 1000)] == [
        sample(logits, coin) for coin in coins for _ in range(2)
    ]


def test_among_the_k_largest_probabilities_keep_their_proportions():
    logits = np.log(np.array([0.4, 0.1, 0.2, 0.3], np.float32))
    assert [sample(logits, coin, top_k=2) for coin in (0.0, 0.571, 0.572, 0.999)] == [0, 0, 3, 3]  # 0.4 : 0.3


@pytest.mark.parametrize("flag", ["--temperature -0.1", "--temperature nan", "--top-k -1"])
def test_settings_without_meaning_are_refused(flag, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        generate.make_parser().parse_args(flag.split())
    assert flag.split()[0] in capsys.readouterr().err
