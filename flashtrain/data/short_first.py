"""Short sequences first: in the first steps the sequences of a step are cut into pieces, which double to whole ones.

A piece attends to nothing before itself, so that early steps cost less attention. The tokens of a step, their targets
and their order stay what they are, and the length is a function of the step: a resume has nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashtrain.data.batch import Batch
from flashtrain.data.stream import StepBatches


def lengths(first: int, seq_len: int) -> list[int]:
    """seq_len and its halves, quarters and so on that are whole and no shorter than `first`, the shortest first."""
    found = [seq_len]
    while found[-1] % 2 == 0 and found[-1] // 2 >= first:
        found.append(found[-1] // 2)
    return found[::-1]


@dataclass(frozen=True)
class ShortFirst:
    """The batches of each step, cut while the length grows.

    Attributes:
        steps: the batches as they are.
        seq_len: tokens in a whole sequence.
        first: tokens in the shortest piece, at least.
        warmup_steps: optimiser steps with pieces; each length has the same share of them.
    """

    steps: StepBatches
    seq_len: int
    first: int
    warmup_steps: int

    def length_at(self, step: int) -> int:
        """Tokens in a piece at optimiser step `step`, from 0."""
        if step >= self.warmup_steps:
            return self.seq_len
        shorter = lengths(self.first, self.seq_len)[:-1] or [self.seq_len]
        return shorter[step * len(shorter) // self.warmup_steps]

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of optimiser step `step`."""
        return [cut(batch, self.length_at(step)) for batch in self.steps.batches(step)]


def cut(batch: Batch, length: int) -> Batch:
    """Each row of a batch as rows of `length` tokens, which divides it; a piece is a row like any other."""
    if length == batch.tokens.shape[1]:
        return batch
    tokens, targets = batch.tokens.reshape(-1, length), batch.targets.reshape(-1, length)
    if batch.documents is None:
        return replace(batch, tokens=tokens, targets=targets)
    documents = tuple(piece for row in batch.documents for piece in _cut_documents(row, length))
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in documents])
    return replace(batch, tokens=tokens, targets=targets, documents=documents, positions=positions)


def _cut_documents(row: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """The document lengths of each piece of a row; a document over a cut goes on as another one."""
    pieces: list[tuple[int, ...]] = []
    piece: list[int] = []
    left = length
    for document in row:
        while document:
            taken = min(document, left)
            piece.append(taken)
            document, left = document - taken, left - taken
            if left == 0:
                pieces.append(tuple(piece))
                piece, left = [], length
    return pieces
