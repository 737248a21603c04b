"""What may attend to what: small, hashable descriptions that combine with `&`.

A mask says nothing about lengths or devices (except `Documents`, which is about lengths). `plan.lower` turns it into
the one form that every kernel walks. Rows and columns follow PyTorch's SDPA: queries are rows, keys are columns. When
there are more keys than queries the two are aligned at the end, as when new tokens attend to a cache: query `i` stands
at position `i + (keys - queries)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Mask:
    """A limit on attention. Masks compare by value, hash, and combine: `Causal() & Documents(...)`."""

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return All(parts(self) | parts(other))


@dataclass(frozen=True)
class Full(Mask):
    """No limit: every query sees every key. The neutral element of `&`."""


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own position and before.

    With more queries than keys the first `queries - keys` rows see nothing: their output is 0 and their lse -inf.
    """


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query at position p sees the keys from p - left to p + right, both included; None leaves a side open.

    `SlidingWindow(1023, 0)` is the window of 1,024 tokens that other libraries call `sliding_window=1024`.
    """

    left: int | None
    right: int | None = None

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            width = getattr(self, side)
            if width is not None and width < 0:
                raise ValueError(f"SlidingWindow {side}={width}: give a number of keys >= 0, or None for an open side")


@dataclass(frozen=True)
class Documents(Mask):
    """Several documents packed into one row: a query sees the keys of its own document only.

    Args:
        lengths: for each row of the batch the lengths of its documents, in order; 0 is allowed. They add up to the
            number of queries. One inner tuple serves every row of the batch.
        key_lengths: the same for the keys where they differ; within each document queries and keys are aligned at
            the end.
    """

    lengths: tuple[tuple[int, ...], ...]
    key_lengths: tuple[tuple[int, ...], ...] | None = None

    def __init__(self, lengths: Sequence[Sequence[int]], key_lengths: Sequence[Sequence[int]] | None = None) -> None:
        object.__setattr__(self, "lengths", _rows_of_lengths("lengths", lengths))
        object.__setattr__(
            self, "key_lengths", None if key_lengths is None else _rows_of_lengths("key_lengths", key_lengths)
        )
        if self.key_lengths is None:
            return
        counts = [len(row) for row in self.lengths], [len(row) for row in self.key_lengths]
        if counts[0] != counts[1]:
            raise ValueError(
                f"Documents: lengths has {counts[0]} documents a row and key_lengths {counts[1]}; pair them"
            )

    @classmethod
    def from_offsets(cls, offsets: Sequence[int], key_offsets: Sequence[int] | None = None) -> Documents:
        """One packed row from cumulative lengths (`cu_seqlens`): [0, 3, 3, 5] is documents of 3, 0 and 2 tokens."""
        lengths = [_lengths_of("offsets", offsets)]
        return cls(lengths, None if key_offsets is None else [_lengths_of("key_offsets", key_offsets)])


@dataclass(frozen=True)
class All(Mask):
    """The conjunction of several masks, what `a & b` makes."""

    members: frozenset[Mask]


def parts(mask: Mask) -> frozenset[Mask]:
    """The masks that a mask is the conjunction of, `Full` left out."""
    if isinstance(mask, All):
        return mask.members
    if isinstance(mask, Full):
        return frozenset()
    return frozenset((mask,))


def _rows_of_lengths(argument: str, rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    result = tuple(tuple(int(length) for length in row) for row in rows)
    if not result:
        raise ValueError(f"Documents {argument}=(): give one tuple of document lengths for each row of the batch")
    for number, row in enumerate(result):
        if any(length < 0 for length in row):
            raise ValueError(f"Documents {argument}[{number}]={row}: a document cannot have a negative length")
    return result


def _lengths_of(argument: str, offsets: Sequence[int]) -> tuple[int, ...]:
    values = [int(offset) for offset in offsets]
    if not values or values[0] != 0:
        raise ValueError(f"Documents {argument}={values}: cumulative lengths start at 0")
    lengths = tuple(end - start for start, end in pairwise(values))
    if any(length < 0 for length in lengths):
        raise ValueError(f"Documents {argument}={values}: cumulative lengths never decrease")
    return lengths
