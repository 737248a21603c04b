"""One run, from a checked configuration to an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from typing import Any

import lightning.pytorch as pl
import torch

from flashtrain.config import Config
from flashtrain.config.started import is_first_started
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.attention_report import AttentionReport
from flashtrain.training.beginnings import is_anew, prepare_beginning
from flashtrain.training.curriculum import Progress, attempts, check_attempts, describe, stage_config
from flashtrain.training.distributed.processes import join, record_failure
from flashtrain.training.distributed.replicas import Replicas
from flashtrain.training.forecast import Forecast
from flashtrain.training.hardware import choose_device, choose_precision, device_name, peak_memory_gib
from flashtrain.training.loop import Deadline, Loop, StageOver
from flashtrain.training.memory import forecast, memory_line, out_of_memory, ran_out, refuse_later_stages, show_plan
from flashtrain.training.meter import Diverged, Meter, Row
from flashtrain.training.preemption import Preemption
from flashtrain.training.progress import Display, complain
from flashtrain.training.recording import choose_launching
from flashtrain.training.run_folder import RunFolder, git_commit
from flashtrain.training.run_parts import Work, doubts, make_trainer, open_folder, work_of
from flashtrain.training.seeds import fold_seed
from flashtrain.training.trackers import Tracker, build_trackers
from flashtrain.training.visibility import visible_pairs
from flashtrain.training.warm_start import find_weights, warm_start

logger = logging.getLogger("flashtrain")


def run(config: Config, changes: list[str]) -> int:
    """Train, or go on training, as configured; `changes` are what a resume changes, for the log.

    Returns:
        The exit code: 0 finished, 143 after SIGTERM, 130 after Ctrl-C, 1 otherwise.
    """
    if config.plan.only:
        return show_plan(config) if is_first_started(os.environ) else 0
    with contextlib.ExitStack() as signals:
        try:
            processes = join(config)
            preemption = Preemption(processes)
            signals.enter_context(preemption.installed())  # from here on there may be a folder, which gets a summary
            folder = open_folder(config, processes)
            display = Display(folder.log, config.trainer.max_steps, processes.rank)
        except (ValueError, OSError) as error:
            complain(str(error))
            return 1
        return _Run(config, folder, display, preemption).through(changes)


class _Run:
    """The parts of one run, put together."""

    def __init__(self, config: Config, folder: RunFolder, display: Display, preemption: Preemption) -> None:
        self.config, self.folder, self.display = config, folder, display
        self.preemption, self.processes = preemption, preemption.processes
        self.device: torch.device | None = None
        self.status, self.exit_code = "failed", 1
        self.complete = False  # all processes came to the end of the training
        self.trackers: list[Tracker] = []
        self.meter: Meter | None = None
        self.loop: Loop | None = None
        self.saver: ckpt.Checkpoints | None = None
        self.trainer: pl.Trainer | None = None
        self.facts: dict[str, Any] = {}
        self.resume_from: ckpt.Start | None = None
        self.looked = False  # for what to resume from
        self.progress = Progress()
        self.launched = ""
        self.forecast: Forecast | None = None
        self.work: Work

    def through(self, changes: list[str]) -> int:
        """From the beginning to the end, whatever that is; returns the exit code."""
        try:
            for change in changes:
                logger.info("changed on resume: %s", change)
            with self.preemption.interrupting():
                self.prepare()
            if self.config.resume and self.processes.is_first:
                self.folder.write_config(self.config)  # not before: changes with which it cannot go on shall not stay
            self.train()
        except KeyboardInterrupt:
            self.status, self.exit_code = "stopped", self.preemption.exit_code or 130
        except Exception as error:
            self.fail(error)
        finally:
            self.finish()
            self.display.close()
        self.processes.leave(together=self.complete)
        return self.exit_code

    def prepare(self) -> None:
        """Everything that can go wrong before the first step."""
        config = self.config
        device = self.device = choose_device(config.trainer.accelerator)
        self.precision = choose_precision(config.trainer, device)
        self.resume_from = self._checkpoint()
        attention = self._build(self.resume_from)
        refuse_later_stages(config, self.progress, self.task.head_size, self.precision, device)
        assert self.forecast is not None
        about = {"device": device_name(device), "precision": self.precision}
        self.facts = attention.facts() | about | self.work.facts() | self.forecast.facts()
        for line in self._banner(attention):
            logger.info("%s", line)
        for line in doubts(self.work.config, self.resume_from.step if self.resume_from else 0):
            logger.warning("%s", line)

    def _build(self, start: ckpt.Start | None) -> AttentionReport:
        """The stage's data, and a model for it: new, from another run's weights, or for the checkpoint's to fill."""
        config, device = self.config, self.device
        assert device is not None
        self.progress = start.progress if start else Progress()
        check_attempts(config, self.progress)
        init_from = config.model.init_from if start is None or is_anew(self.progress, start.step) else None
        if init_from is not None:
            find_weights(init_from, config.runs_dir)  # before the data is prepared, which may take long
        self.work = work_of(stage_config(config, self.progress), config, self.processes)
        if start is not None:
            ckpt.check_identity(start.path, start.content, self.work.identity)
        torch.manual_seed(fold_seed(self.work.config.seed))
        task = self.task = self.work.build_task()
        if init_from is not None:
            warm_start(task.model, init_from, config.runs_dir, self.work.identity)
        task.progress = self.progress
        if start is not None:
            prepare_beginning(task, config, start, self.folder.checkpoints, keeps=self.processes.is_first)
        seq_len, head_size = self.work.config.seq_len, task.head_size
        pairs = float(visible_pairs(task.masks.lower(1, seq_len, device)))
        self.forecast = forecast(self.work.config, head_size, self.precision, device, pairs, self.processes)
        task.model.checkpoint_blocks = self.forecast.case.how
        task.join(Replicas(self.processes, config.trainer.strategy, config.trainer.shard), device)
        self.launched = choose_launching(task, self.work.config, device)
        return AttentionReport(task.masks, self.precision, device)

    def train(self) -> None:
        """All stages, one fit each, and what comes at the end."""
        config, here = self.config, self.resume_from
        self.processes.meet()
        if self.processes.is_first:
            self.trackers = build_trackers(config, self.folder, (here.step if here else 0) if config.resume else None)
        deadline = Deadline(config.trainer.max_time)
        while self._fit(here, deadline) == "stage":
            here = self._checkpoint(resuming=True)
            assert here is not None
            self._enter(here)
        assert self.loop is not None
        self.status = "stopped" if self.preemption.requested else "finished"
        self.exit_code = self.preemption.exit_code
        if self.status == "finished" and self.processes.is_first:
            self.facts |= self.work.at_end(self.loop.figures)
        self.complete = True

    def _fit(self, start: ckpt.Start | None, deadline: Deadline) -> str | None:
        """Train in the present stage until it ends; returns why it did."""
        config, trainer_config, preemption = self.work.config, self.config.trainer, self.preemption
        assert self.device is not None
        self.meter = Meter(
            config, self.task.head_size, self.precision, self.device, self._row, self.progress, self.processes
        )
        saver = self.saver = ckpt.Checkpoints(
            self.folder.checkpoints, trainer_config.checkpoint_every_n_steps, trainer_config.keep_checkpoints,
            self.config, self.work.identity, self.processes,
        )  # fmt: skip
        saver.progress = self.progress
        self.task.give_up = preemption.asked
        self.display.max_steps = config.trainer.max_steps
        self.loop = Loop(
            config, self.meter, saver, preemption, self.display, self.work.validate,
            lambda step: self.work.after_validation(step, self._show),
            start.owes_validation if start else False, deadline, self.progress,
        )  # fmt: skip
        callbacks = [preemption, self.meter, saver, self.loop]
        self.trainer = make_trainer(config, self.device, self.precision, callbacks, self.processes)
        with contextlib.suppress(StageOver):
            self.trainer.fit(
                self.task,
                self.work.train_loader(self.progress.own(start.step) if start else 0),
                ckpt_path=None if start is None else str(start.path),
                weights_only=True,
            )
        self.meter.flush()
        return self.loop.stop_reason

    def _enter(self, start: ckpt.Start) -> None:
        """Go on with another stage, or another attempt at this one."""
        self.task.recorded = None  # and with it the memory of its graph
        attention = self._build(start)
        self.facts |= attention.facts() | self.work.facts()
        for line in (describe(self.config, self.progress), f"launching: {self.launched}", *attention.lines()):
            logger.info("%s", line)

    def finish(self) -> None:
        """Write the summary and close the trackers, whatever happened; of several processes the first does."""
        if not self.processes.is_first:
            return
        step, config = self.steps, stage_config(self.config, self.progress)
        summary = {
            "run_id": self.folder.run_id,
            "status": self.status,
            "steps": step,
            "tokens": self.progress.tokens_at(step, config) if step else step,
            "train_loss": self.meter.last_row.get("train_loss") if self.meter else None,
            "val_loss": None,
            **(self.loop.figures if self.loop else {}),
            "tokens_per_second": self.meter.tokens_per_second if self.meter else None,
            "mfu": self.meter.mfu if self.meter else None,
            "peak_memory_gib": peak_memory_gib(self.device) if self.device else None,
            "seq_len": self.config.seq_len,
            "model": self.config.model.name,
            "init_from": self.config.model.init_from,
            "git_commit": git_commit(),
            **attempts(self.config, self.saver.progress if self.saver else self.progress),
            **self.facts,
        }
        try:
            self.folder.write_summary(summary)
        except OSError as error:
            logger.error("%s", error)
            self.exit_code = 1
        for tracker in self.trackers:
            tracker.finish(self.status, summary)
        when = "before it went on" if step is None else f"after {step} steps"
        logger.info("%s %s: %s", self.status, when, self.folder.path)
        if self.status == "stopped":
            logger.info("go on with: python train.py resume=%s", self.folder.run_id)

    def fail(self, error: Exception) -> None:
        """Say what ended the run, and leave it where those who watch this process look for what failed."""
        self.exit_code = 1
        lost = None
        if isinstance(error, Diverged):
            self.status, lines = "diverged", [str(error)]
        elif ran_out(error):
            whole = ckpt.newest(self.folder.checkpoints) is not None
            lines = out_of_memory(error, self.forecast, self.place(error), self.folder.run_id if whole else None)
        elif isinstance(error, ValueError | OSError):
            lines = [str(error)]
        elif lost := self.processes.loss_behind(error):
            lines = [lost]
            if self.loop is None and self.preemption.alone():  # as the others were, who have ended before
                self.status, self.exit_code = "stopped", self.preemption.exit_code
        else:
            lines = [traceback.format_exc()]
        if not self.processes.first_tells(lines[0]):
            for line in lines:
                logger.error("%s", line)
        if isinstance(error, ValueError | OSError) or lost:
            logger.debug("%s", traceback.format_exc())
        if not lost:  # it is another one that failed
            record_failure(error)

    @property
    def steps(self) -> int | None:
        """The steps that are done; None for a resumed run that does not know of its checkpoint yet."""
        if self.trainer is not None:
            return self.trainer.global_step
        if self.resume_from is not None:
            return self.resume_from.step
        return None if self.config.resume and not self.looked else 0

    def place(self, error: Exception) -> str:
        """Where the run was, for a message."""
        if self.trainer is None:
            return "before the first step"
        done, names = self.trainer.global_step, {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        aside = names & {"validate", "after_validation"}
        return f"in the validation after step {done}" if aside else f"in step {done + 1}"

    def _checkpoint(self, resuming: bool = False) -> ckpt.Start | None:
        """The checkpoint to go on from."""
        if not (resuming or self.config.resume):
            return None
        start = ckpt.Start.at_newest(self.folder.checkpoints)
        self.looked = True
        if start is None:
            logger.info("%s stopped before its first checkpoint: starting it afresh", self.folder.run_id)
        return start

    def _banner(self, attention: AttentionReport) -> list[str]:
        config = self.work.config
        per_step, per_micro = config.sequences_per_step, config.sequences_per_micro_batch
        assert self.forecast is not None
        lines = [
            f"run {self.folder.run_id} in {self.folder.path}",
            *self.work.banner(),
            f"step: {per_step} sequences, {per_step * config.seq_len:,} tokens, in micro-batches of {per_micro}",
            f"device {self.facts['device']}, {self.precision}, attention {self.facts['attention_backend']}",
            f"launching: {self.launched}",
            *attention.lines(),
            memory_line(self.forecast.case.how, config),
            *self.forecast.short(),
        ]
        if self.resume_from is not None:
            start = self.resume_from
            tokens = self.progress.tokens_at(start.step, config)
            lines.append(f"resuming after step {start.step} ({tokens:,} tokens) from {start.path}")
        if config.curriculum is not None:
            lines.append(describe(self.config, self.progress))
        return lines

    def _row(self, row: Row) -> None:
        if not self.processes.is_first:
            return
        if self.config.curriculum is not None:
            row = {**row, "stage": self.progress.stage + 1}
        for tracker in self.trackers:
            tracker.log(row)
        self.display.row(row)

    def _show(self, step: int, name: str, text: str) -> None:
        logger.info("%s at step %d:\n%s", name, step, text)
        for tracker in self.trackers:
            tracker.log_text(step, name, text)
