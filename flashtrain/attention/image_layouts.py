"""Block layouts for images, whose neighbours are neighbours in two dimensions."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from flashtrain.attention.block_layout import BlockLayout, require
from flashtrain.attention.grid import Blocks, Device, grid_of


def tile_order(height: int, width: int, tile: tuple[int, int] = (8, 16)) -> Tensor:
    """The places in row-major order of an image's tokens taken tile by tile, int64 [height * width]:
    `tokens[:, tile_order(...)]` puts a row-major image into tile order."""
    y, x = torch.arange(height)[:, None], torch.arange(width)
    number = (y // tile[0]) * ceil(width / tile[1]) + x // tile[1]
    return number.flatten().sort(stable=True).indices


def tiles_2d(
    height: int,
    width: int,
    block: Blocks = 128,
    *,
    tile: tuple[int, int] = (8, 16),
    reach: int = 1,
    order: str = "row_major",
    device: Device = None,
) -> BlockLayout:
    """Two-dimensional local attention of the Image Transformer (https://arxiv.org/abs/1802.05751, section 3.2): an
    image's token sees the tile that it lies in and the tiles around it. A block is visible if it holds one such pair.

    Args:
        height, width: of the image, in tokens; the length is their product.
        tile: height and width of a tile; one with as many tokens as a block keeps blocks few in tile order.
        reach: how many tiles away is still seen, in both directions.
        order: of the tokens: "row_major", or "tile" for those of `tile_order`.
    """
    for name, value, least in (("height", height, 0), ("width", width, 0), ("reach", reach, 0)):
        require(name, value, least)
    require("tile", min(tile), 1)
    if order not in ("row_major", "tile"):
        raise ValueError(f"order={order!r}: give 'row_major' or 'tile'")
    grid = grid_of(height * width, block, device)
    token = torch.arange(height * width) if order == "row_major" else tile_order(height, width, tile)
    rows, columns = ceil(height / tile[0]), max(1, ceil(width / tile[1]))
    own = (token // max(1, width) // tile[0]) * columns + token % max(1, width) // tile[1]
    place = torch.arange(height * width)
    q_block, q_tile = _unique_pairs(place // grid.block_q, own)
    k_tile, k_block = _unique_pairs(own, place // grid.block_k)
    # The tiles around those of a block of queries, and then the blocks of keys with a token in them.
    step = torch.arange(-reach, reach + 1)
    y, x = (q_tile // columns)[:, None, None] + step[:, None], (q_tile % columns)[:, None, None] + step
    inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    q_block, near = _unique_pairs(q_block[:, None, None].expand(inside.shape)[inside], (y * columns + x)[inside])
    begin = torch.searchsorted(k_tile, near)
    count = torch.searchsorted(k_tile, near, right=True) - begin
    member = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    column = k_block[begin.repeat_interleave(count) + member]
    return grid.layout((q_block.repeat_interleave(count).to(grid.device), column.to(grid.device)))


def _unique_pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Each pair once, sorted by first and then second; int64 [pairs] each."""
    factor = int(second.max()) + 1 if len(second) else 1
    key = torch.unique(first * factor + second)
    return key // factor, key % factor
