"""Block layouts with blocks drawn at random: from a seed, and the same on every device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashtrain.attention.block_layout import BlockLayout, per_head, require
from flashtrain.attention.grid import Blocks, Device, SeqLen, grid_of


def bigbird(
    seq_len: SeqLen,
    block: Blocks = 128,
    *,
    window: int = 1,
    global_blocks: int = 2,
    random: int = 3,
    seed: int = 0,
    heads: int = 1,
    device: Device = None,
) -> BlockLayout:
    """BigBird (https://arxiv.org/abs/2007.14062, section 2): a window, global blocks and random blocks.

    Args:
        window: blocks that are seen on each side of the own one.
        global_blocks: the first so many blocks are seen by all and see all.
        random: blocks a row that are drawn from the rest, all different.
        seed: of the draw, which is the same on every device; head h draws from seed + h.
        heads: num_heads for random blocks of each head's own, 1 for the same in all.
    """
    grid = grid_of(seq_len, block, device)
    require("window", window, 0)
    require("global_blocks", global_blocks, 0)
    require("random", random, 0)
    require("heads", heads, 1)
    if heads > 1:
        one = partial(bigbird, seq_len, block, window=window, global_blocks=global_blocks, random=random, device=device)
        return per_head([one(seed=seed + head) for head in range(heads)])
    first, last = grid.own_range()
    # Free are the blocks behind the global ones, without those of the window.
    before = min(global_blocks, grid.num_k_blocks)
    lo = (first - window).clamp(before, grid.num_k_blocks)
    hi = (last + window + 1).clamp(before, grid.num_k_blocks)
    drawn = _distinct(grid.num_k_blocks - before - (hi - lo), random, seed)
    column = drawn + before
    column = torch.where(column < lo[:, None], column, column + (hi - lo)[:, None])
    row = torch.arange(grid.num_q_blocks, device=grid.device)[:, None]
    drawn_pairs = (row, torch.where(drawn < 0, -1, column))
    return grid.layout(drawn_pairs, grid.band(-window, window), *grid.globals(global_blocks))


def _distinct(count: Tensor, wanted: int, seed: int) -> Tensor:
    """For each row `wanted` different numbers below its count, int64 [rows, wanted]; -1 where there are too few.

    Floyd's algorithm (Bentley, Communications of the ACM 30(9), 1987), all rows at once.
    """
    generator = torch.Generator().manual_seed(seed)
    available = count.cpu()
    chosen = torch.full((len(available), wanted), -1)
    for step in range(wanted):
        top = available - available.clamp(max=wanted) + step
        draw = (torch.rand(len(top), generator=generator, dtype=torch.float64) * (top + 1)).long()
        draw = torch.where((chosen == draw[:, None]).any(1), top, draw)
        chosen[:, step] = torch.where(step < available, draw, -1)
    return chosen.to(count.device)


def random_blocks(
    seq_len: SeqLen,
    block: Blocks = 128,
    *,
    density: float,
    seed: int = 0,
    heads: int = 1,
    no_empty_rows: bool = True,
    device: Device = None,
) -> BlockLayout:
    """So many blocks of each head, drawn evenly from all of them; rows are uneven.

    Args:
        density: share of the blocks that is visible, 0 to 1.
        seed: of the draw, which is the same on every device; head h draws from seed + h.
        heads: num_heads for blocks of each head's own, 1 for the same in all.
        no_empty_rows: a row that got no block is given one, on top of the density.
    """
    grid = grid_of(seq_len, block, device)
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density={density}: give a share from 0 to 1")
    require("heads", heads, 1)
    if heads > 1:
        one = partial(random_blocks, seq_len, block, density=density, no_empty_rows=no_empty_rows, device=device)
        return per_head([one(seed=seed + head) for head in range(heads)])
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = grid.num_q_blocks, grid.num_k_blocks
    cell = _cells(num_rows * num_columns, density, generator)
    row, column = cell // max(1, num_columns), cell % max(1, num_columns)
    if no_empty_rows and num_columns:
        seen = torch.zeros(num_rows, dtype=torch.bool)
        seen[row] = True
        empty = torch.nonzero(~seen).flatten()
        row = torch.cat((row, empty))
        column = torch.cat((column, torch.randint(num_columns, (len(empty),), generator=generator)))
    return grid.layout((row.to(grid.device), column.to(grid.device)))


def _cells(total: int, density: float, generator: torch.Generator) -> Tensor:
    """round(density * total) different numbers below total, each set of them as likely as any other."""
    wanted = round(density * total)
    if 2 * wanted > total:  # draw those left out
        left = torch.ones(total, dtype=torch.bool)
        left[_cells(total, 1 - wanted / total, generator)] = False
        return torch.nonzero(left).flatten()
    drawn = torch.empty(0, dtype=torch.int64)
    while len(drawn) < wanted:
        more = torch.randint(total, (wanted - len(drawn) + 64,), generator=generator)
        drawn = torch.unique(torch.cat((drawn, more)))
    return drawn[torch.randperm(len(drawn), generator=generator)[:wanted]]
