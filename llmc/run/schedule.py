"""The learning rate as a function of the step: llm.c's four schedules.

Each climbs linearly to the full rate over the warm-up steps. After that
    constant   stays there
    cosine     falls along half a cosine to final_fraction of it at the last step (Loshchilov and Hutter, 2017)
    linear     falls along a straight line to the same
    wsd        stays there for 80% of all steps, then falls with 1 - sqrt (Hägele et al., 2024, arXiv 2405.18392)
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
    final_fraction: float  # of the full rate, reached at the end of cosine, linear and wsd

    def get_learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        decay_start = int(0.8 * self.total_steps) if self.kind == "wsd" else self.warmup_steps
        progress = (step - decay_start) / max(1, self.total_steps - decay_start)
        progress = min(max(progress, 0.0), 1.0)
        full, final = self.learning_rate, self.learning_rate * self.final_fraction
        if self.kind == "cosine":
            return final + 0.5 * (1 + math.cos(math.pi * progress)) * (full - final)
        if self.kind == "linear":
            return full - progress * (full - final)
        if self.kind == "wsd":
            return final + (1 - math.sqrt(progress)) * (full - final)
        return full
