"""Learning-rate schedules against PyTorch's and transformers', and at the points that define them."""

from llmc.run.schedule import SCHEDULES, LearningRateSchedule

import pytest
import torch

RATE = 3e-4


def rates(schedule, steps):
    return [schedule.get_learning_rate(step) for step in range(steps)]


def torch_rates(make_scheduler, steps):
    """The rates that a scheduler of torch.optim gives for each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    scheduler = make_scheduler(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("final_fraction", [0.0, 0.1, 1.0])
def test_cosine_is_pytorchs(final_fraction):
    theirs = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 37, RATE * final_fraction), 38)
    ours = rates(LearningRateSchedule("cosine", RATE, 0, 37, final_fraction), 38)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("final_fraction", [0.0, 0.1, 1.0])
def test_linear_is_pytorchs(final_fraction):
    theirs = torch_rates(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, final_fraction, total_iters=37), 38)
    ours = rates(LearningRateSchedule("linear", RATE, 0, 37, final_fraction), 38)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("final_fraction", [0.0, 0.1])
def test_wsd_is_that_of_transformers(final_fraction):
    """With 1 - sqrt over the last fifth; without warm-up, which starts at 0 there."""
    transformers = pytest.importorskip("transformers")
    theirs = torch_rates(
        lambda o: transformers.get_wsd_schedule(
            o, num_warmup_steps=0, num_decay_steps=20, num_stable_steps=80, decay_type="1-sqrt",
            min_lr_ratio=final_fraction,
        ),
        101,
    )
    ours = rates(LearningRateSchedule("wsd", RATE, 0, 100, final_fraction), 101)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_warm_up_climbs_in_equal_parts_to_the_full_rate(kind):
    schedule = LearningRateSchedule(kind, RATE, 4, 100, 0.0)
    assert rates(schedule, 5) == pytest.approx([RATE / 4, RATE / 2, RATE * 3 / 4, RATE, RATE])


def test_after_warm_up_the_fall_takes_the_remaining_steps():
    """Halfway from step 10 to 50, and at the end, by hand: cos(pi/2) = 0."""
    cosine = LearningRateSchedule("cosine", RATE, 10, 50, 0.2)
    linear = LearningRateSchedule("linear", RATE, 10, 50, 0.2)
    for schedule in (cosine, linear):
        assert schedule.get_learning_rate(30) == pytest.approx(0.6 * RATE)
        assert schedule.get_learning_rate(50) == pytest.approx(0.2 * RATE)
    assert linear.get_learning_rate(20) == pytest.approx(0.8 * RATE)
    assert cosine.get_learning_rate(20) == pytest.approx((0.2 + 0.8 * (0.5 + 0.5**1.5)) * RATE)  # cos(pi/4) = sqrt(1/2)
    wsd = LearningRateSchedule("wsd", RATE, 10, 50, 0.2)
    assert rates(wsd, 41)[10:] == [RATE] * 31
    assert wsd.get_learning_rate(45) == pytest.approx((0.2 + 0.8 * (1 - 0.5**0.5)) * RATE)
    assert wsd.get_learning_rate(50) == pytest.approx(0.2 * RATE)


def test_constant_is_constant():
    assert rates(LearningRateSchedule("constant", RATE, 0, 10, 0.0), 30) == [RATE] * 30


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup_steps, total_steps", [(0, 0), (0, 1), (5, 5), (9, 5), (0, 3)])
def test_short_runs_have_rates_too(kind, warmup_steps, total_steps):
    schedule = LearningRateSchedule(kind, RATE, warmup_steps, total_steps, 0.1)
    for rate in rates(schedule, total_steps + 5):
        assert 0.1 * RATE * (1 - 1e-9) <= rate <= RATE
