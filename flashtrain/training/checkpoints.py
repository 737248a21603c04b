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
from torch import Tensor

from flashtrain.config import Config, to_dict
from flashtrain.training.curriculum import Progress

_KIND = "flashtrain checkpoint 1"


@dataclass(frozen=True)
class Identity:
    """What must be the same for a checkpoint to fit a run."""

    vocab_size: int
    tokenizer: str  # name
    tokenizer_fingerprint: str
    corpus_fingerprint: str


class Checkpoints(pl.Callback):
    """Saves every n steps and when asked to; keeps the newest `keep`."""

    def __init__(self, folder: Path, every_n_steps: int, keep: int, config: Config, identity: Identity) -> None:
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.config = config
        self.identity = identity
        self.saved_step: int | None = None
        self.progress = Progress()
        self._owes_validation = False

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["flashtrain"] = {
            "kind": _KIND,
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
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial")
        try:
            trainer.save_checkpoint(temporary)
            _flush(temporary)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
            temporary.unlink(missing_ok=True)
            free = shutil.disk_usage(self.folder).free / 2**20
            raise OSError(
                f"could not save the checkpoint {path} ({error}); {free:.0f} MiB are free there. "
                "Earlier checkpoints are whole: make room and resume"
            ) from error
        self.saved_step = step
        for old in existing(self.folder)[: -self.keep]:
            old.unlink()
        return path


def existing(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from: file and content, the steps done, whether the last of them owes its validation."""

    path: Path
    content: dict[str, Any]
    step: int
    owes_validation: bool
    progress: Progress

    @classmethod
    def at_newest(cls, folder: Path) -> Start | None:
        """The newest checkpoint that can be read, see `newest`."""
        found = newest(folder)
        if found is None:
            return None
        path, content = found
        about = content["flashtrain"]
        progress = Progress(**about.get("progress", {}))
        return cls(path, content, int(about["step"]), bool(about["owes_validation"]), progress)


def weights_of(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """The model's weights by name: the averaged ones where the run kept such, and whether it did."""
    weights = {name.removeprefix("model."): tensor for name, tensor in checkpoint["state_dict"].items()}
    average: dict[str, Tensor] = checkpoint.get("average") or {}
    return weights | average, bool(average)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU, read without running code from it.

    Raises:
        ValueError: not a checkpoint of flashtrain, or cut short.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path}: not a readable checkpoint ({str(error).splitlines()[0]})") from error
    about = checkpoint.get("flashtrain") if isinstance(checkpoint, dict) else None
    if not isinstance(about, dict) or about.get("kind") != _KIND:
        raise ValueError(f"{path}: not a checkpoint of this version of flashtrain")
    return checkpoint


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read; None if the run stopped before its first.

    Raises:
        ValueError: there are checkpoints and none can be read.
    """
    problems = []
    for path in reversed(existing(folder)):
        try:
            return path, load(path)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("no checkpoint can be read: " + "; ".join(problems))
    return None


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


def _flush(path: Path) -> None:
    """Make sure the bytes are on disk before the name is given to them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
