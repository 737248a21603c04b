"""What happens between optimiser steps: the meter, validation, samples, checkpoints, and stopping."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from flashtrain.config import Config
from flashtrain.training.checkpoints import Checkpoints
from flashtrain.training.curriculum import Progress, is_due, what_follows
from flashtrain.training.meter import Meter
from flashtrain.training.preemption import Preemption
from flashtrain.training.progress import Display
from flashtrain.training.task import Task

logger = logging.getLogger(__name__)


class StageOver(Exception):
    """The fit ended before its first step: a signal came first, or a validation that an earlier stop had left undone
    was all that it had to do."""


class Deadline:
    """`trainer.max_time`, counted from the first step of the first stage."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end: float | None = None

    def start(self) -> None:
        """Begin to count, unless it has begun."""
        if self.seconds is not None and self._end is None:
            self._end = time.monotonic() + self.seconds

    @property
    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


class Loop(pl.Callback):
    """Runs the rest of a run at the border of each optimiser step, in one order that a resume repeats exactly."""

    def __init__(
        self,
        config: Config,
        meter: Meter,
        checkpoints: Checkpoints,
        preemption: Preemption,
        display: Display,
        validate: Callable[[bool], dict[str, float] | None],
        sample: Callable[[int], None],
        owes_validation: bool,
        deadline: Deadline,
        progress: Progress,
    ) -> None:
        self.config = config
        self.meter = meter
        self.checkpoints = checkpoints
        self.preemption = preemption
        self.display = display
        self.validate = validate
        self.sample = sample
        self.owes_validation = owes_validation
        self.figures: dict[str, float] = {}  # of the newest validation
        self.stop_reason: str | None = None
        self.deadline = deadline
        self.progress = progress

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if self.owes_validation:  # perhaps that of the last step, behind which Lightning would not even begin
            trainer.fit_loop.epoch_loop.max_steps += 1

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.preemption.asked():  # there is nothing to save that is not saved
            self.stop_reason = "signal"
            raise StageOver
        self.deadline.start()
        # A checkpoint that was resumed needs no second copy.
        self.checkpoints.saved_step = trainer.global_step or None
        self.display.start(trainer.global_step)
        if self.owes_validation:
            step = trainer.global_step
            last = step >= self.config.trainer.max_steps
            after = self._what_follows(step, self._validate(step, last))
            reason = "signal" if last and self.owes_validation else self._reason_to_end(after, last)
            if reason is not None:
                self.checkpoints.saved_step = None  # the same weights, but something else goes on from them
                self.checkpoints.progress = after or self.progress
                self._stop(trainer, reason)
                raise StageOver

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, Task)
        settings, step = self.config.trainer, trainer.global_step
        last = step >= settings.max_steps
        (out_of_time,) = self.preemption.agree(self.deadline.passed)
        after = what_follows(self.config, self.progress, step, None)
        if not module.unfinished:
            self.meter.step_done(step, module)
            self.display.step(step)
            due = is_due(self.config, self.progress, step)
            if step % settings.val_every_n_steps == 0 or last or out_of_time or due:
                figures = self._validate(step, last or out_of_time)
                after = self._what_follows(step, figures)
        if after is not None and not self.owes_validation:
            self.checkpoints.progress = after
        if self.preemption.requested:  # before the step, in the middle of it, or during the validation
            return self._stop(trainer, "signal")
        if out_of_time:
            return self._stop(trainer, "max_time")
        reason = self._reason_to_end(after, last)
        if reason is not None:
            return self._stop(trainer, reason)
        if step % settings.checkpoint_every_n_steps == 0:
            self._save(trainer)
        return None

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.display.stop()

    def _validate(self, step: int, last: bool) -> dict[str, float] | None:
        figures = None if self.preemption.requested else self.validate(last)
        self.owes_validation = figures is None  # stopped before its end: the resumed run makes up for it
        if figures is not None:
            self.figures = figures
            self.meter.add(step, **figures)
        self.meter.flush()
        if figures is not None:
            self.sample(step)
        self.preemption.processes.meet()
        self.meter.start_interval()
        return figures

    def _save(self, trainer: pl.Trainer) -> None:
        self.meter.check_finite()  # a step that was not finite must not count as done in a checkpoint
        self.meter.flush()
        self.checkpoints.save(trainer, self.owes_validation)
        self.preemption.processes.meet()
        self.meter.start_interval()

    def _reason_to_end(self, after: Progress | None, last: bool) -> str | None:
        """Why the fit ends, if it does; `last`: all steps are done, but those of a failed attempt come on top."""
        if last and (after is None or after.stage > self.progress.stage):
            return "max_steps"
        return None if after is None else "stage"

    def _what_follows(self, step: int, figures: dict[str, float] | None) -> Progress | None:
        after = what_follows(self.config, self.progress, step, figures)
        if after is not None and figures is not None and after.failed > self.progress.failed:
            logger.info(
                "stage %d: seed %d has %.1f%% right at step %d, %d steps after it began, and is given up",
                after.stage + 1,
                self.config.seed,
                100 * figures["val_accuracy"],
                step,
                step - self.progress.first_step,
            )
        return after

    def _stop(self, trainer: pl.Trainer, reason: str) -> None:
        self.stop_reason = reason
        self._save(trainer)
        trainer.should_stop = True
        self.display.stop()
