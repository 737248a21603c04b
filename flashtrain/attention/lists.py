"""Work lists: which blocks of keys each block of queries visits under a block layout, and the transpose.

One int32 tensor holds all lists of one direction, so that a kernel needs one pointer. With n lists (batches * heads *
num_blocks of them, list number (batch * heads + head) * num_blocks + block) its sections are

    starts [n + 1]   where in this tensor each list begins; list i ends where list i + 1 begins
    full_ends [n]    where in list i the full entries end and the partial ones begin
    order [n]        for each (batch, head) its block numbers from the longest list to the shortest
    entries          for each list the blocks it visits: the full ones ascending, then the partial ones ascending

In a full block every element is visible and inside both lengths; a partial one needs its mask. Entries after the last
list are left over from building without a synchronisation and belong to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtrain.attention.block_layout import BlockLayout


class Lists(NamedTuple):
    """`Plan.q_lists`, `Plan.k_lists` and `Plan.blocks`, and the visible pairs a batch row and head (float64 scalar)."""

    q_lists: Tensor
    k_lists: Tensor
    blocks: tuple[int, int, int, int]
    pairs: Tensor


def build_lists(layout: BlockLayout, lo: Tensor, hi: Tensor) -> Lists:
    """The lists of a layout whose queries see only the keys [lo, hi).

    Time and memory go with the layout's visible blocks and the lengths, and the host never waits for the device.

    Args:
        layout: on the device of lo and hi.
        lo, hi: int [batches, seq_q], sorted in each row; `Plan.intervals`.

    Raises:
        ValueError: more blocks than 32 bits can count.
    """
    batches, num_rows = lo.shape[0], layout.heads * layout.num_q_blocks
    # Row of each entry, and what it is made of; the size is given so that nobody has to ask the device for it.
    row = torch.arange(num_rows, device=lo.device).repeat_interleave(
        layout.starts.diff(), output_size=len(layout.blocks)
    )
    head = row // max(1, layout.num_q_blocks)
    q_block, k_block = row - head * layout.num_q_blocks, layout.blocks.long()
    pairs = _visible_pairs(lo.long(), hi.long(), q_block, k_block, layout)
    visible, full = pairs > 0, pairs == layout.block_q * layout.block_k
    batch = torch.arange(batches, device=lo.device)[:, None]
    return Lists(
        _pack(batch * num_rows + row, k_block, visible, full, batches * layout.heads, layout.num_q_blocks),
        _pack(
            (batch * layout.heads + head) * layout.num_k_blocks + k_block,
            q_block, visible, full, batches * layout.heads, layout.num_k_blocks,
        ),
        (layout.block_q, layout.block_k, batches, layout.heads),
        pairs.sum().double() / (batches * layout.heads),
    )  # fmt: skip


def _visible_pairs(lo: Tensor, hi: Tensor, q_block: Tensor, k_block: Tensor, layout: BlockLayout) -> Tensor:
    """How many elements of each block are visible, int64 [batches, entries]: over the block's queries the sum of hi
    less that of lo, both clamped to the block's keys."""
    first_q = q_block * layout.block_q
    last_q = (first_q + layout.block_q).clamp(max=layout.seq_q)
    edges = (torch.arange(layout.num_k_blocks + 1, device=lo.device) * layout.block_k).clamp(max=layout.seq_k)
    return _clamped_sum(hi, first_q, last_q, edges, k_block) - _clamped_sum(lo, first_q, last_q, edges, k_block)


def _clamped_sum(bound: Tensor, first_q: Tensor, last_q: Tensor, edges: Tensor, k_block: Tensor) -> Tensor:
    """For each block the sum of min(max(bound, its first key), its last key + 1) over its queries.

    `bound` never decreases, so that a block's queries are three runs: below its keys, among them, and above.
    """
    below = torch.searchsorted(bound, edges.expand(len(bound), -1).contiguous(), right=True)
    sums = torch.nn.functional.pad(bound.cumsum(1), (1, 0))
    among = below[:, k_block].clamp(first_q, last_q)
    above = below[:, k_block + 1].clamp(first_q, last_q)
    inside = sums.gather(1, above) - sums.gather(1, among)
    return (among - first_q) * edges[k_block] + inside + (last_q - above) * edges[k_block + 1]


def _pack(number: Tensor, block: Tensor, visible: Tensor, full: Tensor, owners: int, num_blocks: int) -> Tensor:
    """The sections at the top of this file from entries in any order of lists, ascending within each.

    number: the list of each entry, [batches, entries]; block: what it visits, [entries].
    """
    num_lists = owners * num_blocks
    # Sorted by list, full before partial, and what is not visible behind all lists.
    key = torch.where(visible, 2 * number + ~full, 2 * num_lists).flatten()
    if 3 * num_lists + len(key) >= 2**31 - 1:
        raise ValueError(
            f"mask: {len(key):,} blocks (batch rows and heads counted) do not fit 32-bit lists; take fewer"
        )
    key, position = key.int().sort(stable=True)
    entries = block.expand_as(visible).flatten()[position]
    bounds = torch.searchsorted(key, torch.arange(2 * num_lists + 1, device=key.device, dtype=torch.int32))
    starts, full_ends = bounds[::2], bounds[1::2]
    lengths = starts.diff().reshape(owners, num_blocks)
    order = lengths.sort(dim=1, descending=True, stable=True).indices
    header = 3 * num_lists + 1
    return torch.cat((starts + header, full_ends + header, order.flatten(), entries)).int()


def dense_blocks(q_lists: Tensor, blocks: Sequence[int], seq_q: int, seq_k: int) -> Tensor:
    """The visited blocks as a bool tensor of elements, [batches, heads, seq_q, seq_k]. Needs N x N memory."""
    block_q, block_k, batches, heads = blocks
    num_q_blocks, num_k_blocks = -(-seq_q // block_q), -(-seq_k // block_k)
    num_lists = batches * heads * num_q_blocks
    starts, entries = q_lists[: num_lists + 1], q_lists[3 * num_lists + 1 :]
    position = torch.arange(3 * num_lists + 1, len(q_lists), device=q_lists.device, dtype=torch.int32)
    # Entries behind the last list go to a row of their own, which is cut off.
    number = torch.searchsorted(starts, position, right=True) - 1
    visited = torch.zeros(num_lists + 1, num_k_blocks, dtype=torch.bool, device=q_lists.device)
    visited[number, entries.long()] = True
    visited = visited[:num_lists].reshape(batches, heads, num_q_blocks, num_k_blocks)
    query, key = (torch.arange(seq, device=q_lists.device) for seq in (seq_q, seq_k))
    return visited[:, :, query // block_q][..., key // block_k]


def list_strides(blocks: Sequence[int], seq_len: int, side: int) -> tuple[int, int, int]:
    """What a kernel needs to find a list: how many there are, and how many lie between one batch row and the next, and
    between one head and the next; 0 where all share them.

    side: 0 for q_lists with seq_q, 1 for k_lists with seq_k.
    """
    if not blocks:
        return 0, 0, 0
    batches, heads = blocks[2:]
    num_blocks = -(-seq_len // blocks[side])
    return (
        batches * heads * num_blocks,
        heads * num_blocks if batches > 1 else 0,
        num_blocks if heads > 1 else 0,
    )


def check_lists(lists: Tensor | None, blocks: Sequence[int], q: Tensor) -> None:
    """Whether lists fit q, [batch, num_heads, seq_q, head_dim].

    Raises:
        ValueError: lists for another number of heads or rows, or on another device.
    """
    if lists is None:
        return
    batches, heads = blocks[2:]
    if heads not in (1, q.shape[1]):
        raise ValueError(
            f"mask: the block layout has heads={heads} and q has num_heads={q.shape[1]}; give a layout for 1 head, "
            f"which all share, or for {q.shape[1]} query heads (per_head joins layouts)"
        )
    if batches not in (1, q.shape[0]):
        raise ValueError(
            f"mask: the plan has lists for {batches} batch rows and q has {q.shape[0]}; lower the mask for this batch"
        )
    if lists.device != q.device:
        raise ValueError(f"mask: the plan is on {lists.device} and q on {q.device}; lower the mask on {q.device}")
