"""Batches that are a function of the optimiser step, read ahead by other processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, Sampler

from flashtrain.training.distributed.processes import EXIT_CODES

_Batch = TypeVar("_Batch")


def step_loader(batches: Callable[[int], list[_Batch]], first_step: int, num_workers: int) -> DataLoader[list[_Batch]]:
    """Yields `batches(first_step)`, then those of the next step, without end."""
    return DataLoader(
        _Steps(batches),
        batch_size=None,
        sampler=_From(first_step),
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals_to_the_parent,
    )


class _Steps(Dataset[list[_Batch]]):
    def __init__(self, batches: Callable[[int], list[_Batch]]) -> None:
        self.batches = batches

    def __getitem__(self, step: int) -> list[_Batch]:
        return self.batches(step)


class _From(Sampler[int]):
    """first, first + 1, ... It has no length: `trainer.max_steps` ends the training."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        step = self.first
        while True:
            yield step
            step += 1


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal, and Slurm's signals every process of a job; a reader that died of it
    would take the last steps with it."""
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(item: Any) -> Any:
    return item
