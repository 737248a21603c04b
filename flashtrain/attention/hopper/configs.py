"""Tile shapes of the Hopper kernels: a fixed table, so that bits never depend on a timing.

Tiles are as wide as the next head dim of 64, 128 and 256: TMA fills what a smaller one lacks with zeros, and leaves it
out when it writes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardConfig:
    """Consumer warpgroups of 64 queries each, keys a tile, key and value tiles in flight, and registers a thread where
    a limit lets several programs onto a multiprocessor."""

    consumers: int
    block_n: int = 128
    stages: int = 2
    max_registers: int | None = None

    @property
    def block_m(self) -> int:
        return 64 * self.consumers


@dataclass(frozen=True)
class BackwardConfig:
    """Queries a tile, whether the next tile's scores are computed ahead, tiles of queries in flight, consumer
    warpgroups of 64 keys each or, `wide`, of half of the columns for the same 64 keys, and registers a thread where a
    limit lets several programs onto a multiprocessor."""

    block_m: int
    ahead: bool
    stages: int = 2
    consumers: int = 2
    wide: bool = False
    max_registers: int | None = None

    @property
    def block_n(self) -> int:
        return 64 if self.wide else 64 * self.consumers


FORWARD = {64: ForwardConfig(consumers=3), 128: ForwardConfig(consumers=2), 256: ForwardConfig(consumers=2, block_n=64)}
# Three small programs a multiprocessor hide each other's beginning and end, which is much of a short sequence.
SHORT = {64: ForwardConfig(consumers=1, block_n=64, max_registers=80)}
# With a block layout blocks are whole tiles. Rows of few blocks are as short sequences.
LISTED = {64: SHORT[64], 128: FORWARD[128]}
SMALL_LISTED = {64: SHORT[64], 128: ForwardConfig(consumers=1, block_n=64, max_registers=128)}
TALL_LISTED = {64: SHORT[64], 128: ForwardConfig(consumers=2, block_n=64)}
LONG_LISTED = {64: ForwardConfig(consumers=2), 128: FORWARD[128]}
_LONG_ROW = 64  # blocks
# dk and dv of 128 keys and 256 columns would be more than the registers of two consumers.
BACKWARD = {
    64: BackwardConfig(block_m=128, ahead=True),
    128: BackwardConfig(block_m=64, ahead=False),
    256: BackwardConfig(block_m=64, ahead=False, wide=True),
}
# Two programs a multiprocessor in place of two consumers a program: blocks of 64 keys have nothing to share.
SMALL_BACKWARD = BackwardConfig(block_m=64, ahead=False, consumers=1, max_registers=128)


def tile_width(head_dim: int) -> int:
    """Columns of a tile."""
    return 64 if head_dim <= 64 else (128 if head_dim <= 128 else 256)


def forward_config(
    head_dim: int, seq_k: int, full: bool, table: bool, blocks: tuple[int, ...], row_blocks: int
) -> ForwardConfig:
    """full: every query sees every key, otherwise rows are shorter than the sequence. table: documents, which need
    registers that three consumers do not have. blocks: queries and keys a block of a layout first, () without one.
    row_blocks: blocks in one of its rows."""
    width = tile_width(head_dim)
    if blocks:
        if blocks[1] == 64:
            return (SMALL_LISTED if blocks[0] == 64 else TALL_LISTED)[width]
        return (LONG_LISTED if row_blocks >= _LONG_ROW else LISTED)[width]
    if width in SHORT and (table or seq_k <= (1024 if full else 4096)):
        return SHORT[width]
    return FORWARD[width]


def backward_config(head_dim: int, blocks: tuple[int, ...]) -> BackwardConfig:
    """blocks: as for `forward_config`."""
    return SMALL_BACKWARD if blocks and blocks[1] == 64 else BACKWARD[tile_width(head_dim)]
