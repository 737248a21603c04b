"""One micro-batch of language-model training, as the data package hands it to the training loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

IGNORE = -100
"""Target value of a position that has nothing to predict (the default ``ignore_index`` of PyTorch's cross entropy)."""


@dataclass
class Batch:
    """A micro-batch of ``batch`` sequences of ``seq`` tokens.

    tokens: int64 [batch, seq].
    targets: int64 [batch, seq], the token that follows each one; IGNORE where there is nothing to predict.
    positions: int64 [batch, seq], restarting at 0 at document borders; None means 0..seq-1 in every row.
    documents: the document lengths of each row, each row's sum being ``seq``; None means that borders are not cut.
    num_targets: how many targets are not IGNORE.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    documents: tuple[tuple[int, ...], ...] | None
    num_targets: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on ``device``; ``non_blocking`` as in ``torch.Tensor.to``."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            targets=self.targets.to(device, non_blocking=non_blocking),
            positions=None if self.positions is None else self.positions.to(device, non_blocking=non_blocking),
        )

    def copy_(self, other: Batch) -> None:
        """Write another batch of the same shapes into this one's memory; a copy to a GPU does not wait for it."""
        assert self.documents == other.documents, "batches with the same borders"
        for name in ("tokens", "targets", "positions"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.copy_(its, non_blocking=True)
        self.num_targets = other.num_targets

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, from which a ``non_blocking`` copy to a GPU overlaps with work."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            targets=self.targets.pin_memory(),
            positions=None if self.positions is None else self.positions.pin_memory(),
        )
