"""Attention of one new token to a long cache: the keys in pieces side by side, which keeps a whole GPU busy.

A query walks its keys one tile after the other. With one query a head there is little else to do at once, so the keys
are cut into pieces that count as batch rows, and the pieces' results are joined by their log-sum-exps (flash-decoding,
Dao et al. 2023). Query heads that share a key head become queries of that head, so that each key is read once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import Plan, attention
from flashtrain.attention.plan import OPEN

PIECE = 2048  # keys a piece; a memory of fixed size may have shorter ones, down to these
SHORTEST = 256
# Programs that keep a large GPU busy, of which each has a piece and a key head: two for each of 132 multiprocessors.
BUSY = 264


@dataclass(frozen=True)
class Pieces:
    """What a new token sees of a memory for keys, of which it fills a part; a plan for `decoding_attention`.

    Attributes:
        piece: keys a piece; the memory is whole pieces.
        plan: for the queries of one key head and the keys of a piece, a batch row for each piece.
    """

    piece: int
    plan: Plan


class PieceBounds:
    """What a token sees of each piece, where its position is known to the device alone.

    Args:
        left: keys before its own that it sees, or `plan.OPEN`.
        capacity: tokens in the memory, whole pieces.
        piece: keys a piece.
        queries: query heads a key head.
    """

    def __init__(self, left: int, capacity: int, piece: int, queries: int, device: torch.device) -> None:
        assert capacity % piece == 0, "a memory is whole pieces"
        self.piece, self.queries = piece, queries
        first = torch.arange(0, capacity, piece, device=device)
        # First and last key, less the token's position, counted from the piece's first key: int64 [pieces, 2, queries].
        bounds = torch.stack((-left - first, 1 - first), dim=1)
        self._offsets = bounds[..., None].expand(-1, -1, queries).contiguous()

    def at(self, position: Tensor) -> Pieces:
        """position: int64 [1]. A piece of which nothing is seen gets an empty interval."""
        rows = (self._offsets + position).clamp(0, self.piece).int()
        return Pieces(self.piece, Plan(self.queries, self.piece, OPEN, OPEN, rows=rows))


def piece_of(capacity: int, num_kv_heads: int) -> int:
    """Keys a piece of a memory for `capacity` tokens: as long as leaves enough programs."""
    piece = PIECE
    while piece > SHORTEST and -(-capacity // piece) * num_kv_heads < BUSY:
        piece //= 2
    return piece


def decoding_attention(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    """`attention` by the fastest backend, in pieces where a GPU gets one query and many keys, or the plan has pieces.

    Shapes as for `attention`.
    """
    if isinstance(plan, Pieces):
        return _joined(q, *_of_each_piece(q, k, v, plan.piece, plan.plan))
    one_token = q.shape[0] == 1 and q.shape[2] == 1 and isinstance(plan, Plan) and plan.is_causal
    if one_token and q.device.type == "cuda" and k.shape[2] >= 2 * PIECE:
        return one_query(q, k, v, PIECE)
    return attention(q, k, v, plan)


def one_query(q: Tensor, k: Tensor, v: Tensor, piece: int) -> Tensor:
    """Attention of one query to all keys.

    Args:
        q: [1, num_heads, 1, head_dim].
        k, v: [1, num_kv_heads, seq_k, head_dim], seq_k of at least one piece.
        piece: keys that one batch row gets.

    Returns:
        [1, num_heads, 1, head_dim].
    """
    rest = k.shape[2] % piece
    end = k.shape[2] - rest
    found = [_of_each_piece(q, k[:, :, :end], v[:, :, :end], piece)]
    if rest:
        found.append(_of_each_piece(q, k[:, :, end:], v[:, :, end:], rest))
    return _joined(q, *(torch.cat(each) for each in zip(*found, strict=True)))


def _of_each_piece(q: Tensor, k: Tensor, v: Tensor, piece: int, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    """out [pieces, num_kv_heads, queries, head_dim] and lse [pieces, num_kv_heads, queries] of whole pieces."""
    queries = q.reshape(1, k.shape[1], -1, q.shape[3])
    k_parts, v_parts = (x[0].unflatten(1, (-1, piece)).transpose(0, 1) for x in (k, v))
    return attention(queries.repeat(len(k_parts), 1, 1, 1), k_parts, v_parts, plan, return_lse=True)


def _joined(q: Tensor, outs: Tensor, lses: Tensor) -> Tensor:
    """Attention to the keys of all pieces, like q; a piece of which nothing is seen has out 0 and lse -inf: no part."""
    out = (lses.softmax(dim=0)[..., None] * outs).sum(dim=0)
    return out.view(q.shape).to(q.dtype)
