"""Approximations of attention from the FlashAttention paper's tables, in plain PyTorch: local, linear and Linformer.

Each stands twice: as it is used, in time and memory linear in seq_len, and as its definition, with all pairs of queries
and keys in one matrix, which is what the other is compared with. None has a mask: all queries see both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from measuring.attention import Implementation, Shape, standard

# "Compression 1/8 or a compressed length of 256, whichever is smaller": appendix E.6 of https://arxiv.org/abs/2205.14135.
COMPRESSION, COMPRESSED = 8, 256


@dataclass(frozen=True)
class Approximation:
    """An implementation, its definition (the same function of q, k and v by way of a matrix of all pairs), and how many
    keys, or what stands for them, a query meets."""

    implementation: Implementation
    definition: Callable[[Tensor, Tensor, Tensor], Tensor]
    keys_a_query: int


def compressed(seq_len: int) -> int:
    """Keys that each query of local attention and Linformer has to itself, as in the paper's tables."""
    return max(2, min(COMPRESSED, seq_len // COMPRESSION))


def local(q: Tensor, k: Tensor, v: Tensor, reach: int) -> Tensor:
    """Sliding window: a query sees the keys at most `reach` positions away (Longformer,
    https://arxiv.org/abs/2004.05150, section 3.1).

    Queries go in chunks of `reach`, each against its own chunk of keys and the two beside it: a third of the scores are
    computed for nothing.

    q, k, v, returns: [batch, num_heads, seq_len, head_dim]; seq_len is a multiple of reach.
    """
    batch, num_heads, seq_len, head_dim = q.shape
    queries = q.reshape(batch, num_heads, seq_len // reach, reach, head_dim)
    # Chunk i of the padded keys is chunk i - 1 of the keys: three in a row are what the queries of chunk i may see.
    keys, values = (F.pad(x, (0, 0, reach, reach)).unfold(2, 3 * reach, reach) for x in (k, v))
    scores = queries @ keys * head_dim**-0.5  # [batch, num_heads, chunks, reach, 3 * reach]
    scores = scores.masked_fill(_unseen(seq_len, reach, q.device), float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values.mT).reshape(q.shape)


def _unseen(seq_len: int, reach: int, device: torch.device) -> Tensor:
    """Bool [chunks, reach, 3 * reach]: keys too far away, and those before the first and behind the last one."""
    query, key = torch.arange(reach, device=device)[:, None], torch.arange(3 * reach, device=device) - reach
    position = key + torch.arange(0, seq_len, reach, device=device)[:, None, None]
    return ((query - key).abs() > reach) | (position < 0) | (position >= seq_len)


def local_definition(q: Tensor, k: Tensor, v: Tensor, reach: int) -> Tensor:
    position = torch.arange(q.shape[2], device=q.device)
    return standard(q, k, v, causal=False, hidden=(position[:, None] - position).abs() > reach)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention, phi(q) (phi(k)^T v) over phi(q) (phi(k)^T 1) with phi(x) = elu(x) + 1 (Katharopoulos et al.,
    https://arxiv.org/abs/2006.16236, section 3.2).

    q, k, v, returns: [batch, num_heads, seq_len, head_dim].
    """
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = k.mT @ v  # [batch, num_heads, head_dim, head_dim]
    return q @ state / (q @ k.sum(dim=2, keepdim=True).mT)


def linear_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return weights / weights.sum(dim=-1, keepdim=True) @ v


def linformer(q: Tensor, k: Tensor, v: Tensor, project_k: Tensor, project_v: Tensor) -> Tensor:
    """Linformer: keys and values are projected from seq_len to fewer positions by learned matrices, here shared by the
    heads (https://arxiv.org/abs/2006.04768, section 4).

    q, k, v, returns: [batch, num_heads, seq_len, head_dim]; project_k, project_v: [positions, seq_len].
    """
    return standard(q, project_k @ k, project_v @ v, causal=False)


def linformer_definition(q: Tensor, k: Tensor, v: Tensor, project_k: Tensor, project_v: Tensor) -> Tensor:
    """The projections may as well come after the matrix of all scores: softmax(q k^T E^T) F v."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 @ project_k.to(q.dtype).mT
    return torch.softmax(scores, dim=-1) @ project_v.to(q.dtype) @ v


def approximation(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Approximation:
    """The approximation called `name` (one of `NAMES`) for a shape, with what it has of its own."""
    size = compressed(shape.seq_len)
    if name == "local":
        reach = size // 2
        if shape.seq_len % reach:
            raise ValueError(
                f"seq_len={shape.seq_len}: local attention goes in chunks of {reach}; take a multiple of it"
            )
        return Approximation(
            Implementation(name, functools.partial(local, reach=reach)),
            functools.partial(local_definition, reach=reach),
            2 * reach + 1,
        )
    if name == "linear":
        return Approximation(Implementation(name, linear), linear_definition, shape.seq_len)
    assert name == "linformer"
    generator = torch.Generator(device).manual_seed(0)
    normal = torch.randn(2, size, shape.seq_len, device=device, dtype=dtype, generator=generator)
    project_k, project_v = (x.requires_grad_() for x in normal * shape.seq_len**-0.5)
    learned = {"project_k": project_k, "project_v": project_v}
    return Approximation(
        Implementation(name, functools.partial(linformer, **learned), parameters=(project_k, project_v)),
        functools.partial(linformer_definition, **learned),
        size,
    )


NAMES = ("local", "linear", "linformer")
