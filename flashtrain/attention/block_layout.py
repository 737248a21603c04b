"""What a block layout is: the blocks of keys that each block of queries sees, as rows of block numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Integral

import torch
from torch import Tensor

from flashtrain.attention.masks import Mask

# (queries, keys) a block that the kernels take.
BLOCK_SIZES = ((64, 64), (128, 128), (128, 64))

_log = logging.getLogger(__name__)


def num_blocks(seq_len: int, block: int) -> int:
    """How many blocks a length takes; the last one may be cut off by it."""
    return -(-seq_len // block)


@dataclass(frozen=True)
class BlockedLengths:
    """Numbers of queries and keys, and how many of them make a block."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int

    @property
    def num_q_blocks(self) -> int:
        return num_blocks(self.seq_q, self.block_q)

    @property
    def num_k_blocks(self) -> int:
        return num_blocks(self.seq_k, self.block_k)


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(BlockedLengths, Mask):
    """The blocks of keys that each block of queries sees; the last block of each may be cut off by the length.

    A layout equals only itself: build it once, not once a step. It joins other masks by `&`, and then an element is
    visible if its block is and all others allow it. The functions in `layouts` make them.

    Attributes:
        seq_q, seq_k: numbers of queries and keys.
        block_q, block_k: queries and keys a block, one of `BLOCK_SIZES`.
        heads: 1 for a layout that all heads share, or num_heads, the number of query heads.
        starts: int64 [heads * num_q_blocks + 1], where in `blocks` each row begins and the last one ends.
        blocks: int32 [visible blocks], the blocks of keys that each row sees, ascending in each row.

    Raises:
        ValueError: a block size that no kernel takes, or starts and blocks that are no such rows.
    """

    heads: int
    starts: Tensor
    blocks: Tensor
    _checked: bool = field(default=False, kw_only=True)
    _elsewhere: dict[torch.device, BlockLayout] = field(default_factory=dict, init=False)

    # The parents compare by fields, and would take any two layouts of the same lengths for equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        if self._checked:
            return
        _check_layout(self)
        blind = int((self.starts.diff() == 0).sum())
        if blind and self.num_k_blocks:
            _say_blind(blind, self.heads * self.num_q_blocks, self.seq_q, self.seq_k)

    @property
    def density(self) -> float:
        """Visible share of all blocks, 0 to 1."""
        return len(self.blocks) / max(1, self.heads * self.num_q_blocks * self.num_k_blocks)

    def blocks_per_row(self) -> Tensor:
        """How many blocks each block of queries sees, int64 [heads, num_q_blocks]."""
        return self.starts.diff().reshape(self.heads, self.num_q_blocks)

    @cached_property
    def entries(self) -> Tensor:
        """Head, block of queries and block of keys of each visible block, int32 [3, visible blocks]; made once."""
        # How many there are is given, so that nobody has to ask the device.
        row = torch.repeat_interleave(self.starts.diff().int(), output_size=len(self.blocks))
        rows_a_head = max(1, self.num_q_blocks)
        return torch.stack((row // rows_a_head, row % rows_a_head, self.blocks))

    def to(self, device: torch.device | str) -> BlockLayout:
        """The layout on a device; copied there once."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:  # "cuda" is the current one, and equals none with a number
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.blocks.device:
            return self
        if device not in self._elsewhere:
            starts, blocks = self.starts.to(device), self.blocks.to(device)
            # What is right here is right there, and to look once more the host would wait for the device.
            self._elsewhere[device] = replace(self, starts=starts, blocks=blocks, _checked=True)
        return self._elsewhere[device]

    def __repr__(self) -> str:
        sizes = f"{self.seq_q} x {self.seq_k} in blocks of {self.block_q} x {self.block_k}"
        return f"BlockLayout({sizes}, heads={self.heads}, density={self.density:.3g}, on {self.blocks.device})"


def _check_layout(layout: BlockLayout) -> None:
    require("seq_q", layout.seq_q, 0)
    require("seq_k", layout.seq_k, 0)
    require("heads", layout.heads, 1)
    require_block((layout.block_q, layout.block_k), layout.block_q, layout.block_k)
    starts, blocks = layout.starts, layout.blocks
    num_rows = layout.heads * layout.num_q_blocks
    if starts.dtype != torch.int64 or starts.shape != (num_rows + 1,):
        raise ValueError(
            f"starts is {starts.dtype} {tuple(starts.shape)}: give int64 ({num_rows + 1},), one place for each of "
            f"{layout.num_q_blocks} blocks of queries of {layout.heads} heads and the end"
        )
    if blocks.dtype != torch.int32 or blocks.dim() != 1 or blocks.device != starts.device:
        raise ValueError(
            f"blocks is {blocks.dtype} {tuple(blocks.shape)} on {blocks.device}: give int32 in one dimension on "
            f"{starts.device}, where starts is"
        )
    rising = bool((starts.diff() >= 0).all() & (starts[0] == 0) & (starts[-1] == len(blocks)))
    if not rising:
        raise ValueError(f"starts must rise from 0 to the {len(blocks)} entries of blocks")
    # Within a row blocks ascend, so that they may fall only where a new row begins.
    begins = torch.zeros(len(blocks) + 1, dtype=torch.bool, device=blocks.device)
    begins[starts] = True
    ascending = (blocks.diff() > 0) | begins[1:-1]
    if len(blocks) and not bool(ascending.all() & (blocks >= 0).all() & (blocks < layout.num_k_blocks).all()):
        raise ValueError(f"blocks must ascend in each row and lie in 0..{layout.num_k_blocks - 1}")


@lru_cache(maxsize=1024)
def _say_blind(blind: int, num_rows: int, seq_q: int, seq_k: int) -> None:
    """Once for layouts that agree in all of these."""
    _log.warning(
        "block layout for %d queries and %d keys: in %d of %d blocks of queries (heads counted) no key is visible; "
        "their output is 0",
        seq_q, seq_k, blind, num_rows,
    )  # fmt: skip


def per_head(layouts: Sequence[BlockLayout]) -> BlockLayout:
    """One layout from those of each query head, in order; on the device of the first.

    Raises:
        ValueError: none at all, or layouts for different lengths or blocks.
    """
    if not layouts:
        raise ValueError("layouts=[]: give one layout for each head")
    first = layouts[0]
    for number, layout in enumerate(layouts):
        for name in ("seq_q", "seq_k", "block_q", "block_k"):
            if getattr(layout, name) != getattr(first, name):
                raise ValueError(
                    f"layouts[{number}] has {name}={getattr(layout, name)} and layouts[0] {getattr(first, name)}; "
                    "heads of one layer share lengths and blocks"
                )
    parts = [layout.to(first.blocks.device) for layout in layouts]
    sizes = torch.cat([layout.starts.diff() for layout in parts])
    return BlockLayout(
        first.seq_q,
        first.seq_k,
        first.block_q,
        first.block_k,
        sum(layout.heads for layout in parts),
        torch.nn.functional.pad(sizes.cumsum(0), (1, 0)),
        torch.cat([layout.blocks for layout in parts]),
    )


def require_block(given: object, block_q: int, block_k: int) -> None:
    """Raises ValueError, which shows the block as it was given, where no kernel takes blocks of this size."""
    if (block_q, block_k) not in BLOCK_SIZES:
        sizes = ", ".join(f"{q} x {k}" for q, k in BLOCK_SIZES)
        raise ValueError(f"block={given}: the kernels take blocks of {sizes}; give 64, 128 or (128, 64)")


def require(name: str, value: int, least: int) -> None:
    """Raises ValueError where a number is not whole, or below the least that makes sense."""
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value}: give a whole number >= {least}")
