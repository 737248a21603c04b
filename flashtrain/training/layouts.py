"""Block layouts as the configuration names them: which one each layer has, and how it is built for a length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flashtrain.attention import BlockLayout, layouts
from flashtrain.config import Config
from flashtrain.config.layout_rules import PARAMETERS
from flashtrain.config.schema import LayoutConfig

DENSE = LayoutConfig(name="dense")
_BLOCKS = {64: (64, 64), 128: (128, 128), "128x64": (128, 64)}
# Those that are functions of a length, a block size and the parameters of the same names.
_OF_LENGTH: dict[str, Callable[..., BlockLayout]] = {
    "local_global": layouts.local_global,
    "window_sinks": layouts.window_sinks,
    "dilated": layouts.dilated,
    "butterfly": layouts.butterfly,
    "bigbird": layouts.bigbird,
    "strided": layouts.strided,
    "fixed": layouts.fixed,
    "random_blocks": layouts.random_blocks,
}


def layouts_of_layers(config: Config) -> tuple[LayoutConfig, ...]:
    """The layout of each layer, with its block size; layers that compare equal share one."""
    cycle = [DENSE if layout.name == "dense" else layout for layout in config.attention.layouts] or [DENSE]
    every = config.attention.dense_every
    return tuple(
        DENSE if every is not None and layer % every == every - 1 else cycle[layer % len(cycle)]
        for layer in range(config.model.num_layers)
    )


def build_layout(config: Config, layout: LayoutConfig, seq_len: int) -> BlockLayout | None:
    """The layout for `seq_len` queries and as many keys; None for a dense one.

    Raises:
        ValueError: a length for which it cannot be made, or a file that does not hold it.
    """
    if layout.name == "dense":
        return None
    assert layout.block is not None
    block, arguments = _BLOCKS[layout.block], _arguments(layout, config.model.num_heads)
    if layout.name == "from_mask":
        return _from_file(arguments["path"], seq_len, block, config.model.num_heads)
    if layout.name == "tiles_2d":
        return _tiles(config, seq_len, block, arguments)
    return _OF_LENGTH[layout.name](seq_len, block, **arguments)


def corner(layout: BlockLayout, seq_len: int) -> BlockLayout:
    """What a layout lets its first `seq_len` queries see of its first `seq_len` keys."""
    return part(layout, 0, seq_len)


def part(layout: BlockLayout, first: int, queries: int) -> BlockLayout:
    """What a layout lets the `queries` queries from number `first` on see of the keys up to the last of them.

    Raises:
        ValueError: they lie in several blocks and do not begin with one.
    """
    seq_k = first + queries
    begin, columns = first // layout.block_q, -(-seq_k // layout.block_k)
    rows = -(-seq_k // layout.block_q) - begin
    if first % layout.block_q and rows > 1:
        raise ValueError(
            f"{queries} queries from number {first} on lie across blocks of {layout.block_q}: begin with a block, or "
            "stay in one"
        )
    row = torch.arange(layout.heads * layout.num_q_blocks).repeat_interleave(layout.starts.diff())
    head, q_block = row // layout.num_q_blocks, row % layout.num_q_blocks - begin
    kept = (q_block >= 0) & (q_block < rows) & (layout.blocks < columns)
    sizes = torch.bincount((head * rows + q_block)[kept], minlength=layout.heads * rows)
    starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return BlockLayout(queries, seq_k, layout.block_q, layout.block_k, layout.heads, starts, layout.blocks[kept])


def _arguments(layout: LayoutConfig, num_heads: int) -> dict[str, Any]:
    """The parameters that are given, as the functions of `layouts` call them."""
    given = {name: getattr(layout, name) for name in PARAMETERS[layout.name]}
    arguments = {name: value for name, value in given.items() if value is not None}
    if arguments.pop("per_head", False):
        arguments["heads"] = num_heads
    return arguments


def _tiles(config: Config, seq_len: int, block: tuple[int, int], arguments: dict[str, Any]) -> BlockLayout:
    assert config.classifier is not None
    side = math.isqrt(seq_len)
    if side**2 != seq_len:
        raise ValueError(
            f"seq_len={seq_len}: attention.layout.name=tiles_2d is for images of side^2 pixels; take {side**2}"
        )
    order = "tile" if config.classifier.token_order == "tiles" else "row_major"
    return layouts.tiles_2d(side, side, block, tile=config.classifier.tile, order=order, **arguments)


def _from_file(path: str, seq_len: int, block: tuple[int, int], num_heads: int) -> BlockLayout:
    try:
        layout = layouts.from_mask(torch.from_numpy(np.load(path, allow_pickle=False)), seq_len, block)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"attention layout from_mask, path={path}: {error}") from error
    if layout.heads not in (1, num_heads):
        raise ValueError(
            f"attention layout from_mask, path={path}: the array has {layout.heads} heads and the model "
            f"model.num_heads={num_heads}; give one for each head, or leave that dimension out"
        )
    return layout
