"""A mask lowered for one rank of a ring: for each step, what its queries see of the keys that have come to it.

A rank holds two chunks, and so does the block of keys that it gets in a step. A query's visible keys are one run of the
sequence. Counted among the keys of two chunks they still are one run: where it reaches into both, it has the end of the
first and the beginning of the second. Nor does a bound move backwards from one of the rank's queries to the next. So
what `attention.Plan` says of a whole sequence it can say of any pair of ranks, and the kernels need to know nothing.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtrain.attention import BlockLayout, Full, Mask, Plan, lower
from flashtrain.attention.lists import build_lists
from flashtrain.attention.masks import parts
from flashtrain.attention.plan import OPEN
from flashtrain.parallel.shards import chunk_length, shard


@dataclass(frozen=True)
class Piece:
    """Attention of a run of the rank's queries to a run of the keys at hand, and the plan of these two."""

    queries: slice
    keys: slice
    plan: Plan


# The pieces of each step of a ring; none where the rank's queries see nothing of the keys at hand.
Steps = tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What one rank computes in each step of a ring. In step i it has the keys of rank (rank - i) % size.

    Attributes:
        seq_len: of the whole sequence.
        batch: rows of the batch that it is for.
        device: where the tables of the steps lie.
        steps: what is computed in each step.
        blocks: `Plan.blocks` of the pieces, () where there is no block layout.
        number: int64 scalar on the CPU, under which `steps_of` finds the steps as long as the tensor lives. Operators
            take tensors and keep them for the backward pass, and a compiled model depends on no tensor's value: so it
            serves every plan without being compiled again.
    """

    seq_len: int
    batch: int
    device: torch.device
    steps: Steps
    blocks: tuple[int, ...]
    number: Tensor

    @property
    def heads(self) -> int:
        """Query heads that a block layout has lists for, or 1."""
        return self.blocks[3] if self.blocks else 1

    @property
    def counted_pairs(self) -> float | Tensor:
        """`visible_pairs`, left on the device where only that knows it."""
        plans = [piece.plan for step in self.steps for piece in step]
        return sum((plan.visible_pairs if plan.counted_pairs is None else plan.counted_pairs for plan in plans), 0.0)

    @property
    def visible_pairs(self) -> float:
        """Visible (query, key) pairs of this rank's queries, a batch row and head; all ranks' add up to the mask's."""
        return float(self.counted_pairs)


_numbers = itertools.count()
_steps: dict[int, Steps] = {}


def _numbered(steps: Steps) -> Tensor:
    number = next(_numbers)
    tensor = torch.tensor(number, device="cpu")
    _steps[number] = steps
    weakref.finalize(tensor, _steps.pop, number)
    return tensor


def steps_of(number: Tensor) -> Steps:
    """The steps of the plan with this number."""
    return _steps[int(number)]


@functools.lru_cache(maxsize=16)
def lower_ring(mask: Mask | None, batch: int, seq_len: int, rank: int, size: int, device: torch.device) -> RingPlan:
    """The plan of `rank` among `size` for a mask of the whole sequence.

    Raises:
        ValueError: lengths that do not fit the mask, as in `attention.lower`; a sequence that cannot be cut into chunks
            of equal length and, under a block layout, of whole blocks.
    """
    chunk = chunk_length(seq_len, size)
    layout, others = _split(mask)
    bounds = lower(others, batch, seq_len, seq_len, "cpu").intervals("cpu")
    lo, hi = (shard(bound, rank, size) for bound in bounds)
    if layout is not None:
        _check_layout(layout, seq_len, chunk, size)
    found = []
    for step in range(size):
        source = (rank - step) % size
        here_lo, here_hi = (_keys_before(bound, source, size, chunk) for bound in (lo, hi))
        blocks = None if layout is None else _Blocks.of(layout, rank, source, size)
        found.append(tuple(_pieces(here_lo, here_hi, blocks, device)))
    steps = tuple(found)
    of_pieces = (piece.plan.blocks for step in steps for piece in step)
    return RingPlan(seq_len, batch, device, steps, next(of_pieces, ()), _numbered(steps))


def _split(mask: Mask | None) -> tuple[BlockLayout | None, Mask]:
    """The block layout that a mask contains, and the rest of it."""
    members = parts(Full() if mask is None else mask)
    layouts = [member for member in members if isinstance(member, BlockLayout)]
    if len(layouts) > 1:
        raise ValueError("mask: two block layouts in one conjunction; make one layout of the blocks of both")
    others = (member for member in members if not isinstance(member, BlockLayout))
    return layouts[0] if layouts else None, functools.reduce(operator.and_, others, Full())


def _check_layout(layout: BlockLayout, seq_len: int, chunk: int, size: int) -> None:
    if (layout.seq_q, layout.seq_k) != (seq_len, seq_len):
        raise ValueError(
            f"mask: the block layout is for {layout.seq_q} queries and {layout.seq_k} keys, and there are {seq_len} of "
            "both; build one for the whole sequence"
        )
    block = max(layout.block_q, layout.block_k)  # the other one divides it
    if chunk % block:
        raise ValueError(
            f"seq_len={seq_len}: {size} ranks hold chunks of {chunk} tokens, which must be whole blocks of {block} of "
            f"the block layout; give a multiple of {2 * size * block}"
        )


def _keys_before(position: Tensor, source: int, size: int, chunk: int) -> Tensor:
    """How many of the keys of rank `source` stand before a position of the whole sequence."""
    firsts = source * chunk, (2 * size - 1 - source) * chunk
    first, second = ((position - first).clamp(0, chunk) for first in firsts)
    return first + second


def _pieces(lo: Tensor, hi: Tensor, blocks: _Blocks | None, device: torch.device) -> Iterator[Piece]:
    """The parts of a step in which something is visible: at most one for each of the two chunks of queries.

    lo, hi: int [batch or 1, queries], which keys at hand each query sees; blocks: those that a layout allows besides.
    """
    sees = (lo < hi).any(0)
    if blocks is not None:
        sees &= blocks.rows_with_entries()
    block_q, block_k = (1, 1) if blocks is None else (blocks.block_q, blocks.block_k)
    for begin, end in _runs(sees, block_q):
        own_lo, own_hi = lo[:, begin:end], hi[:, begin:end]
        some = own_lo < own_hi
        first = int(own_lo[some].min()) // block_k * block_k
        last = -(-int(own_hi[some].max()) // block_k) * block_k
        plan = _plan((own_lo - first).clamp(0, last - first), (own_hi - first).clamp(0, last - first), last - first)
        plan = _on(device, plan)
        if blocks is not None:
            lists = build_lists(blocks.layout(begin, end, first, last).to(device), *plan.intervals(device))
            plan = replace(
                plan, q_lists=lists.q_lists, k_lists=lists.k_lists, blocks=lists.blocks, counted_pairs=lists.pairs
            )
        yield Piece(slice(begin, end), slice(first, last), plan)


def _runs(sees: Tensor, step: int) -> list[tuple[int, int]]:
    """In each half of the queries those from the first to the last that sees something, in steps of whole blocks; the
    two are one where they touch."""
    runs: list[tuple[int, int]] = []
    half = len(sees) // 2
    for offset in (0, half):
        places = torch.nonzero(sees[offset : offset + half]).flatten()
        if not len(places):
            continue
        begin = offset + int(places[0]) // step * step
        end = offset + (int(places[-1]) // step + 1) * step
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return runs


def _plan(lo: Tensor, hi: Tensor, num_keys: int) -> Plan:
    """The plan of queries that see the keys [lo, hi), int [batch or 1, queries] each; without tables where it is full
    or causal."""
    num_queries = lo.shape[1]
    if bool((lo == 0).all()):
        if bool((hi == num_keys).all()):
            return Plan(num_queries, num_keys, OPEN, OPEN)
        if num_queries == num_keys and bool((hi == torch.arange(1, num_keys + 1)).all()):
            return Plan(num_queries, num_keys, OPEN, 0)
    lo, hi = lo.contiguous(), hi.contiguous()
    # Key j is seen from the first query with hi > j up to the first with lo > j: both are sorted.
    key = torch.arange(num_keys, dtype=lo.dtype).expand(len(lo), -1).contiguous()
    begin = torch.searchsorted(hi, key, right=True)
    end = torch.searchsorted(lo, key, right=True).maximum(begin)
    rows, columns = (torch.stack(pair, dim=1).int() for pair in ((lo, hi), (begin, end)))
    pairs = float((hi - lo).sum(dtype=torch.float64)) / len(lo)
    return Plan(num_queries, num_keys, OPEN, OPEN, rows, columns, counted_pairs=pairs)


def _on(device: torch.device, plan: Plan) -> Plan:
    if plan.rows is None or plan.columns is None or device.type == "cpu":
        return plan
    # Pinned, so that the copy does not stop the host.
    rows, columns = (table.pin_memory().to(device, non_blocking=True) for table in (plan.rows, plan.columns))
    return replace(plan, rows=rows, columns=columns)


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a layout between the queries of one rank and the keys of another, numbered within their shards:
    int64 [entries] each, in the layout's order."""

    block_q: int
    block_k: int
    num_queries: int
    heads: int
    head: Tensor
    q_block: Tensor
    k_block: Tensor

    @classmethod
    def of(cls, layout: BlockLayout, rank: int, source: int, size: int) -> _Blocks:
        head, q_block, k_block = layout.to("cpu").entries.long()
        q_block = _local(q_block, rank, size, layout.num_q_blocks)
        k_block = _local(k_block, source, size, layout.num_k_blocks)
        here = (q_block >= 0) & (k_block >= 0)
        num_queries = layout.seq_q // size
        return cls(layout.block_q, layout.block_k, num_queries, layout.heads, head[here], q_block[here], k_block[here])

    def rows_with_entries(self) -> Tensor:
        """Which queries have any visible block, in any head: bool [queries]."""
        found = torch.zeros(self.num_queries // self.block_q, dtype=torch.bool)
        found[self.q_block] = True
        return found.repeat_interleave(self.block_q)

    def layout(self, begin: int, end: int, first: int, last: int) -> BlockLayout:
        """The layout of the queries [begin, end) and the keys [first, last), all of them whole blocks."""
        q_block, k_block = self.q_block - begin // self.block_q, self.k_block - first // self.block_k
        rows, columns = (end - begin) // self.block_q, (last - first) // self.block_k
        inside = (q_block >= 0) & (q_block < rows) & (k_block >= 0) & (k_block < columns)
        sizes = torch.bincount((self.head * rows + q_block)[inside], minlength=self.heads * rows)
        starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        blocks = k_block[inside].int()
        # A part of a layout that was checked, and one in which queries may well see nothing.
        return BlockLayout(
            end - begin, last - first, self.block_q, self.block_k, self.heads, starts, blocks, _checked=True
        )


def _local(block: Tensor, rank: int, size: int, num_blocks: int) -> Tensor:
    """The number of a block of the sequence in the shard of `rank`; negative where it is not there."""
    a_chunk = num_blocks // (2 * size)
    chunk, place = block // a_chunk, block % a_chunk
    return torch.where(chunk == rank, place, torch.where(chunk == 2 * size - 1 - rank, a_chunk + place, -1))
