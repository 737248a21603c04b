"""Reading checkpoints that training wrote: PyTorch alone is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KIND = "flashtrain checkpoint 1"


def existing(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


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
    if not isinstance(about, dict) or about.get("kind") != KIND:
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
