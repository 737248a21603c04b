"""Checkpoints: the newest few, each written whole or not at all, and enough in them to refuse a wrong resume."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from flashtrain.config import Config, to_dict
from flashtrain.interchange.stored import KIND, existing, is_checkpoint, load, newest, outlined, remove, weights_of
from flashtrain.training.curriculum import Progress
from flashtrain.training.distributed.processes import ALONE, Processes, lost_a_process

__all__ = [
    "Checkpoints",
    "Identity",
    "Start",
    "check_identity",
    "existing",
    "is_checkpoint",
    "load",
    "newest",
    "weights_of",
]


@dataclass(frozen=True)
class Identity:
    """What must be the same for a checkpoint to fit a run."""

    vocab_size: int
    tokenizer: str  # name
    tokenizer_fingerprint: str
    corpus_fingerprint: str


class Checkpoints(pl.Callback):
    """Saves every n steps and when asked to; keeps the newest `keep`."""

    def __init__(
        self,
        folder: Path,
        every_n_steps: int,
        keep: int,
        config: Config,
        identity: Identity,
        processes: Processes = ALONE,
    ) -> None:
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.config = config
        self.identity = identity
        self.processes = processes
        self.saved_step: int | None = None
        self.progress = Progress()
        self._owes_validation = False

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["flashtrain"] = {
            "kind": KIND,
            "step": trainer.global_step,
            "owes_validation": self._owes_validation,
            "progress": dataclasses.asdict(self.progress),
            "config": to_dict(self.config),
            "identity": dict(vars(self.identity)),
        }

    def save(self, trainer: pl.Trainer, owes_validation: bool) -> Path:
        """Write the checkpoint of this step.

        owes_validation: the step's validation was due and has not been finished.

        Raises:
            OSError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        step, self._owes_validation = trainer.global_step, owes_validation
        path = self.folder / f"step-{step:08d}.ckpt"
        if self.saved_step == step:
            return path
        temporary, first = path.with_suffix(".partial"), self.processes.is_first
        try:
            if first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._clear()
            trainer.save_checkpoint(temporary)  # of several processes each its part of it, or the first one all
            if first:
                _publish(temporary, path)
        except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
            if first:
                self._clear()
            if isinstance(error, torch.OutOfMemoryError) or lost_a_process(error):
                raise
            free = shutil.disk_usage(self.folder).free / 2**20
            raise OSError(
                f"could not save the checkpoint {path} ({error}); {free:.0f} MiB are free there. "
                "Earlier checkpoints are whole: make room and resume"
            ) from error
        self.saved_step = step
        if first:
            for old in existing(self.folder)[: -self.keep]:
                remove(old)
        return path

    def _clear(self) -> None:
        """Remove what saves and removals that were killed have left."""
        for left in (*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.removed")):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from: file or folder, content (of a folder `outlined`), the steps done, whether the last of
    them owes its validation."""

    path: Path
    content: dict[str, Any]
    step: int
    owes_validation: bool
    progress: Progress

    @classmethod
    def at_newest(cls, folder: Path) -> Start | None:
        """The newest checkpoint that can be read, see `newest`."""
        found = newest(folder, outlined)
        if found is None:
            return None
        path, content = found
        about = content["flashtrain"]
        progress = Progress(**about.get("progress", {}))
        return cls(path, content, int(about["step"]), bool(about["owes_validation"]), progress)


def check_identity(path: Path, checkpoint: dict[str, Any], identity: Identity) -> None:
    """Refuse to go on with another tokenizer, vocabulary or corpus than the checkpoint's.

    Raises:
        ValueError: naming what differs, with both values.
    """
    saved = checkpoint["flashtrain"]["identity"]
    differing = [
        f"{name} was {saved.get(name)!r} and is {value!r}"
        for name, value in vars(identity).items()
        if saved.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{path} does not fit this run: {'; '.join(differing)}. Resume with the same data and tokenizer"
        )


def _publish(temporary: Path, path: Path) -> None:
    """Give a written checkpoint its name, once all its bytes are on disk.

    Nothing replaces a folder, or a file by a folder, in one go: an earlier one of the same step is kept under another
    name that is found too until the new one has its own.
    """
    for written in (*(temporary.iterdir() if temporary.is_dir() else ()), temporary):
        _flush(written)
    if path.is_dir() or (temporary.is_dir() and path.exists()):
        before = path.with_suffix(".before.ckpt")
        if before.exists():
            remove(before)
        path.rename(before)
        temporary.rename(path)
        remove(before)
    else:
        temporary.replace(path)


def _flush(path: Path) -> None:
    """Make sure the bytes are on disk before the name is given to them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
