"""A mask lowered for given lengths: the one form that every kernel walks, forward and backward.

For each query `i` a plan gives the interval of keys [lo, hi) that it sees, and, transposed, for each key the interval
of queries [first, last) that see it. Without documents both are formulas in `left`, `right` and the two lengths and
nothing is stored. With documents they are int32 tables. In both, intervals never move backwards from one row to
the next, so a tile's blocks are one run of keys: full ones, where every element is visible, between partial ones, where
two integer compares decide.

Under a block layout a tile's blocks are listed instead (`lists`), and the intervals decide within partial ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flashtrain.attention.block_layout import BlockLayout
from flashtrain.attention.lists import build_lists, dense_blocks
from flashtrain.attention.masks import All, Causal, Documents, Full, Mask, SlidingWindow, parts

# An open side of a window. Far beyond any length, and far enough below 2**31 that adding two lengths cannot wrap.
OPEN = 2**30


class Limits(NamedTuple):
    """What a plan tells the kernels; its fields are arguments of the operators.

    Attributes:
        rows, columns, left, right: as in `Plan`.
        q_lists, k_lists, blocks: as in `Plan`; no lists and () where there is no block layout.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    left: int = OPEN
    right: int = OPEN
    q_lists: Tensor | None = None
    k_lists: Tensor | None = None
    blocks: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """Which keys each query sees, for one pair of lengths.

    Attributes:
        seq_q, seq_k: numbers of queries and keys.
        left, right: window around the query's own position, `OPEN` where a side has no limit; used if `rows` is None.
        rows: int32 [batch or 1, 2, seq_q], lo and hi of each query.
        columns: int32 [batch or 1, 2, seq_k], first and last of each key: the transpose of `rows`.
        q_lists: int32 work lists in the form that `lists` describes: for each block of queries its blocks of keys.
        k_lists: the transpose: for each block of keys its blocks of queries.
        blocks: (queries a block, keys a block, batch rows that have lists of their own, query heads that have).
        counted_pairs: `visible_pairs` where there are documents or lists; on the device until it is asked for.
    """

    seq_q: int
    seq_k: int
    left: int
    right: int
    rows: Tensor | None = None
    columns: Tensor | None = None
    q_lists: Tensor | None = None
    k_lists: Tensor | None = None
    blocks: tuple[int, ...] = ()
    counted_pairs: float | Tensor | None = None

    @property
    def limits(self) -> Limits:
        """What the operators take of this plan."""
        return Limits(self.rows, self.columns, self.left, self.right, self.q_lists, self.k_lists, self.blocks)

    @cached_property
    def visible_pairs(self) -> float:
        """Visible (query, key) pairs a batch row and head, the mean over both: what FLOPs count."""
        # Counted when asked for: a compiled model that lowers a mask would be tied to one length by the count.
        if self.counted_pairs is not None:
            return float(self.counted_pairs)
        return float(visible_pairs(self.seq_q, self.seq_k, self.left, self.right))

    @property
    def is_full(self) -> bool:
        return self.rows is None and self.q_lists is None and self.left == OPEN and self.right == OPEN

    @property
    def is_causal(self) -> bool:
        """Exactly `Causal()`, with nothing else."""
        return self.rows is None and self.q_lists is None and self.left == OPEN and self.right == 0

    @property
    def density(self) -> float:
        """Visible share of all query-key pairs, 0 to 1."""
        return self.visible_pairs / max(1, self.seq_q * self.seq_k)

    def intervals(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """lo and hi of every query, int [batch or 1, seq_q] each; a block layout is not in them."""
        if self.rows is not None:
            return self.rows[:, 0], self.rows[:, 1]
        position = torch.arange(self.seq_q, device=device) + (self.seq_k - self.seq_q)
        lo = (position - self.left).clamp(0, self.seq_k)
        hi = (position + self.right + 1).clamp(0, self.seq_k)
        return lo[None], torch.maximum(lo, hi)[None]

    def dense(self, device: torch.device | str | None = None) -> Tensor:
        """The mask as a bool tensor [batch or 1, num_heads or 1, seq_q, seq_k], true where visible. Needs N x N
        memory; with a block layout it lies where the lists are."""
        lo, hi = self.intervals(device if self.q_lists is None else self.q_lists.device)
        key = torch.arange(self.seq_k, device=lo.device)
        visible = ((key >= lo[..., None]) & (key < hi[..., None]))[:, None]
        if self.q_lists is None:
            return visible
        return visible & dense_blocks(self.q_lists, self.blocks, self.seq_q, self.seq_k)


def lower(mask: Mask | None, batch: int, seq_q: int, seq_k: int, device: torch.device | str) -> Plan:
    """The plan of a mask for `batch` rows of `seq_q` queries and `seq_k` keys.

    Do this once a step, outside the compiled model, and hand the plan to every layer.

    Raises:
        ValueError: documents that do not add up to the lengths, or another number of rows than the batch; a block
            layout for other lengths.
    """
    device = torch.device(device)
    members = mask.members if isinstance(mask, All) else (mask,)
    if torch.compiler.is_compiling() and any(isinstance(member, BlockLayout) for member in members):
        raise ValueError("mask: lower a block layout outside the compiled model, once, and pass the plan")
    left, right, documents, layout = _combined(mask)
    if documents is not None:
        _check_documents(documents, batch, seq_q, seq_k)
    if layout is not None:
        return _lower_layout(layout, left, right, documents, seq_q, seq_k, device)
    return _lower_intervals(left, right, documents, seq_q, seq_k, device)


def _combined(mask: Mask | None) -> tuple[int, int, Documents | None, BlockLayout | None]:
    """The window, the documents and the block layout that a mask is the conjunction of."""
    members = parts(Full() if mask is None else mask)
    left, right, documents, layout = OPEN, OPEN, None, None
    for member in members:
        if isinstance(member, Causal):
            right = 0
        elif isinstance(member, SlidingWindow):
            left = min(left, OPEN if member.left is None else member.left)
            right = min(right, OPEN if member.right is None else member.right)
        elif isinstance(member, Documents):
            if documents is not None:
                raise ValueError("mask: two different Documents in one conjunction; describe the packing once")
            documents = member
        elif isinstance(member, BlockLayout):
            if layout is not None:
                raise ValueError("mask: two block layouts in one conjunction; make one layout of the blocks of both")
            layout = member
        else:
            raise ValueError(f"mask={member}: not a mask that attention knows")
    return left, right, documents, layout


def _check_documents(documents: Documents, batch: int, seq_q: int, seq_k: int) -> None:
    wanted = (("lengths", documents.lengths, seq_q), ("key_lengths", documents.key_lengths or documents.lengths, seq_k))
    for argument, rows, seq_len in wanted:
        if len(rows) not in (1, batch):
            raise ValueError(
                f"Documents {argument} describes {len(rows)} rows and the batch has {batch}; give 1 or {batch}"
            )
        for number, row in enumerate(rows):
            if sum(row) != seq_len:
                raise ValueError(
                    f"Documents {argument}[{number}] adds up to {sum(row)} tokens and the sequence has {seq_len}; "
                    "make the padding a document of its own"
                )


# Per layout, so that its plans go when it goes; they hold lists made from it, never the layout itself.
_layout_plans: WeakKeyDictionary[BlockLayout, OrderedDict[tuple[object, ...], Plan]] = WeakKeyDictionary()
_PLANS_A_LAYOUT = 16


def _lower_layout(
    layout: BlockLayout,
    left: int,
    right: int,
    documents: Documents | None,
    seq_q: int,
    seq_k: int,
    device: torch.device,
) -> Plan:
    if (layout.seq_q, layout.seq_k) != (seq_q, seq_k):
        raise ValueError(
            f"mask: the block layout is for {layout.seq_q} queries and {layout.seq_k} keys, and there are {seq_q} and "
            f"{seq_k}; build one for these lengths"
        )
    plans = _layout_plans.setdefault(layout, OrderedDict())
    key = (left, right, documents, device)
    if key not in plans:
        intervals = _lower_intervals(left, right, documents, seq_q, seq_k, device)
        lists = build_lists(layout.to(device), *intervals.intervals(device))
        plans[key] = replace(
            intervals,
            q_lists=lists.q_lists,
            k_lists=lists.k_lists,
            blocks=lists.blocks,
            counted_pairs=lists.pairs,
        )
        while len(plans) > _PLANS_A_LAYOUT:
            plans.popitem(last=False)
    plans.move_to_end(key)
    return plans[key]


def _lower_intervals(
    left: int, right: int, documents: Documents | None, seq_q: int, seq_k: int, device: torch.device
) -> Plan:
    if documents is None:
        return Plan(seq_q, seq_k, left, right)
    # Keyed by the whole mask and its lengths: two packings of one shape must never share a plan.
    return _lower_documents(documents, left, right, seq_q, seq_k, device)


@lru_cache(maxsize=16)
def _lower_documents(documents: Documents, left: int, right: int, seq_q: int, seq_k: int, device: torch.device) -> Plan:
    key_lengths = documents.key_lengths or documents.lengths
    tables, pairs = [], 0
    for q_row, k_row in zip(documents.lengths, key_lengths, strict=True):
        tables.append(_row_tables(q_row, k_row, left, right, seq_k))
        pairs += sum(visible_pairs(q, k, left, right) for q, k in zip(q_row, k_row, strict=True))
    rows = torch.stack([lo_hi for lo_hi, _ in tables])
    columns = torch.stack([first_last for _, first_last in tables])
    if device.type == "cuda":  # pinned, so that the copy does not stop the host
        rows, columns = rows.pin_memory(), columns.pin_memory()
    return Plan(
        seq_q=seq_q,
        seq_k=seq_k,
        left=left,
        right=right,
        rows=rows.to(device, non_blocking=True),
        columns=columns.to(device, non_blocking=True),
        counted_pairs=pairs / len(tables),
    )


def _row_tables(
    q_lengths: Sequence[int], k_lengths: Sequence[int], left: int, right: int, seq_k: int
) -> tuple[Tensor, Tensor]:
    """lo, hi int32 [2, seq_q] and first, last int32 [2, seq_k] of one packed row."""
    q_len, k_len = torch.tensor(q_lengths, dtype=torch.int64), torch.tensor(k_lengths, dtype=torch.int64)
    q_start, k_start = q_len.cumsum(0) - q_len, k_len.cumsum(0) - k_len
    document = torch.repeat_interleave(torch.arange(len(q_len)), q_len)
    start, end = k_start[document], (k_start + k_len)[document]
    # A query's own position among the keys: the two are aligned at the end of each document.
    position = torch.arange(len(document)) - q_start[document] + end - q_len[document]
    lo = torch.maximum(position - left, start).minimum(end)
    hi = torch.minimum(position + right + 1, end).maximum(lo)
    # Key j is seen from the first query with hi > j up to the first with lo > j: both tables are sorted.
    key = torch.arange(seq_k)
    first = torch.searchsorted(hi, key, right=True)
    last = torch.searchsorted(lo, key, right=True).maximum(first)
    return torch.stack((lo, hi)).int(), torch.stack((first, last)).int()


def visible_pairs(seq_q: int, seq_k: int, left: int, right: int) -> int:
    """Visible (query, key) pairs of one document: the sum over its queries of hi - lo, in closed form."""
    shift = seq_k - seq_q
    return _sum_clamped(shift + right + 1, seq_q, seq_k) - _sum_clamped(shift - left, seq_q, seq_k)


def _sum_clamped(start: int, count: int, limit: int) -> int:
    """The sum of min(max(start + i, 0), limit) over i in [0, count)."""
    rising = range(max(0, -start), min(count, max(0, limit - start)))
    at_limit = count - min(count, max(0, limit - start))
    total = len(rising) * start + (rising.start + rising.stop - 1) * len(rising) // 2
    return total + at_limit * limit
