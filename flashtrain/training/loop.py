"""What happens between optimiser steps: the meter, validation, samples, checkpoints, and stopping."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from flashtrain.config import Config
from flashtrain.training.checkpoints import Checkpoints
from flashtrain.training.meter import Meter
from flashtrain.training.preemption import Preemption
from flashtrain.training.progress import Display
from flashtrain.training.task import LanguageTask

logger = logging.getLogger(__name__)


class Loop(pl.Callback):
    """Runs the rest of a run at the border of each optimiser step, in one order that a resume repeats exactly."""

    def __init__(
        self,
        config: Config,
        meter: Meter,
        checkpoints: Checkpoints,
        preemption: Preemption,
        display: Display,
        validate: Callable[[bool], float | None],
        sample: Callable[[int], None],
        owes_validation: bool,
    ) -> None:
        self.config = config
        self.meter = meter
        self.checkpoints = checkpoints
        self.preemption = preemption
        self.display = display
        self.validate = validate
        self.sample = sample
        self.owes_validation = owes_validation
        self.val_loss: float | None = None
        self.stop_reason: str | None = None
        self._deadline = math.inf

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.config.trainer.max_time is not None:
            self._deadline = time.monotonic() + self.config.trainer.max_time
        # A checkpoint that was resumed needs no second copy.
        self.checkpoints.saved_step = trainer.global_step or None
        self.display.start(trainer.global_step)
        if self.owes_validation:
            self._validate(trainer.global_step, last=False)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, LanguageTask)
        settings, step = self.config.trainer, trainer.global_step
        last = step >= settings.max_steps
        out_of_time = time.monotonic() >= self._deadline
        if not module.unfinished:
            self.meter.step_done(step, module)
            self.display.step(step)
            if step % settings.val_every_n_steps == 0 or last or out_of_time:
                self._validate(step, last or out_of_time)
        if self.preemption.requested:  # before the step, in the middle of it, or during the validation
            return self._stop(trainer, "signal")
        if last or out_of_time:
            return self._stop(trainer, "max_steps" if last else "max_time")
        if step % settings.checkpoint_every_n_steps == 0:
            self._save(trainer)
        return None

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.display.stop()

    def _validate(self, step: int, last: bool) -> None:
        loss = None if self.preemption.requested else self.validate(last)
        self.owes_validation = loss is None  # stopped before its end: the resumed run makes up for it
        if loss is not None:
            self.val_loss = loss
            self.meter.add(step, val_loss=loss, val_perplexity=perplexity(loss))
        self.meter.flush()
        if loss is not None:
            self.sample(step)
        self.meter.start_interval()

    def _save(self, trainer: pl.Trainer) -> None:
        self.meter.check_finite()  # a step that was not finite must not count as done in a checkpoint
        self.meter.flush()
        self.checkpoints.save(trainer, self.owes_validation)
        self.meter.start_interval()

    def _stop(self, trainer: pl.Trainer, reason: str) -> None:
        self.stop_reason = reason
        self._save(trainer)
        trainer.should_stop = True
        self.display.stop()


def perplexity(loss: float) -> float:
    """exp(loss), capped where a float would overflow."""
    return math.exp(min(loss, 700.0))
