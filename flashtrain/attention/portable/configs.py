"""Tile sizes for each GPU generation, head dim and dtype: a fixed table, so that bits never depend on a timing.

`scripts/tune_attention.py` measures candidates for it, and with --dry-run says what each takes of a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashtrain.attention.backends import interpreted
from flashtrain.attention.block_layout import num_blocks
from flashtrain.attention.portable.launch import STATISTICS_ROWS, padded_head_dim


@dataclass(frozen=True)
class Config:
    """Queries and keys a tile, warps a program, depth of the load pipeline, and registers a thread where a limit lets
    one more program onto a multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def __post_init__(self) -> None:
        assert STATISTICS_ROWS % self.block_m == 0, "the backward kernels read statistics in whole tiles of queries"

    def launch_options(self) -> dict[str, int | bool | None]:
        """What Triton calls them. Fusing is pinned: its default changes between versions, and bits with it."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
            "enable_fp_fusion": True,
        }


class Configs(NamedTuple):
    """One for each kernel."""

    forward: Config
    dq: Config
    dkdv: Config


# 16-bit numbers: (generation, padded head dim up to) -> tiles.
HALF: dict[tuple[str, int], Configs] = {
    ("hopper", 64): Configs(Config(128, 64, 8, 3, 128), Config(128, 64, 8, 3, 128), Config(64, 64, 4, 3)),
    ("hopper", 128): Configs(Config(128, 64, 8, 4), Config(128, 64, 8, 3), Config(32, 128, 8, 3)),
    ("hopper", 256): Configs(Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(32, 64, 8, 2)),
    ("blackwell", 64): Configs(Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
    ("blackwell", 128): Configs(Config(128, 64, 8, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    ("blackwell", 256): Configs(Config(128, 32, 8, 2), Config(64, 32, 8, 2), Config(32, 64, 8, 2)),
    ("ampere", 64): Configs(Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
    ("ampere", 128): Configs(Config(128, 64, 8, 3), Config(64, 64, 4, 2), Config(64, 64, 8, 2)),
    ("ampere", 256): Configs(Config(64, 64, 8, 2), Config(64, 32, 8, 2), Config(32, 64, 8, 2)),
    ("ada", 64): Configs(Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    ("ada", 128): Configs(Config(64, 64, 4, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    ("ada", 256): Configs(Config(64, 32, 8, 2), Config(32, 32, 4, 2), Config(32, 32, 8, 2)),
}
# float32, mostly without tensor cores: small tiles that stay in registers and in the least shared memory.
SINGLE: dict[int, Configs] = {
    64: Configs(Config(64, 32, 8, 2), Config(64, 32, 8, 2), Config(32, 64, 8, 2)),
    128: Configs(Config(32, 32, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8, 2)),
    256: Configs(Config(32, 16, 8, 2), Config(32, 16, 8, 1), Config(16, 16, 8, 2)),
}
# The interpreter pays for each tile, whatever its size.
INTERPRETED = Configs(Config(128, 64, 4, 1), Config(128, 64, 4, 1), Config(64, 128, 4, 1))


def choose_configs(q: Tensor) -> Configs:
    """The tile sizes for tensors like q, on its device."""
    if interpreted():
        return INTERPRETED
    return table_entry(_generation_of(q.device), q.shape[3], q.element_size())


@functools.cache
def table_entry(generation: str, head_dim: int, itemsize: int) -> Configs:
    """What the table says for a head dim and 2 or 4 bytes a number."""
    size = max(64, padded_head_dim(head_dim))
    return SINGLE[size] if itemsize == 4 else HALF[generation, size]


def fit_blocks(config: Config, blocks: Sequence[int]) -> Config:
    """The tiles, no larger than the blocks (queries, keys, ...) of a layout, with warps for what is left of them.

    Tiles and blocks are powers of two, so that the smaller one divides the other.
    """
    if not blocks:
        return config
    block_m, block_n = min(config.block_m, blocks[0]), min(config.block_n, blocks[1])
    shrink = (config.block_m * config.block_n) // (block_m * block_n)
    if shrink == 1:
        return config
    return replace(config, block_m=block_m, block_n=block_n, num_warps=max(4, config.num_warps // shrink))


def tiles_a_head(seq_len: int, config: Config, blocks: Sequence[int], side: int) -> int:
    """How many tiles a head has, of queries (side 0) or keys (1): all those of each block of a layout, also beyond the
    end. config fits the blocks."""
    tile, listed = (config.block_m, config.block_n)[side], _listed_blocks(config, blocks)[side]
    return num_blocks(seq_len, listed) * (listed // tile)


def kernel_constants(config: Config, blocks: Sequence[int], head_dim: int, precision: str) -> dict[str, int | str]:
    """The compile-time arguments of every kernel that walks over tiles. config fits the blocks."""
    listed_m, listed_n = _listed_blocks(config, blocks)
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "LISTED_M": listed_m,
        "LISTED_N": listed_n,
        "PRECISION": precision,
    }


def _listed_blocks(config: Config, blocks: Sequence[int]) -> tuple[int, int]:
    """Queries and keys that one entry of a list stands for; a tile where there are no lists."""
    return (blocks[0], blocks[1]) if blocks else (config.block_m, config.block_n)


def generation_of(major: int, minor: int) -> str:
    """GPUs that share tile sizes: the same matrix instructions and as much shared memory."""
    if major == 9:
        return "hopper"
    if major in (10, 11):
        return "blackwell"
    # 8.6, 8.9 and 12.x have 99 KiB of shared memory where 8.0 has 163.
    return "ampere" if (major, minor) in ((8, 0), (8, 7)) else "ada"


@functools.cache
def _generation_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"backend='portable': the kernels need compute capability 8.0 and {torch.cuda.get_device_name(device)} has "
            f"{major}.{minor}; use backend='sdpa'"
        )
    return generation_of(major, minor)
