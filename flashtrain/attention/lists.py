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

from flashtrain.attention.block_layout import BlockLayout, num_blocks


class Lists(NamedTuple):
    """`Plan.q_lists`, `Plan.k_lists` and `Plan.blocks`, and the visible pairs a batch row and head (float64 scalar)."""

    q_lists: Tensor
    k_lists: Tensor
    blocks: tuple[int, int, int, int]
    pairs: Tensor


def build_lists(layout: BlockLayout, lo: Tensor, hi: Tensor) -> Lists:
    """The lists of a layout whose queries see only the keys [lo, hi).

    Time and memory go with the layout's visible blocks and the lengths, and the host never waits for the device. Few
    operations, most of them for both directions at once: lists are short, and what they cost is to launch them.

    Args:
        layout: on the device of lo and hi.
        lo, hi: int32 or int64 [batches, seq_q], both of one dtype, sorted in each row; `Plan.intervals`.

    Raises:
        ValueError: more blocks than 32 bits can count.
    """
    batches, heads = lo.shape[0], layout.heads
    owners = batches * heads
    # Both directions number their lists with so many blocks a head; those beyond a direction's own stay empty.
    width = max(1, layout.num_q_blocks, layout.num_k_blocks)
    num_lists, num_entries = owners * width, batches * len(layout.blocks)
    if 3 * num_lists + num_entries >= 2**31 - 1:
        raise ValueError(
            f"mask: {num_entries:,} visible blocks in {num_lists:,} rows of blocks (batch rows and heads counted) do "
            "not fit 32-bit work lists; give a layout with fewer or larger blocks, or fewer batch rows"
        )
    pairs = _visible_pairs(lo, hi, layout)
    head, blocks = layout.entries[0], layout.entries[1:]
    # Everything below has both directions in its first dimension: lists of queries, lists of keys.
    first_list = torch.arange(0, num_lists, heads * width, device=lo.device, dtype=torch.int32)[:, None]
    number = torch.add(blocks, head, alpha=width)[:, None] + first_list  # [2, batches, entries]
    # Sorted by list, full before partial, and what is not visible behind all lists.
    key = torch.add(pairs != layout.block_q * layout.block_k, number, alpha=2).masked_fill_(pairs == 0, 2 * num_lists)
    key, position = key.flatten(1).sort(stable=True)
    # A block of queries visits keys, a block of keys queries.
    visited = blocks.flip(0)[:, None].expand(-1, batches, -1).flatten(1).gather(1, position)
    keys = torch.arange(2 * num_lists + 2, device=lo.device, dtype=torch.int32).expand(2, -1).contiguous()
    places = torch.searchsorted(key, keys, out_int32=True).unflatten(1, (-1, 2))
    lengths = places[..., 0].diff().unflatten(1, (owners, width))
    order = lengths.sort(descending=True, stable=True).indices.int()
    sizes = (layout.num_q_blocks, layout.num_k_blocks)
    q_lists, k_lists = (_pack(*parts) for parts in zip(places, order, visited, sizes, strict=True))
    mean_pairs = pairs.sum(dtype=torch.float64) / owners
    return Lists(q_lists, k_lists, (layout.block_q, layout.block_k, batches, heads), mean_pairs)


def _visible_pairs(lo: Tensor, hi: Tensor, layout: BlockLayout) -> Tensor:
    """How many elements of each block are visible, int64 [batches, entries]: over the block's queries the sum of hi
    less that of lo, both clamped to the block's keys.

    A bound never decreases from one query to the next. Let a block's keys be [e0, e1), n0 and n1 the first of its
    queries whose bounds pass e0 and e1, and S(n) the sum of the bounds before query n. Then the clamped sum is
    (S(n1) - n1 e1) - (S(n0) - n0 e0) and a term that hi and lo have in common.
    """
    _, q_block, k_block = layout.entries
    bounds = torch.stack((hi, lo))
    sums = torch.nn.functional.pad(bounds.cumsum(2), (1, 0))
    # The last edge may lie beyond the keys: no bound does.
    edges = torch.arange(
        0, (layout.num_k_blocks + 1) * layout.block_k, layout.block_k, device=lo.device, dtype=lo.dtype
    )
    passed = torch.searchsorted(bounds, edges.expand(*bounds.shape[:2], -1).contiguous(), right=True)
    edge = k_block + torch.arange(2, device=lo.device)[:, None]
    first = q_block * layout.block_q
    query = passed[..., edge].clamp(first, first + layout.block_q)  # n0 and n1: [2, batches, 2, entries]
    up_to = sums.gather(2, query.flatten(2)).view_as(query).addcmul(query, edge, value=-layout.block_k)
    clamped = up_to[:, :, 1] - up_to[:, :, 0]
    return clamped[0] - clamped[1]


def _pack(places: Tensor, order: Tensor, visited: Tensor, num_rows: int) -> Tensor:
    """The sections at the top of this file, for one direction.

    Args:
        places: [owners * width + 1, 2], where in `visited` each list begins and where its full entries end.
        order: [owners, width], the blocks of each batch row and head, longest list first; num_rows of them are real.
        visited: [batches * entries], what the lists visit, one list behind the other.
    """
    owners, width = order.shape
    places = places + (3 * owners * num_rows + 1)
    starts, full_ends = places[:-1].unflatten(0, (owners, width))[:, :num_rows].flatten(0, 1).unbind(1)
    return torch.cat((starts, places[-1:, 0], full_ends, order[:, :num_rows].flatten(), visited))


def average_length(list_size: int, blocks: Sequence[int], seq_len: int, side: int) -> int:
    """Entries of the average list, at least 1, from the numbers in a tensor of lists alone: nothing waits for the
    device. Those of the layout that the other masks hide count too."""
    num_lists = list_strides(blocks, seq_len, side)[0]
    return max(1, (list_size - 1 - 3 * num_lists) // num_lists)


def dense_blocks(q_lists: Tensor, blocks: Sequence[int], seq_q: int, seq_k: int) -> Tensor:
    """The visited blocks as a bool tensor of elements, [batches, heads, seq_q, seq_k]. Needs N x N memory."""
    block_q, block_k, batches, heads = blocks
    num_q_blocks, num_k_blocks = num_blocks(seq_q, block_q), num_blocks(seq_k, block_k)
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
    lists_a_head = num_blocks(seq_len, blocks[side])
    return (
        batches * heads * lists_a_head,
        heads * lists_a_head if batches > 1 else 0,
        lists_a_head if heads > 1 else 0,
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
