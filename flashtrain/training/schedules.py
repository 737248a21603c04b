"""The learning rate as a pure function of the step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math

from flashtrain.config.schema import ScheduleConfig


def learning_rate(step: int, peak: float, max_steps: int, schedule: ScheduleConfig) -> float:
    """The rate of optimiser step `step`, counted from 0.

    The warm-up rises from peak / warmup_steps and reaches the peak at step warmup_steps - 1; the last step,
    max_steps - 1, has min_lr_ratio * peak (cosine and wsd).
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    start = schedule.warmup_steps
    if schedule.name == "wsd":
        start = max(start, round(max_steps * (1 - schedule.decay_fraction)))
        if step < start:
            return peak
    progress = min(1.0, (step - start + 1) / max(1, max_steps - start))
    floor = schedule.min_lr_ratio
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (floor + (1 - floor) * shape)
