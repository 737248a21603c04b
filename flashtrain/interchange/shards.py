"""Checkpoints of which each process has written its own part: folders in the format of torch.distributed.checkpoint.

In such a folder lie

    undivided.pt    the checkpoint as a single file has it, with the shape of each divided tensor in its place
    .metadata       where in which file each part of each divided tensor lies
    __<n>_0.distcp  the parts that process n has written
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

UNDIVIDED = "undivided.pt"
_INDEX = ".metadata"


class UnreadableShard(ValueError):
    """A file of a divided checkpoint is missing, cut short or damaged; the message names it."""


def outline(folder: Path) -> Any:
    """What a divided checkpoint holds: divided tensors are on the meta device, of the whole one's shape; see `fill`.

    Raises:
        UnreadableShard: naming the file, before any part is read.
    """
    for name in (UNDIVIDED, _INDEX):
        _check(folder / name, 1)
    try:
        content = torch.load(folder / UNDIVIDED, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UnreadableShard(f"{folder / UNDIVIDED}: is damaged ({str(error).splitlines()[0]})") from error
    ends: dict[str, int] = {}
    for info in _Reader(folder).read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(ends.items()):
        _check(folder / name, size)
    return content


def fill(tree: Any, folder: Path, room: Callable[[str, Tensor], Tensor]) -> Any:
    """A tree of `outline` with its divided tensors read from `folder`.

    Args:
        tree: dicts, lists and tuples of anything.
        room: from a tensor's place (`optimizer_states.0.state.3.exp_avg`) and its outline to the memory that it is read
            into; of a divided one (DTensor) only what lies here is read.

    Raises:
        UnreadableShard: naming the file.
    """
    rooms: dict[str, Tensor] = {}

    def with_room(place: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            rooms[place] = tensor = room(place, tensor)
        return tensor

    tree = with_each_tensor(tree, with_room)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it reads without the other processes
            dcp.load(dict(rooms), storage_reader=_Reader(folder), no_dist=True)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, UnreadableShard):
            raise reason from error
        raise UnreadableShard(f"{folder}: cannot be read ({str(reason).splitlines()[0]})") from error
    return tree


def in_host_memory(place: str, outlined: Tensor) -> Tensor:
    """Room for the whole of a tensor."""
    return torch.empty_like(outlined, device="cpu")


def with_each_tensor(tree: Any, change: Callable[[str, Tensor], Tensor], place: str = "") -> Any:
    """A tree with each tensor replaced by what `change` makes of its place and of it."""
    if isinstance(tree, Tensor):
        return change(place, tree)
    if isinstance(tree, dict):
        return {
            key: with_each_tensor(value, change, f"{place}.{key}" if place else str(key)) for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(with_each_tensor(value, change, f"{place}.{n}") for n, value in enumerate(tree))
    return tree


def _check(path: Path, size: int) -> None:
    if not path.is_file():
        raise UnreadableShard(f"{path}: is missing")
    if path.stat().st_size < size:
        raise UnreadableShard(f"{path}: is cut short, {path.stat().st_size} of at least {size} bytes are there")


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, which runs no code from the index and names the file that it cannot read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self.path) / _INDEX
        try:
            with path.open("rb") as file:
                found: metadata.Metadata = _Index(file).load()
        except Exception as error:
            raise UnreadableShard(f"{path}: is damaged ({str(error).splitlines()[0]})") from error
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(LoadPlan(items), planner)
            except Exception as error:
                path = Path(self.path) / name
                raise UnreadableShard(f"{path}: is damaged ({str(error).splitlines()[0]})") from error
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class _Index(pickle.Unpickler):
    """Takes the few types that an index is made of; a pickle could name any function otherwise."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePath  # where the folder lay when it was written
        known = {known.__name__: known for known in (metadata, filesystem)}
        found = getattr(known.get(module), name, None)
        if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")
