"""Training text with recall tasks mixed in, so that a model learns early to look far back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.data.recall import any_task
from flashtrain.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class WithRecall:
    """The batches of each step, some of whose rows are recall tasks instead, new ones at every step.

    Only the answers of a task are targets. What comes is a function of the step, as the text is.

    Attributes:
        batches_of: the micro-batches of an optimiser step.
        share: of the rows that are replaced, 0 to 1, on average.
        seed: of the choice of rows and of the tasks.
        rank: which share of a step `batches_of` gives; all shares have equally many micro-batches.
    """

    batches_of: Callable[[int], list[Batch]]
    tokenizer: Tokenizer
    share: float
    seed: int
    rank: int = 0

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of optimiser step `step`."""
        batches = self.batches_of(step)
        return [self._mixed(batch, step, number) for number, batch in enumerate(batches, self.rank * len(batches))]

    def _mixed(self, batch: Batch, step: int, number: int) -> Batch:
        seeds = self._seeds(step, number * len(batch.tokens), len(batch.tokens))
        if not seeds:
            return batch
        chosen = list(seeds)
        tokens, targets, length = batch.tokens.clone(), batch.targets.clone(), batch.tokens.shape[1]
        for row, seed in seeds.items():
            task = any_task(self.tokenizer, length, seed)
            tokens[row], targets[row] = torch.from_numpy(task.tokens), torch.from_numpy(task.targets)
        counted = int((targets != IGNORE).sum())
        mixed = replace(batch, tokens=tokens, targets=targets, num_targets=counted)
        if batch.documents is None or batch.positions is None:
            return mixed
        positions = batch.positions.clone()
        positions[chosen] = torch.arange(length)
        documents = tuple((length,) if row in seeds else lengths for row, lengths in enumerate(batch.documents))
        return replace(mixed, positions=positions, documents=documents)

    def _seeds(self, step: int, first: int, count: int) -> dict[int, int]:
        """Which of `count` rows are tasks, and the seed of each. `first`: rows of the step before them, by which they
        draw: however a step is cut into micro-batches and shared, it has the same tasks."""
        draws = [np.random.default_rng((self.seed, step, row)) for row in range(first, first + count)]
        return {row: int(draw.integers(2**31)) for row, draw in enumerate(draws) if draw.random() < self.share}
