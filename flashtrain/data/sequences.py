"""Labelled token sequences, or pairs of them: the batches of training, a function of the step, and those held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashtrain.data.order import WHOLE, Share, shuffled_many

PARTS = ("train", "val", "test")


@dataclass
class SequenceBatch:
    """A micro-batch of token sequences, padded at their ends.

    tokens: int64 [rows, seq], 0 where there is padding; of pairs all first texts, then all second ones.
    lengths: int64 [rows], tokens that are none. documents: the same for attention, with the padding apart; None where
        there is no padding.
    labels: int64 [batch]; num_targets: their number, which is half of the rows for pairs.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    documents: tuple[tuple[int, ...], ...] | None
    labels: torch.Tensor
    num_targets: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        """The same batch with its tensors on `device`; `non_blocking` as in `torch.Tensor.to`."""
        return replace(self, **{name: t.to(device, non_blocking=non_blocking) for name, t in self._tensors().items()})

    def pin_memory(self) -> SequenceBatch:
        """The same batch in page-locked host memory, from which a `non_blocking` copy to a GPU overlaps with work."""
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "lengths": self.lengths, "labels": self.labels}


class SequenceSet:
    """Sequences one behind the other, with labels.

    Args:
        tokens: ids from 1, uint8 or uint16, of all texts. ends: int64, where each of them ends; of pairs the first and
            the second text of each, in turn.
        labels: int64 [length].
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, labels: np.ndarray) -> None:
        assert len(ends) in (len(labels), 2 * len(labels)) and (not len(ends) or ends[-1] == len(tokens))
        self.tokens, self.ends, self.labels = tokens, ends, labels
        self.length = len(labels)
        self.texts_each = max(1, len(ends) // max(1, len(labels)))

    @classmethod
    def of(cls, texts: list[np.ndarray], labels: list[int]) -> SequenceSet:
        tokens = np.concatenate(texts) if texts else np.empty(0, np.uint8)
        return cls(tokens, np.cumsum([len(text) for text in texts], dtype=np.int64), np.array(labels, np.int64))

    def first(self, count: int | None) -> SequenceSet:
        """The first `count` samples; all for None."""
        if count is None or count >= self.length:
            return self
        ends = self.ends[: count * self.texts_each]
        return SequenceSet(self.tokens[: ends[-1]], ends, self.labels[:count])

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, tokens=self.tokens, ends=self.ends, labels=self.labels)

    @classmethod
    def load(cls, path: Path) -> SequenceSet:
        with np.load(path, allow_pickle=False) as file:
            return cls(file["tokens"], file["ends"], file["labels"])

    def fingerprint(self) -> str:
        """SHA-256 of all that is in it."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).tobytes())
        for numbers in (self.ends, self.labels):
            digest.update(numbers.astype("<i8").tobytes())
        return digest.hexdigest()

    def read(self, indices: np.ndarray, seq_len: int) -> SequenceBatch:
        """Those samples, each text cut at `seq_len` tokens."""
        texts = np.concatenate([indices * self.texts_each + which for which in range(self.texts_each)])
        tokens = np.zeros((len(texts), seq_len), np.int64)
        lengths = np.zeros(len(texts), np.int64)
        for row, text in enumerate(texts):
            begin = self.ends[text - 1] if text else 0
            found = self.tokens[begin : min(self.ends[text], begin + seq_len)]
            tokens[row, : len(found)] = found
            lengths[row] = max(1, len(found))  # an empty text has one token of padding to be pooled
        documents = None
        if (lengths < seq_len).any():
            documents = tuple((n, seq_len - n) if n < seq_len else (n,) for n in lengths.tolist())
        return SequenceBatch(
            torch.from_numpy(tokens), torch.from_numpy(lengths), documents, torch.from_numpy(self.labels[indices]),
            len(indices),
        )  # fmt: skip


class SequenceSteps:
    """The micro-batches of each optimiser step: every epoch a permutation of its own, computed from seed and step."""

    def __init__(
        self,
        source: SequenceSet,
        per_step: int,
        per_micro_batch: int,
        seq_len: int,
        seed: int,
        share: Share = WHOLE,
    ) -> None:
        self.source, self.per_step, self.per_micro_batch = source, per_step, per_micro_batch
        self.seq_len, self.seed, self.share = seq_len, seed, share

    def batches(self, step: int) -> list[SequenceBatch]:
        """The share's micro-batches of optimiser step `step` (from 0)."""
        rank, count = self.share[0], self.per_step // self.share[1]
        first = step * self.per_step + rank * count
        positions = np.arange(first, first + count)
        epochs, places = np.divmod(positions, self.source.length)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = shuffled_many(places[here], self.source.length, self.seed, epoch)
        size = self.per_micro_batch
        return [self.source.read(places[at : at + size], self.seq_len) for at in range(0, len(places), size)]


def held_out_sequences(source: SequenceSet, per_micro_batch: int, seq_len: int) -> Iterator[SequenceBatch]:
    """All samples once, in order; the last batch may be smaller."""
    for at in range(0, source.length, per_micro_batch):
        yield source.read(np.arange(at, min(at + per_micro_batch, source.length)), seq_len)
