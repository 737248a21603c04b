"""Writing a divided model's checkpoint as a folder, each process its own part; `interchange.shards` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from flashtrain.interchange.shards import UNDIVIDED, UnreadableShard, outline, with_each_tensor
from flashtrain.training.distributed.processes import Processes


def is_divided(state: dict[str, Any]) -> bool:
    """Whether processes hold parts of these tensors."""
    return any(isinstance(value, DTensor) for value in state.values())


def write_parts(checkpoint: dict[str, Any], folder: Path, processes: Processes) -> None:
    """Write a checkpoint into a new folder; all processes call it. What all of them hold is written once.

    Raises:
        OSError: one of them could not write; the same in all of them.
    """
    if processes.is_first:
        folder.mkdir()
    processes.meet()
    divided: dict[str, Tensor] = {}

    def outlined(place: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        divided[place] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    rest = with_each_tensor(checkpoint, outlined)
    try:
        dcp.save(dict(divided), storage_writer=dcp.FileSystemWriter(folder), process_group=processes.hosts)
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {reason}") from error
    if processes.is_first:
        torch.save(rest, folder / UNDIVIDED)
        try:
            outline(folder)
        except UnreadableShard as error:
            raise OSError(f"{error}; all machines must see the same runs_dir") from error
