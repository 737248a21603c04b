"""Which tokens of a sequence each rank holds: two chunks of 2 * size, one from each end.

Under a causal mask a late query sees more keys than an early one. Chunk r together with chunk 2 * size - 1 - r sees as
many as any other such pair, so that all ranks have equally much to do: the cut called zigzag, as Llama 3 was trained
(https://arxiv.org/abs/2407.21783, section 3.3.2). Striped Attention (Brandon et al. 2023) named the imbalance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_length(seq_len: int, size: int) -> int:
    """Tokens in each of the 2 * size chunks.

    Raises:
        ValueError: the sequence cannot be cut so.
    """
    if seq_len % (2 * size):
        fitting = -(-seq_len // (2 * size)) * 2 * size
        raise ValueError(
            f"seq_len={seq_len}: {size} ranks that share a sequence hold two chunks of it each, and it cannot be cut "
            f"into {2 * size} equal ones; give a multiple of {2 * size}, such as {fitting}"
        )
    return seq_len // (2 * size)


def shard(tensor: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """This rank's tokens, seq_len / size of them along `dim`: chunk `rank`, then chunk 2 * size - 1 - rank.

    Raises:
        ValueError: seq_len, the length of `dim`, is not a multiple of 2 * size.
    """
    length = chunk_length(tensor.shape[dim], size)
    firsts = rank * length, (2 * size - 1 - rank) * length
    return torch.cat([tensor.narrow(dim, first, length) for first in firsts], dim)


def positions_of(seq_len: int, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """The places in the whole sequence of this rank's tokens, int64 [seq_len / size], ascending.

    Raises:
        ValueError: seq_len is not a multiple of 2 * size.
    """
    return shard(torch.arange(seq_len, device=device), rank, size, dim=0)


def unshard(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The whole sequence from the shards of all ranks, in the order of ranks."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)
