"""Lightning's part in a run of several processes: none.

Each process runs the loop for itself, as if it were alone. Lightning's own strategies start processes that repeat the
command line (which breaks sweeps), stop at every micro-batch to ask for signals, and refuse FSDP2 on CPUs, where its
results are tested; what they do beside is little. What is left for a strategy is the checkpoint of a divided model:
one file, the same as that of a single process, so that any number of processes goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from flashtrain.training.distributed.processes import Processes
from flashtrain.training.distributed.replicas import divided_like, gathered


class OneOfSeveral(SingleDeviceStrategy):
    """One process of several: checkpoints are put together by all and written by the first."""

    def __init__(self, device: torch.device, processes: Processes) -> None:
        super().__init__(device=device)
        self.processes = processes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        whole = gathered(checkpoint, self.processes.is_first)
        if self.processes.is_first:
            super().save_checkpoint(whole, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = {name: divided_like(tensor, own.get(name, tensor)) for name, tensor in checkpoint["state_dict"].items()}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            self._divided(optimizer, state)
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    @staticmethod
    def _divided(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimiser's stored state, divided as its parameters are."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        of = dict(zip(numbers, parameters, strict=True))
        moments = {
            number: {
                name: divided_like(value, of[number]) if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": moments}
