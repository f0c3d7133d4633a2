"""Learning-rate schedules against PyTorch's and transformers', and at the points that define them."""

from llmc.run.schedule import SCHEDULES, LearningRateSchedule

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

RATE = 3e-4
# kind: the steps of the fall, or for wsd of the whole run, and the scheduler of an optimizer that falls to a fraction.
THEIRS = {
    "constant": (10, lambda optimizer, final: lr_scheduler.ConstantLR(optimizer, 1.0)),
    "cosine": (37, lambda optimizer, final: lr_scheduler.CosineAnnealingLR(optimizer, 37, RATE * final)),
    "linear": (37, lambda optimizer, final: lr_scheduler.LinearLR(optimizer, 1.0, final, total_iters=37)),
    "wsd": (100, lambda optimizer, final: transformers.get_wsd_schedule(  # its warm-up would start at 0
        optimizer, num_warmup_steps=0, num_decay_steps=20, num_stable_steps=80, decay_type="1-sqrt",
        min_lr_ratio=final)),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", SCHEDULES)


def rates(schedule, steps):
    return [schedule.get_learning_rate(step) for step in range(steps)]


@every_kind
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_after_warm_up_the_rates_are_pytorchs_or_transformers(kind, warmup, final):
    steps, make_scheduler = THEIRS[kind]
    begin = 0 if kind == "wsd" else warmup  # where the scheduler's step 0 is
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    scheduler, theirs = make_scheduler(optimizer, final), []
    for _ in range(steps + 1):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = rates(LearningRateSchedule(kind, RATE, warmup, begin + steps, final), begin + steps + 1)
    assert ours[warmup:] == pytest.approx(theirs[warmup - begin :], rel=1e-9, abs=1e-18)


@every_kind
def test_warm_up_climbs_in_equal_parts_to_the_full_rate(kind):
    schedule = LearningRateSchedule(kind, RATE, 4, 100, 0.0)
    assert rates(schedule, 5) == pytest.approx([RATE / 4, RATE / 2, RATE * 3 / 4, RATE, RATE])


@every_kind
@pytest.mark.parametrize("warmup_steps, total_steps", [(0, 0), (0, 1), (5, 5), (9, 5), (0, 3)])
def test_short_runs_have_rates_too(kind, warmup_steps, total_steps):
    schedule = LearningRateSchedule(kind, RATE, warmup_steps, total_steps, 0.1)
    for rate in rates(schedule, total_steps + 5):
        assert 0.1 * RATE * (1 - 1e-9) <= rate <= RATE
