"""Reading checkpoints that training wrote: PyTorch alone is enough."""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("flashtrain")

KIND = "flashtrain checkpoint 1"


def existing(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first: files, and folders with a file of each process."""
    return sorted(folder.glob("step-*.ckpt"))


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of one checkpoint, not of a run: a file, or a folder of that name."""
    return path.is_file() or (path.is_dir() and path.suffix == ".ckpt")


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, of either kind; of a folder the name goes first, so that it is never found half-removed."""
    if checkpoint.is_dir():
        going = checkpoint.with_suffix(".removed")
        shutil.rmtree(going, ignore_errors=True)
        checkpoint.rename(going)
        shutil.rmtree(going)
    else:
        checkpoint.unlink(missing_ok=True)


def weights_of(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """The model's weights by name: the averaged ones where the run kept such, and whether it did."""
    weights = {name.removeprefix("model."): tensor for name, tensor in checkpoint["state_dict"].items()}
    average: dict[str, Tensor] = checkpoint.get("average") or {}
    return weights | average, bool(average)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU, read without running code from it: of a file, or put together from a folder.

    Raises:
        ValueError: not a checkpoint of flashtrain, or cut short.
    """
    checkpoint = outlined(path)
    if path.is_dir():
        from flashtrain.interchange.shards import fill, in_host_memory  # half a second, which files do not need

        checkpoint = fill(checkpoint, path, in_host_memory)
    return checkpoint


def outlined(path: Path) -> dict[str, Any]:
    """As `load`, but of tensors that lie divided in a folder the shapes alone, on the meta device.

    Raises:
        ValueError: as `load`.
    """
    if path.is_dir():
        from flashtrain.interchange.shards import outline

        checkpoint = outline(path)
    else:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ValueError(f"{path}: not a readable checkpoint ({_why(path, error)})") from error
    about = checkpoint.get("flashtrain") if isinstance(checkpoint, dict) else None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise ValueError(f"{path}: not a checkpoint of this version of flashtrain")
    found: dict[str, Any] = checkpoint
    return found


def _why(path: Path, error: Exception) -> str:
    """What is wrong with a file that PyTorch cannot read."""
    if path.is_file() and not path.stat().st_size:
        return "it is empty"
    if path.is_file() and not zipfile.is_zipfile(path):
        return "it was cut short, or is another kind of file"
    return str(error).splitlines()[0]


def newest(folder: Path, read: Callable[[Path], dict[str, Any]] = load) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, by `load` or `outlined`; None if the run stopped before its first.

    A newer one that cannot be read is named in the log: what comes is older than one might think.

    Raises:
        ValueError: there are checkpoints and none can be read.
    """
    problems = []
    for path in reversed(existing(folder)):
        try:
            found = path, read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("%s; taking %s", problem, path.name)
        return found
    if problems:
        raise ValueError("no checkpoint can be read: " + "; ".join(problems))
    return None
