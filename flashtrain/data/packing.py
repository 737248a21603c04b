"""A token file seen as training sequences of seq_len tokens, picked by number.

"concat" cuts the stream of all documents into windows. "whole" never cuts a document that fits into a sequence: it
packs several into one, and cuts only longer ones, so that a long context is filled by one document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, Protocol

import numpy as np

from flashtrain.data.batch import IGNORE
from flashtrain.data.token_file import TokenFile


class TokenSequence(NamedTuple):
    """One training sequence.

    tokens, targets: int64 [seq_len]; targets are IGNORE where there is nothing to predict.
    document_lengths: lengths of the documents (or parts of them) in it, in order; their sum is seq_len.
    positions: int64 [seq_len], from 0 in each of these.
    """

    tokens: np.ndarray
    targets: np.ndarray
    document_lengths: tuple[int, ...]
    positions: np.ndarray


class Sequences(Protocol):
    """What training reads: a fixed number of sequences.

    document_borders: whether attention and positions are to be cut at document borders; then no token has the first
    token of the next document as its target.
    """

    seq_len: int
    document_borders: bool

    def __len__(self) -> int: ...

    def sequence(self, index: int) -> TokenSequence:
        """Sequence ``index``, 0 <= index < len(self)."""


def pack(file: TokenFile, seq_len: int, packing: str, document_borders: bool) -> Sequences:
    """The sequences of ``file``; ``packing`` is "concat" or "whole" (``data.packing``). ValueError if too short."""
    if packing == "whole":
        return WholeSequences(file, seq_len, document_borders)
    return ConcatSequences(file, seq_len, document_borders)


class ConcatSequences:
    """Window i is tokens[i * seq_len : (i + 1) * seq_len], its targets the same, one later.

    N tokens give (N - 1) // seq_len sequences; the rest, fewer than seq_len, is left over.
    """

    def __init__(self, file: TokenFile, seq_len: int, document_borders: bool = False) -> None:
        _require(file, seq_len, seq_len + 1)
        self.file = file
        self.seq_len = seq_len
        self.document_borders = document_borders

    def __len__(self) -> int:
        return (self.file.num_tokens - 1) // self.seq_len

    def sequence(self, index: int) -> TokenSequence:
        start = _checked(index, len(self)) * self.seq_len
        stop = start + self.seq_len
        window = self.file.read(start, stop + 1)
        targets = window[1:].copy()
        # Borders within the window, its end included: a document that ends there does not predict the next one either.
        offsets = self.file.offsets
        first, last = np.searchsorted(offsets, start, side="right"), np.searchsorted(offsets, stop, side="right")
        borders = np.unique(offsets[first:last]) - start
        if self.document_borders:
            targets[borders - 1] = IGNORE
        inner = borders[borders < self.seq_len]
        return TokenSequence(window[:-1], targets, *_documents(np.append(inner, self.seq_len)))


class WholeSequences:
    """Documents that fit stay whole; longer ones are cut into pieces of seq_len; the rest of a row is padding.

    Padding is the end-of-document token with IGNORE as its target, and a document of its own.
    """

    def __init__(self, file: TokenFile, seq_len: int, document_borders: bool = False) -> None:
        _require(file, seq_len, 2)
        self.file = file
        self.seq_len = seq_len
        self.document_borders = document_borders
        starts, lengths, self._last = _pieces(file.offsets, seq_len)
        rows = best_fit(lengths, seq_len)
        order = np.argsort(rows, kind="stable")
        self._starts, self._lengths, self._last = starts[order], lengths[order], self._last[order]
        # Pieces of row r: _row_starts[r] to _row_starts[r + 1].
        self._row_starts = np.searchsorted(rows[order], np.arange(rows.max() + 2))

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def sequence(self, index: int) -> TokenSequence:
        row = _checked(index, len(self))
        tokens = np.full(self.seq_len, self.file.eod, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORE, dtype=np.int64)
        ends, at = [], 0
        for piece in range(self._row_starts[row], self._row_starts[row + 1]):
            start, length = int(self._starts[piece]), int(self._lengths[piece])
            known = length if self._last[piece] else length + 1  # a cut document goes on: its next token is the target
            ids = self.file.read(start, start + known)
            if at and not self.document_borders:
                targets[at - 1] = ids[0]
            tokens[at : at + length] = ids[:length]
            targets[at : at + known - 1] = ids[1:]
            at += length
            ends.append(at)
        if at < self.seq_len:
            ends.append(self.seq_len)
        return TokenSequence(tokens, targets, *_documents(np.array(ends)))


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each item, so that no row holds more than ``capacity``: best fit, longest first.

    lengths: int64 [items], each from 1 to capacity. Returns int64 [items]; rows are numbered from 0 without gaps.
    Items of one length are placed together, so the time goes with the number of different lengths, not of items.
    """
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    rows = np.empty(len(lengths), dtype=np.int64)
    spaces: list[int] = []  # sorted: the amounts of free space that open rows have
    open_rows: dict[int, list[int]] = {}  # amount of free space -> rows with just that much
    num_rows = done = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        until = done + count
        while done < until:
            tightest = bisect_left(spaces, length)
            space = spaces[tightest] if tightest < len(spaces) else capacity
            if tightest == len(spaces):
                new = -(-(until - done) // (capacity // length))
                _leave(spaces, open_rows, capacity, list(range(num_rows, num_rows + new)))
                num_rows += new
            each = space // length
            number = min(-(-(until - done) // each), len(open_rows[space]))
            taken = open_rows[space][-number:]
            placed = min(until - done, each * number)
            rows[order[done : done + placed]] = np.repeat(taken, each)[:placed]
            done += placed
            _take(spaces, open_rows, space, number)
            full, rest = divmod(placed, each)
            _leave(spaces, open_rows, space - each * length, taken[:full])
            _leave(spaces, open_rows, space - rest * length, taken[full:])
    return rows


def _leave(spaces: list[int], open_rows: dict[int, list[int]], space: int, rows: list[int]) -> None:
    """Note that ``rows`` have ``space`` left."""
    if space and rows:
        if space not in open_rows:
            insort(spaces, space)
            open_rows[space] = []
        open_rows[space] += rows


def _take(spaces: list[int], open_rows: dict[int, list[int]], space: int, number: int) -> None:
    """Take the last ``number`` rows from those with ``space`` left."""
    del open_rows[space][-number:]
    if not open_rows[space]:
        del open_rows[space]
        del spaces[bisect_left(spaces, space)]


def _pieces(offsets: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents cut into pieces of at most seq_len: start, length (int64), whether it is its document's last (bool)."""
    sizes = np.diff(offsets)
    numbers = -(-sizes // seq_len)
    document = np.repeat(np.arange(len(sizes)), numbers)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    starts = offsets[:-1][document] + piece * seq_len
    ends = np.minimum(starts + seq_len, offsets[1:][document])
    return starts, ends - starts, piece == numbers[document] - 1


def _documents(ends: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """Document lengths and positions, from where each document ends (increasing; the last is seq_len)."""
    lengths = np.diff(ends, prepend=0)
    return tuple(lengths.tolist()), np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def _require(file: TokenFile, seq_len: int, tokens: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: must be at least 1")
    if file.num_tokens < tokens:
        raise ValueError(f"data has {file.num_tokens} tokens, seq_len={seq_len} needs at least {tokens} ({file.path})")


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sequence {index} of {length}")
    return index
