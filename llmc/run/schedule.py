"""The learning rate as a function of the step: llm.c's four schedules.

Each climbs linearly to the full rate over the warm-up steps. After that
    constant   stays there
    cosine     falls along half a cosine (Loshchilov and Hutter, 2017)
    linear     falls along a straight line
    wsd        stays there for 80% of all steps, then falls with 1 - sqrt (Hägele et al., 2024, arXiv 2405.18392)
The last three would be at final_fraction of the full rate one step after the last.
"""

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True)
class LearningRateSchedule:
    kind: str              # one of SCHEDULES
    learning_rate: float   # the full rate
    warmup_steps: int      # steps 0 .. warmup_steps - 1 climb; 0: none
    total_steps: int       # of the whole run
    final_fraction: float  # cosine, linear and wsd fall to this fraction of the full rate

    @property
    def decay_start(self) -> int:
        """The step with which cosine, linear and wsd begin to fall."""
        return int(0.8 * self.total_steps) if self.kind == "wsd" else self.warmup_steps

    def get_learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.decay_start) / max(1, self.total_steps - self.decay_start)
        progress = min(max(progress, 0.0), 1.0)
        full, final = self.learning_rate, self.learning_rate * self.final_fraction
        if self.kind == "cosine":
            return final + 0.5 * (1 + math.cos(math.pi * progress)) * (full - final)
        if self.kind == "linear":
            return full - progress * (full - final)
        if self.kind == "wsd":
            return final + (1 - math.sqrt(progress)) * (full - final)
        return full
