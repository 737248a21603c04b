"""The grid of blocks on which `layouts` builds its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from flashtrain.attention.block_layout import BlockedLengths, BlockLayout, require, require_block

# One length for queries and keys, or a pair of lengths; likewise blocks.
SeqLen = int | tuple[int, int]
Blocks = int | tuple[int, int]
Device = torch.device | str | None
# Blocks of queries and blocks of keys, two integer tensors that broadcast.
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Grid(BlockedLengths):
    """The blocks of one pair of lengths, and pairs (block of queries, block of keys) in it."""

    device: torch.device

    def own_range(self) -> tuple[Tensor, Tensor]:
        """First and last block of keys at the positions of each block of queries, int64 [num_q_blocks] each. With more
        queries than keys the first ones are negative."""
        first = torch.arange(self.num_q_blocks, device=self.device) * self.block_q
        last = (first + self.block_q).clamp(max=self.seq_q) - 1
        shift = self.seq_k - self.seq_q
        return (first + shift) // self.block_k, (last + shift) // self.block_k

    def own(self) -> Pairs:
        """Each block of queries with each block of keys at its own positions, int64 [pairs] each."""
        first, last = self.own_range()
        # So many a block of queries can touch, wherever it begins.
        step = torch.arange((self.block_q - 1) // self.block_k + 2, device=self.device)
        block = first[:, None] + step
        row, place = torch.nonzero(block <= last[:, None], as_tuple=True)
        return row, block[row, place]

    def band(self, before: int, after: int, dilation: int = 1) -> Pairs:
        """The blocks own + i * dilation for i from before to after."""
        row, own = self.own()
        # Those beyond either end of the keys are dropped: they need not be made.
        reach = (self.num_q_blocks * self.block_q) // self.block_k + self.num_k_blocks + 1
        offsets = torch.arange(max(before, -reach), min(after, reach) + 1, device=self.device) * dilation
        return row[:, None], own[:, None] + offsets

    def columns(self, count: int) -> Pairs:
        """The first `count` blocks of keys, seen by all."""
        row = torch.arange(self.num_q_blocks, device=self.device)
        return row[:, None], torch.arange(min(count, self.num_k_blocks), device=self.device)

    def globals(self, count: int) -> tuple[Pairs, Pairs]:
        """The first `count` blocks are seen by all and see all."""
        row, own = self.own()
        row = row[(own >= 0) & (own < count)]
        return self.columns(count), (row[:, None], torch.arange(self.num_k_blocks, device=self.device))

    def layout(self, *parts: Pairs, heads: int = 1) -> BlockLayout:
        """The layout of all these pairs; those outside the keys are dropped, and none counts twice.

        With several heads the block of queries of head h is h * num_q_blocks + block.
        """
        columns = max(1, self.num_k_blocks)
        keys = []
        for row, column in parts:
            row, column = torch.broadcast_tensors(row, column)
            inside = (column >= 0) & (column < self.num_k_blocks)
            keys.append((row * columns + column)[inside])
        key = torch.unique(torch.cat(keys))
        bounds = torch.arange(heads * self.num_q_blocks + 1, device=self.device) * columns
        starts = torch.searchsorted(key, bounds)
        return BlockLayout(
            self.seq_q, self.seq_k, self.block_q, self.block_k, heads, starts, (key % columns).to(torch.int32)
        )


def grid_of(seq_len: SeqLen, block: Blocks, device: Device) -> Grid:
    """The grid of a pair of lengths.

    Raises:
        ValueError: lengths or blocks that are no whole numbers, a negative length, a block size that no kernel takes.
    """
    seq_q, seq_k = _pair("seq_len", seq_len)
    block_q, block_k = _pair("block", block)
    require("seq_len", min(seq_q, seq_k), 0)
    require_block(block, block_q, block_k)
    return Grid(seq_q, seq_k, block_q, block_k, torch.device("cpu" if device is None else device))


def _pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(isinstance(part, Integral) for part in pair):
        raise ValueError(f"{name}={value!r}: give one whole number, or one for queries and one for keys")
    return int(pair[0]), int(pair[1])
