"""Sequences that several processes share: what each gets of a batch, and attention over all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.attention import Mask, Plan, attention
from flashtrain.data.batch import Batch
from flashtrain.models.recompute import also_keep
from flashtrain.parallel import ContextParallel, positions_of, shard
from flashtrain.training.distributed.processes import Processes


class SharedSequences:
    """The part of a process in the sequences that it shares with its neighbours.

    Args:
        processes: those of the run; each `processes.context` of them by rank share sequences.
        method: ring or ulysses.
        backend: kernels of attention.
    """

    def __init__(self, processes: Processes, method: Literal["ring", "ulysses"], backend: str) -> None:
        self.part, self.parts, self.backend = processes.part, processes.context, backend
        group, _ = dist.new_subgroups(group_size=self.parts)
        self.parallel = ContextParallel(group, method, backend)
        also_keep(torch.ops.flashtrain.ring_forward.default)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """Attention by any plan: of `lower`, or of whole sequences, as samples of text are made."""
        if isinstance(plan, Plan):
            return attention(q, k, v, plan, backend=self.backend)
        return self.parallel(q, k, v, plan)

    def lower(self, mask: Mask, rows: int, seq_len: int, device: torch.device) -> Any:
        """The plan of this process's tokens for a mask of whole sequences."""
        return self.parallel.lower(mask, rows, seq_len, device)

    def own(self, batch: Batch) -> Batch:
        """This process's tokens of each row, with their places in the whole one; `documents` stay those of all."""
        rows, seq_len = batch.tokens.shape
        if batch.positions is None:
            positions = positions_of(seq_len, self.part, self.parts).expand(rows, -1)
        else:
            positions = shard(batch.positions, self.part, self.parts)
        tokens, targets = (shard(tensor, self.part, self.parts) for tensor in (batch.tokens, batch.targets))
        return replace(batch, tokens=tokens, targets=targets, positions=positions)
