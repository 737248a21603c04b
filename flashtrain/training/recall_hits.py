"""What a model finds again far behind: the share of the asked tokens that it takes for the likeliest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashtrain.data.recall import TASKS
from flashtrain.models.loss import IGNORE

COLUMNS = tuple(f"val_recall_{task}" for task in TASKS)
"""Names in metrics."""


class RecallHits:
    """Asked tokens of each task, and how many of them are the likeliest: sums, which add up over processes."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, len(TASKS), dtype=torch.float64, device=device)

    def add(self, right: Tensor, targets: Tensor, tasks: Sequence[int]) -> None:
        """Take in a batch, or the part that a process has of it.

        Args:
            right: bool [batch, seq], whether the target is the likeliest token.
            targets: int64 [batch, seq], IGNORE where nothing is asked.
            tasks: of each row its place in TASKS.
        """
        places = torch.tensor(tasks, device=targets.device)
        for row, values in enumerate((right, targets != IGNORE)):
            self.sums[row].index_add_(0, places, values.sum(dim=1).double())

    def figures(self) -> dict[str, float]:
        """val_recall_<task> of each task that was asked, for metrics."""
        hits, asked = self.sums.tolist()
        return {name: right / count for name, right, count in zip(COLUMNS, hits, asked, strict=True) if count}
