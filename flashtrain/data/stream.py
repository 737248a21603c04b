"""The batches of training, a pure function of the optimiser step, and those of validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.data.order import shuffled_many
from flashtrain.data.packing import Sequences


class StepBatches:
    """The micro-batches of each optimiser step.

    Global position p = step * sequences_per_step + i counts all sequences ever trained on; p // len(sequences) is the
    epoch, and the epoch's own permutation says which sequence stands there. So any step can be had at any time,
    resuming needs the step only, and the sequences of a step do not depend on how many ranks share them.
    """

    def __init__(
        self,
        sequences: Sequences,
        sequences_per_step: int,
        sequences_per_micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """sequences_per_step: over all ranks. ValueError unless it divides into whole micro-batches on each rank."""
        if min(sequences_per_step, sequences_per_micro_batch) < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"sequences_per_step={sequences_per_step}, sequences_per_micro_batch={sequences_per_micro_batch}, "
                f"rank={rank}, world_size={world_size}: sizes must be at least 1 and the rank below world_size"
            )
        if sequences_per_step % (world_size * sequences_per_micro_batch):
            raise ValueError(
                f"trainer.batch_tokens gives {sequences_per_step} sequences a step, which {world_size} devices cannot "
                f"share in whole micro-batches of {sequences_per_micro_batch} sequences (trainer.micro_batch_tokens); "
                f"make it a multiple of {world_size * sequences_per_micro_batch} sequences"
            )
        self.sequences = sequences
        self.sequences_per_step = sequences_per_step
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Optimiser steps in one epoch, the last of them begun but perhaps not filled by it."""
        return -(-len(self.sequences) // self.sequences_per_step)

    def indices(self, step: int) -> np.ndarray:
        """The numbers of this rank's sequences in optimiser step ``step`` (from 0), int64 [sequences of the rank]."""
        share = self.sequences_per_step // self.world_size
        first = step * self.sequences_per_step + self.rank * share
        positions = np.arange(first, first + share)
        epochs, places = np.divmod(positions, len(self.sequences))
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = shuffled_many(places[here], len(self.sequences), self.seed, epoch)
        return places

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimiser step ``step``."""
        indices, size = self.indices(step).tolist(), self.sequences_per_micro_batch
        return [_batch(self.sequences, indices[at : at + size]) for at in range(0, len(indices), size)]


def validation_batches(
    sequences: Sequences,
    sequences_per_micro_batch: int,
    limit: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Held-out sequences, each once, always in the same order; the last batch may be smaller.

    limit: at most so many sequences over all ranks, spread evenly over the whole set; None = all. Ranks take turns,
    without duplicates, so a rank may have one batch fewer than another, or none.
    """
    number = len(sequences) if limit is None else min(limit, len(sequences))
    indices = [place * len(sequences) // number for place in range(rank, number, world_size)]
    for at in range(0, len(indices), sequences_per_micro_batch):
        yield _batch(sequences, indices[at : at + sequences_per_micro_batch])


def _batch(sequences: Sequences, indices: Sequence[int]) -> Batch:
    rows = [sequences.sequence(index) for index in indices]
    targets = np.stack([row.targets for row in rows])
    borders = sequences.document_borders
    return Batch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])) if borders else None,
        documents=tuple(row.document_lengths for row in rows) if borders else None,
        num_targets=int(np.count_nonzero(targets != IGNORE)),
    )
