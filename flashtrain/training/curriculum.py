"""Stages from easy to hard: which one a run is in, what its configuration is, and when it is over.

Every stage is a fit of its own, which goes on from the checkpoint of the one before. So whatever holds for a run that
was stopped and resumed holds for the border of two stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from flashtrain.config import Config
from flashtrain.data.pathfinder import spec_of

_OF_IMAGES = ("preset", "side", "contour_length", "distractor_count", "distractor_length", "start_border")


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the number of its stage, the optimiser step at which that began, and the tokens before it."""

    stage: int = 0
    first_step: int = 0
    tokens_before: int = 0

    def tokens_at(self, step: int, config: Config) -> int:
        """Tokens trained on after `step` optimiser steps; `config` is that of the stage."""
        return self.tokens_before + (step - self.first_step) * config.sequences_per_step * config.seq_len

    def next(self, step: int, config: Config) -> Progress:
        """The beginning of the next stage, after `step` steps in all."""
        return Progress(self.stage + 1, step, self.tokens_at(step, config))


def stage_config(config: Config, stage: int) -> Config:
    """The configuration of one stage: the run's, with the images that the stage names and as many tokens as pixels."""
    if config.curriculum is None or config.images is None:
        return config
    named = config.curriculum.stages[stage]
    changes = {key: getattr(named, key) for key in _OF_IMAGES if getattr(named, key) is not None}
    if not changes:
        return config
    if named.preset is not None and named.side is None:
        changes["side"] = None  # the preset's own
    images = dataclasses.replace(config.images, **changes)
    side = images.side or spec_of(images.preset).side
    return dataclasses.replace(config, images=images, seq_len=side**2)


def is_over(config: Config, progress: Progress, step: int, figures: Mapping[str, float] | None) -> bool:
    """Whether the stage ends after `step` steps; `figures` are those of a validation at that step, if there was one."""
    if config.curriculum is None or progress.stage + 1 >= len(config.curriculum.stages):
        return False
    stage = config.curriculum.stages[progress.stage]
    passed = stage.gate is not None and figures is not None and figures.get("val_accuracy", 0.0) >= stage.gate
    return passed or step - progress.first_step >= stage.max_steps


def describe(config: Config, progress: Progress) -> str:
    """One line for the log."""
    assert config.curriculum is not None
    stages = config.curriculum.stages
    stage = stages[progress.stage]
    named = ", ".join(f"{key} {getattr(stage, key)}" for key in _OF_IMAGES if getattr(stage, key) is not None)
    until = "" if progress.stage + 1 == len(stages) else f", at most {stage.max_steps:,} steps"
    gate = "" if stage.gate is None else f", until {stage.gate:.0%} are right"
    return (
        f"stage {progress.stage + 1} of {len(stages)} from step {progress.first_step}: {named or 'images'}{gate}{until}"
    )
