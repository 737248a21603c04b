"""Block layouts: which blocks of keys each block of queries sees.

    mask = Causal() & local_global(16384, window=4)

Each function here gives a layout for one length (or a pair of lengths, queries and keys) and one block size, in time
and memory proportional to the blocks that it makes visible. "A block sees its neighbours" is meant of the block of keys
at the queries' own positions: a block of queries that spans two blocks of keys sees what either of the two would. With
more keys than queries the two are aligned at the end, as in every mask. Counts such as `window` are in blocks of keys.

Layouts look to both sides; join them with `Causal()` for a decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from flashtrain.attention.block_layout import BlockLayout, per_head, require
from flashtrain.attention.grid import Blocks, Device, SeqLen, grid_of
from flashtrain.attention.image_layouts import tile_order, tiles_2d
from flashtrain.attention.random_layouts import bigbird, random_blocks

__all__ = [
    "BlockLayout",
    "bigbird",
    "butterfly",
    "dilated",
    "fixed",
    "from_function",
    "from_mask",
    "local_global",
    "per_head",
    "random_blocks",
    "strided",
    "tile_order",
    "tiles_2d",
    "window_sinks",
]


def butterfly(
    seq_len: SeqLen,
    block: Blocks = 128,
    *,
    max_stride: int | None = None,
    global_blocks: int = 1,
    device: Device = None,
) -> BlockLayout:
    """The fixed butterfly of Pixelated Butterfly (https://arxiv.org/abs/2112.00029, section 3, flat block butterfly and
    low rank), the pattern of block-sparse FlashAttention (https://arxiv.org/abs/2205.14135, section 3.3).

    The factors of a butterfly matrix, added up instead of multiplied: block i sees itself and the blocks whose number
    differs from i in one binary digit. In attention the low-rank term is a few global blocks.

    Args:
        max_stride: largest distance within a factor, a power of two; None for all that fit, about log2(blocks) a row.
        global_blocks: the first so many blocks are seen by all and see all.
    """
    grid = grid_of(seq_len, block, device)
    require("global_blocks", global_blocks, 0)
    if max_stride is not None and (max_stride < 1 or max_stride & (max_stride - 1)):
        raise ValueError(f"max_stride={max_stride}: give a power of two, or None for all that fit")
    limit = grid.num_k_blocks - 1 if max_stride is None else min(max_stride, grid.num_k_blocks - 1)
    row, own = grid.own()
    flips = torch.tensor([0, *(1 << digit for digit in range(max(0, limit).bit_length()))], device=grid.device)
    return grid.layout((row[:, None], own[:, None] ^ flips), *grid.globals(global_blocks))


def local_global(
    seq_len: SeqLen, block: Blocks = 128, *, window: int = 4, global_blocks: int = 1, device: Device = None
) -> BlockLayout:
    """Sliding window and global attention of Longformer (https://arxiv.org/abs/2004.05150, section 3.1).

    Args:
        window: blocks that are seen on each side of the own one.
        global_blocks: the first so many blocks are seen by all and see all.
    """
    return dilated(seq_len, block, window=window, dilation=1, global_blocks=global_blocks, device=device)


def dilated(
    seq_len: SeqLen,
    block: Blocks = 128,
    *,
    window: int = 4,
    dilation: int = 2,
    global_blocks: int = 0,
    device: Device = None,
) -> BlockLayout:
    """Dilated sliding window of Longformer (https://arxiv.org/abs/2004.05150, section 3.1): the own block, and on each
    side every `dilation`-th one, `window` of them. With dilation 1 a plain window."""
    grid = grid_of(seq_len, block, device)
    require("window", window, 0)
    require("dilation", dilation, 1)
    require("global_blocks", global_blocks, 0)
    return grid.layout(grid.band(-window, window, dilation), *grid.globals(global_blocks))


def window_sinks(
    seq_len: SeqLen, block: Blocks = 128, *, window: int = 8, after: int = 0, sinks: int = 1, device: Device = None
) -> BlockLayout:
    """A sliding window with attention sinks (StreamingLLM, https://arxiv.org/abs/2309.17453, section 3.2).

    Args:
        window: blocks that are seen before the own one; for a causal model.
        after: blocks that are seen after it; for a model that looks to both sides.
        sinks: the first so many blocks are seen by all.
    """
    grid = grid_of(seq_len, block, device)
    require("window", window, 0)
    require("after", after, 0)
    require("sinks", sinks, 0)
    return grid.layout(grid.band(-window, after), grid.columns(sinks))


def strided(seq_len: SeqLen, block: Blocks = 128, *, stride: int = 8, device: Device = None) -> BlockLayout:
    """Strided attention of the Sparse Transformer (https://arxiv.org/abs/1904.10509, section 4.3): the `stride` nearest
    blocks on each side, and every `stride`-th block from the own one on."""
    grid = grid_of(seq_len, block, device)
    require("stride", stride, 1)
    row, own = grid.own()
    column = own[:, None] % stride + stride * torch.arange(ceil(grid.num_k_blocks / stride), device=grid.device)
    return grid.layout(grid.band(-stride, stride), (row[:, None], column))


def fixed(
    seq_len: SeqLen, block: Blocks = 128, *, stride: int = 8, summary: int = 1, device: Device = None
) -> BlockLayout:
    """Fixed attention of the Sparse Transformer (https://arxiv.org/abs/1904.10509, section 4.3): the own stretch of
    `stride` blocks, and the last `summary` blocks of every stretch."""
    grid = grid_of(seq_len, block, device)
    require("stride", stride, 1)
    if not 0 <= summary <= stride:
        raise ValueError(f"summary={summary}: give 0 to stride={stride} blocks")
    row, own = grid.own()
    stretch = torch.arange(stride, device=grid.device)
    stretches = torch.arange(ceil(grid.num_k_blocks / stride), device=grid.device) * stride
    ends = (stretches[:, None] + stretch[stride - summary :]).flatten()
    # Queries before the first key are in no stretch.
    here = torch.where(own >= 0, own // stride * stride, -stride)
    rows = torch.arange(grid.num_q_blocks, device=grid.device)
    return grid.layout((row[:, None], here[:, None] + stretch), (rows[:, None], ends))


def from_mask(visible: Tensor, seq_len: SeqLen, block: Blocks = 128) -> BlockLayout:
    """A layout from a bool tensor [num_q_blocks, num_k_blocks], or [num_heads, ...] for one of each head's own, true
    where a block is visible.

    Raises:
        ValueError: a tensor of another dtype or shape.
    """
    grid = grid_of(seq_len, block, visible.device)
    wanted = (grid.num_q_blocks, grid.num_k_blocks)
    if visible.dtype != torch.bool:
        raise ValueError(f"visible is {visible.dtype}: give a bool tensor, true where a block is visible")
    if visible.dim() not in (2, 3) or visible.shape[-2:] != wanted or not visible.shape[0]:
        raise ValueError(
            f"visible has shape {tuple(visible.shape)}: for {grid.seq_q} queries and {grid.seq_k} keys in blocks of "
            f"{grid.block_q} x {grid.block_k} give {wanted} or (num_heads, {wanted[0]}, {wanted[1]})"
        )
    heads = visible.shape[0] if visible.dim() == 3 else 1
    pairs = torch.nonzero(visible.reshape(heads * wanted[0], wanted[1]), as_tuple=True)
    return grid.layout((pairs[0], pairs[1]), heads=heads)


# Blocks that `from_function` asks about at once.
_ASKED_AT_ONCE = 2**20


def from_function(
    visible: Callable[[Tensor, Tensor, Tensor], Tensor],
    seq_len: SeqLen,
    block: Blocks = 128,
    *,
    heads: int = 1,
    device: Device = None,
) -> BlockLayout:
    """A layout from a function visible(head, q_block, k_block) of three int64 tensors that broadcast, which gives a
    bool tensor. It is asked about some rows at a time: time goes with all blocks, memory with the visible ones.

    Args:
        heads: num_heads for a layout of each head's own; 1, and head is 0, for one that all share.

    Raises:
        ValueError: an answer of another dtype or shape.
    """
    grid = grid_of(seq_len, block, device)
    require("heads", heads, 1)
    row = torch.arange(heads * grid.num_q_blocks, device=grid.device)
    k_block = torch.arange(grid.num_k_blocks, device=grid.device)[None]
    parts = [(row[:0], row[:0])]
    for some in row.split(max(1, _ASKED_AT_ONCE // max(1, grid.num_k_blocks))):
        answer = visible((some // grid.num_q_blocks)[:, None], (some % grid.num_q_blocks)[:, None], k_block)
        wanted = (len(some), grid.num_k_blocks)
        fits = answer.dim() == 2 and all(n in (1, size) for n, size in zip(answer.shape, wanted, strict=True))
        if answer.dtype != torch.bool or not fits:
            raise ValueError(f"visible gave {answer.dtype} {tuple(answer.shape)}: give a bool tensor {wanted}")
        place, column = torch.nonzero(answer.expand(wanted), as_tuple=True)
        parts.append((some[place], column))
    return grid.layout(*parts, heads=heads)
