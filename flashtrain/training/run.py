"""One run, from a checked configuration to an exit code."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from flashtrain.attention import choose_backend
from flashtrain.config import Config, format_size
from flashtrain.models.generate import generate
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.hardware import choose_device, choose_precision, device_name, peak_memory_gib
from flashtrain.training.loop import Loop
from flashtrain.training.memory import checkpoint_blocks
from flashtrain.training.meter import Diverged, Meter, Row
from flashtrain.training.preemption import Preemption
from flashtrain.training.progress import Display, complain
from flashtrain.training.run_folder import RunFolder, git_commit
from flashtrain.training.task import LanguageTask, fold_seed
from flashtrain.training.text import TextData
from flashtrain.training.trackers import Tracker, build_trackers

logger = logging.getLogger("flashtrain")

_COMPILE_FROM = 10_000_000  # parameters


def run(config: Config, changes: list[str]) -> int:
    """Train, or go on training, as configured; `changes` are what a resume changes, for the log.

    Returns:
        The exit code: 0 finished, 143 after SIGTERM, 130 after Ctrl-C, 1 otherwise.
    """
    try:
        folder = RunFolder.reopen(config.runs_dir, config.resume) if config.resume else RunFolder.create(config)
    except ValueError as error:
        complain(str(error))
        return 1
    if config.resume:
        folder.write_config(config)
    display = Display(folder.log, config.trainer.max_steps)
    this = _Run(config, folder, display)
    try:
        for change in changes:
            logger.info("changed on resume: %s", change)
        this.prepare()
        this.train()
    except Diverged as error:
        this.status, this.exit_code = "diverged", 1
        logger.error("%s", error)
    except KeyboardInterrupt:
        this.status, this.exit_code = "stopped", 130
    except torch.OutOfMemoryError as error:
        this.exit_code = 1
        logger.error("out of memory: %s", str(error).splitlines()[0])
        logger.error("the last checkpoint is whole; try memory=full, a smaller trainer.micro_batch_tokens, or seq_len")
    except (ValueError, OSError) as error:
        this.exit_code = 1
        logger.error("%s", error)
        logger.debug("%s", traceback.format_exc())
    except Exception:
        this.exit_code = 1
        logger.error("%s", traceback.format_exc())
    finally:
        this.finish()
        display.close()
    return this.exit_code


class _Run:
    """The parts of one run, put together."""

    def __init__(self, config: Config, folder: RunFolder, display: Display) -> None:
        self.config, self.folder, self.display = config, folder, display
        self.device: torch.device | None = None
        self.status, self.exit_code = "failed", 1
        self.trackers: list[Tracker] = []
        self.meter: Meter | None = None
        self.loop: Loop | None = None
        self.trainer: pl.Trainer | None = None
        self.facts: dict[str, Any] = {}

    def prepare(self) -> None:
        """Everything that can go wrong before the first step."""
        config = self.config
        device = self.device = choose_device(config.trainer.accelerator)
        self.precision = choose_precision(config.trainer, device)
        self.text = TextData(config)
        self.resume_from = self._checkpoint()
        torch.manual_seed(fold_seed(config.seed))
        self.task = LanguageTask(config, self.text.tokenizer.vocab_size)
        self.task.model.checkpoint_blocks = checkpoint_blocks(config, self.precision, device)
        self.facts = self._facts()
        for line in self._banner():
            logger.info("%s", line)
        if config.schedule.warmup_steps > config.trainer.max_steps:
            logger.warning(
                "schedule.warmup_steps=%d is more than trainer.max_steps=%d: the learning rate never reaches its peak",
                config.schedule.warmup_steps,
                config.trainer.max_steps,
            )
        if self._compiles():
            self.task.compile_model()

    def train(self) -> None:
        config = self.config
        assert self.device is not None
        path, first_step, owes_validation = self.resume_from or (None, 0, False)
        self.trackers = build_trackers(config, self.folder, first_step if config.resume else None)
        preemption = Preemption()
        self.meter = Meter(config, self.text.tokenizer.vocab_size, self.precision, self.device, self._row)
        saver = ckpt.Checkpoints(
            self.folder.checkpoints,
            config.trainer.checkpoint_every_n_steps,
            config.trainer.keep_checkpoints,
            config,
            self.text.identity,
        )
        self.task.give_up = lambda: preemption.requested
        self.loop = Loop(
            config, self.meter, saver, preemption, self.display, self._validate, self._sample, owes_validation
        )
        self.trainer = make_trainer(config, self.device, self.precision, [preemption, self.meter, saver, self.loop])
        self.trainer.fit(
            self.task,
            self.text.train_loader(first_step),
            ckpt_path=None if path is None else str(path),
            weights_only=True,
        )
        preemption.restore()
        self.meter.flush()
        self.status = "stopped" if preemption.requested else "finished"
        self.exit_code = preemption.exit_code
        if self.status == "finished":
            self._compare_with_trigrams()

    def finish(self) -> None:
        """Write the summary and close the trackers, whatever happened."""
        row = self.meter.last_row if self.meter else {}
        step = self.trainer.global_step if self.trainer else 0
        tokens_per_step = self.config.sequences_per_step * self.config.seq_len
        summary = {
            "run_id": self.folder.run_id,
            "status": self.status,
            "steps": step,
            "tokens": step * tokens_per_step,
            "train_loss": row.get("train_loss"),
            "val_loss": self.loop.val_loss if self.loop else None,
            "tokens_per_second": self.meter.tokens_per_second if self.meter else None,
            "mfu": self.meter.mfu if self.meter else None,
            "peak_memory_gib": peak_memory_gib(self.device) if self.device else None,
            "seq_len": self.config.seq_len,
            "model": self.config.model.name,
            "git_commit": git_commit(),
            **self.facts,
        }
        self.folder.write_summary(summary)
        for tracker in self.trackers:
            tracker.finish(self.status, summary)
        logger.info("%s after %d steps: %s", self.status, step, self.folder.path)
        if self.status == "stopped":
            logger.info("go on with: python train.py resume=%s", self.folder.run_id)

    def _compiles(self) -> bool:
        """Whether the model is compiled: as configured, or (`auto`) where that pays within a run of minutes."""
        assert self.device is not None
        if self.config.trainer.compile != "auto":
            return self.config.trainer.compile
        return self.device.type == "cuda" and self.task.model.num_parameters >= _COMPILE_FROM

    def _checkpoint(self) -> tuple[Path, int, bool] | None:
        """Path and step of the checkpoint to go on from, and whether that step still owes its validation."""
        found = ckpt.newest(self.folder.checkpoints) if self.config.resume else None
        if found is None:
            if self.config.resume:
                logger.info("%s stopped before its first checkpoint: starting it afresh", self.folder.run_id)
            return None
        path, checkpoint = found
        ckpt.check_identity(path, checkpoint, self.text.identity)
        about = checkpoint["flashtrain"]
        return path, int(about["step"]), bool(about["owes_validation"])

    def _facts(self) -> dict[str, Any]:
        """What the summary says beside the figures."""
        assert self.device is not None
        dtype = torch.float32 if self.precision == "32-true" else torch.bfloat16
        head = torch.empty(1, 1, 1, self.task.model.head_dim, dtype=dtype, device=self.device)
        return {
            "attention_backend": choose_backend(self.config.attention.backend, head),
            "device": device_name(self.device),
            "precision": self.precision,
            "parameters": self.task.model.parameter_counts(),
            "tokenizer": self.text.tokenizer.name,
            "corpus": self.text.corpus.description,
        }

    def _banner(self) -> list[str]:
        config, counts = self.config, self.facts["parameters"]
        parameters = f"{counts['total'] / 1e6:.1f}M parameters"
        if counts["without_position_table"] != counts["total"]:
            parameters += f" ({counts['without_position_table'] / 1e6:.1f}M without the position table)"
        per_step, per_micro = config.sequences_per_step, config.sequences_per_micro_batch
        blocks = "each block computed again in the backward pass" if self.task.model.checkpoint_blocks else "all kept"
        lines = [
            f"run {self.folder.run_id} in {self.folder.path}",
            f"model {config.model.name}: {parameters}, seq_len {config.seq_len} ({format_size(config.seq_len)})",
            f"data {self.text.corpus.description['name']}: {self.text.corpus.train.num_tokens:,} tokens to train on, "
            f"{self.text.corpus.val.num_tokens:,} held out, tokenizer {self.text.tokenizer.name}",
            f"step: {per_step} sequences, {per_step * config.seq_len:,} tokens, in micro-batches of {per_micro}",
            f"device {self.facts['device']}, {self.precision}, attention {self.facts['attention_backend']}, "
            f"{'compiled' if self._compiles() else 'not compiled'}",
            f"memory: activations {blocks}, logits of {config.memory.loss_chunk_tokens:,} tokens at once",
        ]
        if self.resume_from is not None:
            path, step, _ = self.resume_from
            tokens = step * per_step * config.seq_len
            lines.append(f"resuming after step {step} ({tokens:,} tokens) from {path}")
        return lines

    def _row(self, row: Row) -> None:
        for tracker in self.trackers:
            tracker.log(row)
        self.display.row(row)

    def _validate(self, last: bool) -> float | None:
        return self.task.validate(self.text.validation(last))

    def _sample(self, step: int) -> None:
        length = self.config.trainer.sample_tokens
        if length == 0:
            return
        assert self.trainer is not None
        tokenizer = self.text.tokenizer
        generator = torch.Generator().manual_seed(fold_seed(self.config.seed, step))
        with self.trainer.precision_plugin.val_step_context():
            ids = generate(
                self.task.model, [tokenizer.eod], length, generator=generator, plan_for=self.task.plan_of_length
            )
        text = tokenizer.decode(ids[1:])
        logger.info("sample at step %d:\n%s", step, text)
        for tracker in self.trackers:
            tracker.log_text(step, "sample", text)

    def _compare_with_trigrams(self) -> None:
        """Say what a table of byte trigrams makes of the same held-out text: the least that a model must beat."""
        if not self.text.has_yardstick or self.loop is None or self.loop.val_loss is None:
            return
        trigrams = self.text.yardstick()
        self.facts["trigram_val_loss"] = trigrams
        logger.info(
            "held-out loss %.4f nats a byte; a byte trigram table of the same data has %.4f",
            self.loop.val_loss,
            trigrams,
        )


def make_trainer(config: Config, device: torch.device, precision: str, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Lightning's loop with everything that it would do by itself and we do better switched off."""
    warnings.filterwarnings("ignore", module="lightning.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return pl.Trainer(
        accelerator=device.type,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        deterministic=config.trainer.deterministic,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
