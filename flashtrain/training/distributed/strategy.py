"""Lightning's part in a run of several processes: none.

Each process runs the loop for itself, as if it were alone. Lightning's own strategies start processes that repeat the
command line (which breaks sweeps), stop at every micro-batch to ask for signals, and refuse FSDP2 on CPUs, where its
results are tested; what they do beside is little. What is left for a strategy are the checkpoints of a divided model:
one file, or a folder into which each process writes its part. Any number of processes goes on from either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from flashtrain.interchange.shards import fill
from flashtrain.interchange.stored import load, outlined
from flashtrain.training.distributed.processes import Processes
from flashtrain.training.distributed.replicas import divided_like, gathered, room_like
from flashtrain.training.distributed.writing import is_divided, write_parts


class ReadsEither(TorchCheckpointIO):
    """A single process's checkpoints: one file; it goes on from a folder of several processes too."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return load(Path(path)) if Path(path).is_dir() else super().load_checkpoint(path, *args, **kwargs)


class OneOfSeveral(SingleDeviceStrategy):
    """One process of several.

    Args:
        sharded: each process writes its part of a divided model; otherwise the first writes all of it.
    """

    def __init__(self, device: torch.device, processes: Processes, sharded: bool = False) -> None:
        super().__init__(device=device)
        self.processes, self.sharded = processes, sharded
        self._folder: Path | None = None  # from which the optimiser's state is still to be read

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.sharded and is_divided(checkpoint["state_dict"]):
            write_parts(checkpoint, Path(filepath), self.processes)
            return
        whole = gathered(checkpoint, self.processes.is_first)
        if self.processes.is_first:
            super().save_checkpoint(whole, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A file whole; of a folder what this process holds, but for the optimiser's state, which comes later."""
        path = Path(checkpoint_path)
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.lightning_module is not None
        checkpoint, own = outlined(path), self.lightning_module.state_dict()

        def room(place: str, outline: Tensor) -> Tensor:
            kind, name = place.split(".", 1)
            return room_like(own.get(f"model.{name}" if kind == "average" else name), outline)

        self._folder, states = path, checkpoint.pop("optimizer_states", [])
        return {**fill(checkpoint, path, room), "optimizer_states": states}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = {name: divided_like(tensor, own.get(name, tensor)) for name, tensor in checkpoint["state_dict"].items()}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self._folder is not None:
            states = self._filled(states, self._folder)
        states = [self._divided(*pair) for pair in zip(self.optimizers, states, strict=False)]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def _filled(self, states: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
        """The states of `outlined` with what this process holds of each tensor."""

        def room(place: str, outline: Tensor) -> Tensor:
            _, which, _, number, _ = place.split(".", 4)
            parameters = _numbered(self.optimizers[int(which)], states[int(which)])
            return room_like(parameters.get(int(number)), outline)

        filled: dict[str, list[dict[str, Any]]] = fill({"optimizer_states": states}, folder, room)
        return filled["optimizer_states"]

    @staticmethod
    def _divided(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimiser's stored state, divided as its parameters are."""
        of = _numbered(optimizer, state)
        moments = {
            number: {
                name: divided_like(value, of[number]) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": moments}


def _numbered(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[int, Tensor]:
    """An optimiser's parameters by their numbers in its stored state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(numbers, parameters, strict=True))
