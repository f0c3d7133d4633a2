"""sampling.cu against probabilities that softmax gives, and against NumPy's draws from the same coins."""

import generate
from kernels.sampling import sample as launch
from llmc.step.sampler import Sampler
from oracle import exact, guarded, normal
from oracle import sample as by_numpy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st


@pytest.fixture
def dev(each_type):
    return each_type


def states_of(coins) -> np.ndarray:
    """States, uint64, whose next coins are those multiples of 2**-24. The steps of the generator are undone."""
    mask, inverse = 2**64 - 1, pow(0x2545F4914F6CDD1D, -1, 2**64)
    states = []
    for coin in coins:
        state = ((int(coin * 2**24) << 40 | 1) * inverse) & mask
        for shift in (27, -25, 12):
            found = state
            for _ in range(64 // abs(shift) + 1):
                found = state ^ (found >> shift if shift > 0 else found << -shift & mask)
            state = found
        states.append(state)
        sampler = Sampler()
        sampler.state = state
        assert sampler.random_f32() == coin
    return np.array(states, np.uint64)


def draws(dev, logits, coins, **how) -> list[int]:
    """The tokens that the kernel draws from logits (V,) by each of these coins; each is a sequence of a batch. Whatever
    the coin, a draw changes nothing but the token, the position, which has room for one more in half of the sequences,
    and the state."""
    logits = np.asarray(logits, np.float32)
    B, V, Vp = len(coins), logits.size, -(-logits.size // 128) * 128
    rows = np.full((B, Vp), np.nan, np.float32)
    rows[:, :V] = logits
    states, positions = states_of(coins), np.arange(B, dtype=np.int32) % 2
    with guarded(dev) as memory:
        tokens, places = memory.write((B,), np.int32), memory.update(positions)
        on_device = dev.asarray(states)
        launch(tokens, places, on_device, memory.read(rows), B, V, Vp, 2, **how)
    for state, after in zip(states, dev.to_host(on_device), strict=True):
        sampler = Sampler()
        sampler.state = int(state)
        sampler.random_u32()
        assert sampler.state == after
    assert (dev.to_host(places) == 1).all()
    return dev.to_host(tokens).tolist()


MANY, RAMP = np.full(5000, -np.inf), np.arange(100) % 97
MANY[[7, 4000]] = 0


@pytest.mark.parametrize("logits, temperature, drawn", [
    ([-np.inf, 0, -np.inf, 0, -np.inf], 1.0, {0.0: 1, 0.5 - 2**-24: 1, 0.5: 3, 1 - 2**-24: 3}),  # no impossible token
    (MANY, 1.0, {0.0: 7, 0.25: 7, 0.5: 4000, 1 - 2**-24: 4000}),
    *(([shift, shift], 1.0, {0.75: 1}) for shift in (-1e4, 0, 1e4, 3e38)),  # nothing overflows
    *((RAMP, temperature, {0.5: 96}) for temperature in (1e-320, 1e-45, 1e-40)), (RAMP, 3e38, {0.5: 50}),
])  # fmt: skip
def test_at_the_ends_of_fp32_the_draw_is_right_too(dev, logits, temperature, drawn):
    assert draws(dev, exact(np.array(logits, np.float32)), drawn, temperature=temperature) == list(drawn.values())


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_a_diverged_model_still_gives_a_token_and_says_that_it_means_nothing(dev, how):
    said = dev.zeros((1,), np.int32)
    for value in np.nan, np.inf, -np.inf:
        for logits in np.full(700, value, np.float32), np.where(np.arange(700) == 650, value, np.float32(3)):
            token = draws(dev, logits, [0.5], drawn=said, **how)[0]
            finite = np.isfinite(logits.max())
            assert 0 <= token < 700 and dev.to_host(said)[0] == (token if finite else -1)


@given(
    V=st.integers(1, 400), seed=st.integers(0, 99), temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_k=st.integers(0, 12), top_p=st.sampled_from((1e-6, 0.3, 0.9, 1.0)), spread=st.sampled_from((0.0, 1.0, 30.0)),
)  # fmt: skip
@example(V=50257, seed=1, temperature=1.0, top_k=0, top_p=1.0, spread=1.0)
@example(V=50257, seed=2, temperature=0.8, top_k=40, top_p=0.95, spread=3.0)
@example(V=4096, seed=3, temperature=0.0, top_k=0, top_p=1.0, spread=0.0)
@example(V=4096, seed=4, temperature=1.0, top_k=5, top_p=1.0, spread=0.0)  # ties: 4096 have the k-th largest
@example(V=5000, seed=5, temperature=1.0, top_k=1500, top_p=1.0, spread=1.0)  # more than a block has threads
@example(V=5000, seed=6, temperature=1.0, top_k=600, top_p=0.5, spread=1.0)
@example(V=300, seed=7, temperature=1.0, top_k=0, top_p=1e-50, spread=1.0)  # 0 in fp32
def test_draws_are_those_of_numpy_wherever_no_sum_is_within_rounding_of_the_coin(
    dev, V, seed, temperature, top_k, top_p, spread
):
    rng = np.random.default_rng([V, seed])
    logits = exact(spread * normal(rng, V))
    coins = rng.integers(0, 2**24, 6) / 2**24
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for coin, token in zip(coins, draws(dev, logits, coins, **how), strict=True):
        # The next sums in either direction may be the wanted ones.
        near = [np.clip(coin + shift, 0, 1 - 2**-24) for shift in (0, 1e-6, -1e-6)]
        nearly = [np.clip(top_p + shift, 1e-9, 1) for shift in (0, 1e-6, -1e-6)] if top_p < 1 else [1.0]
        wanted = {by_numpy(logits, c, temperature, top_k or None, p) for c in near for p in nearly}
        assert token in wanted


@pytest.mark.parametrize("V", [3, 257])
def test_frequencies_are_those_of_softmax(dev, rng, V):
    logits = exact(3 * normal(rng, V))
    probability = torch.softmax(torch.from_numpy(logits).double(), 0).numpy()
    n = 500
    coins = np.floor((np.arange(n) + 0.5) / n * 2**24) / 2**24  # evenly spaced: each token n times its probability
    counts = np.bincount(draws(dev, logits, coins), minlength=V)
    assert np.abs(counts - n * probability).max() <= 1.01


def test_only_the_k_largest_are_drawn_with_all_that_tie(dev, rng):
    logits = exact(normal(rng, 100))
    logits[3] = logits[70] = np.sort(logits)[-7]
    largest = set(np.flatnonzero(logits >= logits[3]).tolist())
    assert 7 <= len(largest) <= 9
    coins = np.floor(np.linspace(0, 0.9999, 60) * 2**24) / 2**24
    assert set(draws(dev, logits, coins, temperature=3.0, top_k=7)) == largest
    assert set(draws(dev, logits, coins, temperature=2.0, top_k=1)) == {int(logits.argmax())}
    everything = draws(dev, logits, coins)
    assert all(draws(dev, logits, coins, top_k=k) == everything for k in (100, 1000, 1 << 62))


def test_the_likeliest_that_have_the_share_together_are_drawn_with_all_that_tie(dev):
    logits = exact(np.log(np.array([1, 8, 4, 2, 4, 1], np.float32)))  # of 20
    coins = np.floor(np.linspace(0, 0.9999, 30) * 2**24) / 2**24

    def drawn(**how) -> set[int]:
        return set(draws(dev, logits, coins, **how))

    assert drawn(top_p=0.01) == drawn(top_p=0.39) == {1}
    assert drawn(top_p=0.41) == drawn(top_p=0.79) == {1, 2, 4}
    assert drawn(top_p=0.81) == drawn(top_p=0.89) == {1, 2, 3, 4}
    assert drawn(top_p=0.91) == drawn() == {0, 1, 2, 3, 4, 5}
    assert drawn(top_k=3, top_p=0.49) == {1}  # of 16, the three largest
    assert drawn(top_k=3, top_p=0.51) == {1, 2, 4}


@pytest.mark.parametrize(
    "flag", ["--temperature -0.1", "--temperature nan", "--top-k -1", "--top-p 0", "--top-p 1.1", "--top-p nan"]
)
def test_settings_without_meaning_are_refused(flag, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        generate.make_parser().parse_args(flag.split())
    assert flag.split()[0] in capsys.readouterr().err
