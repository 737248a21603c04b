"""Tile shapes of the Hopper kernels: a fixed table, so that bits never depend on a timing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardConfig:
    """Consumer warpgroups of 64 queries each, keys a tile, key and value tiles in flight, and registers a thread where
    a limit lets two programs onto a multiprocessor."""

    consumers: int
    block_n: int = 128
    stages: int = 2
    max_registers: int | None = None

    @property
    def block_m(self) -> int:
        return 64 * self.consumers


@dataclass(frozen=True)
class BackwardConfig:
    """Queries a tile (128 keys face them), whether the next tile's scores are computed ahead, and tiles of queries in
    flight."""

    block_m: int
    ahead: bool
    stages: int = 2


FORWARD = {64: ForwardConfig(consumers=3), 128: ForwardConfig(consumers=2)}
# With a block layout tiles are as large as its blocks, `backends.HOPPER_BLOCK`.
LISTED = ForwardConfig(consumers=2)
# Two small programs a multiprocessor hide each other's beginning and end, which is much of a short sequence.
SHORT = {64: ForwardConfig(consumers=1, max_registers=128)}
BACKWARD = {64: BackwardConfig(block_m=128, ahead=True), 128: BackwardConfig(block_m=64, ahead=False)}


def forward_config(head_dim: int, seq_k: int, full: bool, table: bool, lists: bool) -> ForwardConfig:
    """full: every query sees every key, otherwise rows are shorter than the sequence. table: documents, which need
    registers that three consumers do not have. lists: a block layout."""
    if lists:
        return LISTED
    if head_dim in SHORT and (table or seq_k <= (1024 if full else 4096)):
        return SHORT[head_dim]
    return FORWARD[head_dim]
