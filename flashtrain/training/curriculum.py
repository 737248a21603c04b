"""Stages from easy to hard: which one a run is in, what its configuration is, when it is over or begins again.

Every stage, and every attempt at one, is a fit of its own, which goes on from the checkpoint of the one before. So
whatever holds for a run that was stopped and resumed holds for their borders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from flashtrain.config import Config
from flashtrain.config.schema import StageConfig
from flashtrain.data.pathfinder import spec_of


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    stage: its number, from 0.
    first_step: optimiser step at which the stage, or the present attempt at it, began.
    tokens_before: trained on before that.
    failed_here: attempts at this stage that were given up.
    failed: those at all stages; each counts the seed up by one.
    failed_steps: the steps of those.
    schedule_from: step, failed ones not counted, at which the learning rate's schedule began.
    """

    stage: int = 0
    first_step: int = 0
    tokens_before: int = 0
    failed_here: int = 0
    failed: int = 0
    failed_steps: int = 0
    schedule_from: int = 0

    def tokens_at(self, step: int, config: Config) -> int:
        """Tokens trained on after `step` optimiser steps; `config` is that of the stage."""
        return self.tokens_before + (step - self.first_step) * config.sequences_per_step * config.seq_len

    def own(self, step: int) -> int:
        """The number that `step` would have, had the run begun with the present seed: images and dropout go by it."""
        return step - self.failed_steps

    def scheduled(self, step: int) -> int:
        """The number that `step` has for the learning rate."""
        return self.own(step) - self.schedule_from

    def averaged(self, step: int) -> int:
        """The number that `step` has for the running mean of the weights.

        Each stage counts anew, so that the mean soon forgets the weights of the stage before, which were for other
        images: those that gates look at.
        """
        return step - self.first_step

    def next(self, step: int, config: Config) -> Progress:
        """The beginning of the next stage, after `step` steps in all.

        After pretraining the schedule begins again, since the optimiser does.
        """
        before, after = (stage_of(config, number) for number in (self.stage, self.stage + 1))
        goes_on = before is None or after is None or before.pretrain == after.pretrain
        return dataclasses.replace(
            self,
            stage=self.stage + 1,
            first_step=step,
            tokens_before=self.tokens_at(step, config),
            failed_here=0,
            schedule_from=self.schedule_from if goes_on else self.own(step),
        )

    def again(self, step: int, config: Config) -> Progress:
        """The beginning of the next attempt at the same stage, after `step` steps in all."""
        return dataclasses.replace(
            self,
            first_step=step,
            tokens_before=self.tokens_at(step, config),
            failed_here=self.failed_here + 1,
            failed=self.failed + 1,
            failed_steps=self.failed_steps + step - self.first_step,
        )


def stage_of(config: Config, number: int) -> StageConfig | None:
    """The curriculum's stage of that number, from 0; None where there is none."""
    stages = () if config.curriculum is None else config.curriculum.stages
    return stages[number] if number < len(stages) else None


def stage_config(config: Config, progress: Progress) -> Config:
    """The configuration of one attempt at one stage: the run's, with the images that the stage names.

    It has as many tokens as pixels, pretraining only where the stage has it, the attempt's seed, and the steps of the
    failed attempts on top of `trainer.max_steps`.
    """
    stage = stage_of(config, progress.stage)
    if stage is None or config.images is None:
        return config
    images, seq_len, changes = config.images, config.seq_len, dict(stage.images)
    if changes:
        if "preset" in changes and "side" not in changes:
            changes["side"] = None  # type: ignore[assignment]  # the preset's own
        images = dataclasses.replace(images, **changes)  # type: ignore[arg-type]
        side = images.side or spec_of(images.preset).side
        seq_len = side**2
    return dataclasses.replace(
        config,
        images=images,
        seq_len=seq_len,
        pretrain=config.pretrain if stage.pretrain else None,
        seed=config.seed + progress.failed,
        trainer=dataclasses.replace(config.trainer, max_steps=config.trainer.max_steps + progress.failed_steps),
    )


def coming(config: Config, progress: Progress) -> list[Config]:
    """The configurations of the present stage and of those after it; `config` is the run's.

    Each has as `trainer.max_steps` the steps that it takes where no gate opens before.
    """
    stages = () if config.curriculum is None else config.curriculum.stages
    if not stages:
        return [config]
    found, left = [], config.trainer.max_steps
    for number in range(progress.stage, len(stages)):
        steps = left if number + 1 == len(stages) else min(left, stages[number].max_steps)
        left -= steps
        own = stage_config(config, dataclasses.replace(progress, stage=number))
        found.append(dataclasses.replace(own, trainer=dataclasses.replace(own.trainer, max_steps=steps)))
    return found


def is_due(config: Config, progress: Progress, step: int) -> bool:
    """Whether after `step` steps the stage has had all of its own, or its restart rule looks at the accuracy."""
    stage = stage_of(config, progress.stage)
    if stage is None:
        return False
    done = step - progress.first_step
    judged = stage.restart is not None and done == stage.restart.after
    return judged or (done >= stage.max_steps and stage_of(config, progress.stage + 1) is not None)


def what_follows(config: Config, progress: Progress, step: int, figures: Mapping[str, float] | None) -> Progress | None:
    """The next stage or the next attempt at this one, if it begins after `step` steps; None if the stage goes on.

    Args:
        config: that of the stage.
        figures: those of a validation at that step, if there was one.
    """
    stage = stage_of(config, progress.stage)
    if stage is None:
        return None
    accuracy = None if figures is None else figures.get("val_accuracy")
    rule, done = stage.restart, step - progress.first_step
    if rule is not None and done == rule.after and accuracy is not None and accuracy < rule.below:
        return progress.again(step, config)
    passed = stage.gate is not None and accuracy is not None and accuracy >= stage.gate
    if (passed or done >= stage.max_steps) and stage_of(config, progress.stage + 1) is not None:
        return progress.next(step, config)
    return None


def _all_failed(stage: StageConfig | None, progress: Progress) -> bool:
    return stage is not None and stage.restart is not None and progress.failed_here >= stage.restart.attempts


def check_attempts(config: Config, progress: Progress) -> None:
    """Raise ValueError where the stage has had all of its attempts; `config` is the run's."""
    stage = stage_of(config, progress.stage)
    if not _all_failed(stage, progress):
        return
    assert stage is not None and stage.restart is not None
    tried = ", ".join(str(config.seed + progress.failed - n) for n in range(progress.failed_here, 0, -1))
    raise ValueError(
        f"stage {progress.stage + 1}: none of the seeds {tried} had {stage.restart.below:.0%} right after "
        f"{stage.restart.after:,} steps. Start a run with another optimizer.lr, easier images, or a later restart.after"
    )


def attempts(config: Config, progress: Progress) -> dict[str, int]:
    """For the summary, where a stage has a restart rule: the newest seed, how many were given up, and their steps."""
    stages = () if config.curriculum is None else config.curriculum.stages
    if all(stage.restart is None for stage in stages):
        return {}
    seed = config.seed + progress.failed - _all_failed(stage_of(config, progress.stage), progress)
    return {"seed": seed, "failed_seeds": progress.failed, "failed_steps": progress.failed_steps}


def describe(config: Config, progress: Progress) -> str:
    """One line for the log; `config` is the run's."""
    stage = stage_of(config, progress.stage)
    assert config.curriculum is not None and stage is not None
    stages = config.curriculum.stages
    named = ", ".join(f"{key} {value}" for key, value in stage.images.items()) or "images"
    until = "" if progress.stage + 1 == len(stages) else f", at most {stage.max_steps:,} steps"
    gate = "" if stage.gate is None else f", until {stage.gate:.0%} are right"
    kind = ", pretraining" if stage.pretrain else ""
    attempt = ""
    if stage.restart is not None:
        rule, number = stage.restart, progress.failed_here + 1
        attempt = (
            f", attempt {number} of {rule.attempts} (seed {config.seed + progress.failed}), given up if below "
            f"{rule.below:.0%} after {rule.after:,} steps"
        )
    place = f"stage {progress.stage + 1} of {len(stages)} from step {progress.first_step}"
    return f"{place}: {named}{kind}{gate}{until}{attempt}"
