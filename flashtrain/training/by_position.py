"""The loss of a token by how much stands before it, in bins that double: does a long context help?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtrain.models.loss import IGNORE


def log_bins(seq_len: int) -> list[tuple[int, int]]:
    """First position of each bin, and the one behind its last: 0, 1, 2 to 3, 4 to 7, ... below seq_len."""
    starts = [0, *(2**power for power in range(seq_len.bit_length()) if 2**power < seq_len)]
    return list(zip(starts, [*starts[1:], seq_len], strict=True))


def columns(seq_len: int) -> list[str]:
    """Names of the bins in metrics."""
    return [f"val_loss_at_{start}" for start, _ in log_bins(seq_len)]


class LossByPosition:
    """Sums of losses and targets in each bin.

    Args:
        seq_len: tokens in the longest sequence.
    """

    def __init__(self, seq_len: int, device: torch.device) -> None:
        self.bins = log_bins(seq_len)
        self.sums = torch.zeros(2, len(self.bins), dtype=torch.float64, device=device)

    def add(self, losses: Tensor, targets: Tensor, positions: Tensor | None = None) -> None:
        """Take in the losses of a batch.

        Args:
            losses: [batch, seq], one a token.
            targets: int64 [batch, seq], IGNORE where there is nothing to predict.
            positions: int64 [batch, seq], of the token that predicts; None counts 0..seq-1.
        """
        if positions is None:
            positions = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
        starts = torch.tensor([start for start, _ in self.bins], device=targets.device)
        bins, counted = torch.searchsorted(starts, positions.contiguous(), right=True) - 1, targets != IGNORE
        for row, values in enumerate((losses, counted)):
            self.sums[row].index_add_(0, bins[counted], values[counted].double())

    def rows(self) -> list[dict[str, float | int | None]]:
        """first and last position, targets, mean loss in nats (None without any) of each bin."""
        losses, counts = self.sums.tolist()
        return [
            {"first": start, "last": end - 1, "targets": int(count), "loss": total / count if count else None}
            for (start, end), total, count in zip(self.bins, losses, counts, strict=True)
        ]

    def figures(self) -> dict[str, float]:
        """val_loss_at_<first position> of each bin that has targets, for metrics."""
        found = zip(columns(self.bins[-1][1]), self.rows(), strict=True)
        return {name: loss for name, row in found if (loss := row["loss"]) is not None}

    def mean(self) -> float:
        """Over all targets."""
        total, count = self.sums.sum(dim=1).tolist()
        return total / count if count else math.nan
