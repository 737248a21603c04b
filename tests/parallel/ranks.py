"""Processes that play the ranks of a group: started once, then given one call after another."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PATIENCE = 120.0  # seconds for one call


class Ranks:
    """`size` processes, joined by gloo."""

    def __init__(self, size: int, folder: Path) -> None:
        _CONTEXT.set_forkserver_preload(["flashtrain.parallel"])
        self.size = size
        self._ends, self._processes = [], []
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, size, folder / "store", there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, size, *args) on all ranks at the same time: their results, in the order of ranks.

        Raises:
            AssertionError: with the traceback of the first rank that failed, or did not come back.
        """
        for end in self._ends:
            end.send((function, args))
        results = []
        for rank, end in enumerate(self._ends):
            assert end.poll(_PATIENCE), f"rank {rank} of {self.size} did not come back"
            ok, result = end.recv()
            assert ok, f"rank {rank} of {self.size}:\n{result}"
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, store: Path, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=_PATIENCE)
    )
    while True:
        function, args = end.recv()
        try:
            end.send((True, function(rank, size, *args)))
        except Exception:
            end.send((False, traceback.format_exc()))
