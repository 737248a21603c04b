"""Recall tasks for validation: the same ones each time, so that validations compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.data.recall import (
    TASKS,
    Example,
    associative_recall,
    induction,
    passkey,
    shortest_passkey,
    spread_depths,
)
from flashtrain.data.tokenizers import Tokenizer

PASSKEYS, OTHERS = 8, 4  # rows of the one task, and of each other one


@dataclass
class RecallBatch(Batch):
    """A batch of recall tasks, whose losses are no part of the held-out text's.

    tasks: of each row its place in TASKS.
    num_targets: 0, since the mean loss of a validation is over its text.
    """

    tasks: tuple[int, ...]


def recall_batches(tokenizer: Tokenizer, length: int, rows: int, document_borders: bool) -> Iterator[RecallBatch]:
    """All tasks that have room in `length` tokens, in batches [rows, length].

    The last batch is filled up with rows that ask for nothing: a compiled model sees no other shape than in training.
    """
    rest = _examples(tokenizer, length)
    while chosen := list(islice(rest, rows)):
        yield _batch(chosen, rows, document_borders)


def _examples(tokenizer: Tokenizer, length: int) -> Iterator[tuple[str, Example]]:
    if length >= shortest_passkey(tokenizer):
        for seed, depth in enumerate(spread_depths(PASSKEYS)):
            yield "passkey", passkey(tokenizer, length, depth, seed)
    for seed in range(OTHERS):
        yield "associative", associative_recall(tokenizer.vocab_size, length, seed)
    for seed in range(OTHERS):
        yield "induction", induction(tokenizer.vocab_size, length, seed)


def _batch(chosen: Sequence[tuple[str, Example]], rows: int, document_borders: bool) -> RecallBatch:
    names, examples = zip(*chosen, strict=True)
    missing, length = rows - len(examples), len(examples[0].tokens)
    tokens = np.stack([*(each.tokens for each in examples), *[examples[0].tokens] * missing])
    targets = np.stack([*(each.targets for each in examples), *[np.full(length, IGNORE)] * missing])
    return RecallBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.arange(length).repeat(rows, 1) if document_borders else None,
        documents=((length,),) * rows if document_borders else None,
        num_targets=0,
        tasks=(*map(TASKS.index, names), *[0] * missing),
    )
