"""What a longer context is worth: the loss of the same held-out tokens, by how much of their document stands before
them, read by models that were trained at different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from flashtrain.data.batch import IGNORE
from flashtrain.data.token_file import TokenFile
from flashtrain.training.by_position import LossByPosition
from measuring.language import Judge, batches, progress


class Window(NamedTuple):
    """A piece of a document: int64 [length] each; targets are IGNORE where another window scores them."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray


def documents(file: TokenFile, reach: int, limit: int) -> list[np.ndarray]:
    """The first `reach` + 1 tokens of each document, as many documents as have `limit` tokens together, or one."""
    found: list[np.ndarray] = []
    for start, end in zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True):
        if end - start > 1 and sum(map(len, found)) < limit:
            found.append(file.read(start, min(end, start + reach + 1)))
    return found


def windows(document: np.ndarray, context: int, stride: int) -> Iterator[Window]:
    """Windows of `context` tokens, or of the whole document if that is shorter, of which each scores its last `stride`
    targets, the first one all: so that, but at the document's start, context - stride tokens at least stand before.

    Raises:
        ValueError: a stride outside 1 to context.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"--stride {stride}: must lie between 1 and the context of {context}")
    count, scored = len(document) - 1, 0
    length = min(context, count)
    while scored < count:
        end = min(count, max(length, scored + stride))
        start = end - length
        targets = document[start + 1 : end + 1].copy()
        targets[: scored - start] = IGNORE
        yield Window(document[start:end], targets, np.arange(start, end))
        scored = end


def loss_by_place(judge: Judge, texts: Sequence[np.ndarray], context: int, stride: int, reach: int) -> LossByPosition:
    """The losses of all documents' tokens, collected by their place in the document; `reach`: the last one, and one."""
    bins = LossByPosition(reach, judge.reader.device)
    pieces = sorted((w for text in texts for w in windows(text, context, stride)), key=lambda w: -len(w.tokens))
    by_length: dict[int, list[Window]] = {}
    for piece in pieces:
        by_length.setdefault(len(piece.tokens), []).append(piece)
    for group in progress([each for same in by_length.values() for each in batches(same)], f"context {context}"):
        tokens, targets, positions = (np.stack(each) for each in zip(*group, strict=True))
        losses, _, asked = judge.read(tokens, targets)
        bins.add(losses, asked, torch.from_numpy(positions).to(asked.device))
    return bins
