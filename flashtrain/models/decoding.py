"""Attention of one new token to a long cache: the keys in pieces side by side, which keeps a whole GPU busy.

A query walks its keys one tile after the other. With one query a head there is little else to do at once, so the keys
are cut into pieces that count as batch rows, and the pieces' results are joined by their log-sum-exps (flash-decoding,
Dao et al. 2023). Query heads that share a key head become queries of that head, so that each key is read once.
"""

from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import Plan, attention

PIECE = 2048  # keys


def decoding_attention(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    """`attention` by the fastest backend, in pieces where a GPU gets one query and many keys.

    Shapes as for `attention`.
    """
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
    whole, kv_heads = k.shape[2] // piece, k.shape[1]
    end = whole * piece
    queries = q.reshape(1, kv_heads, -1, q.shape[3])
    k_parts, v_parts = (x[0, :, :end].unflatten(1, (whole, piece)).transpose(0, 1) for x in (k, v))
    found = [attention(queries.repeat(whole, 1, 1, 1), k_parts, v_parts, return_lse=True)]
    if k.shape[2] > end:
        found.append(attention(queries, k[:, :, end:], v[:, :, end:], return_lse=True))
    outs, lses = (torch.cat(each).float() for each in zip(*found, strict=True))
    out = (lses.softmax(dim=0)[..., None] * outs).sum(dim=0)
    return out.view(q.shape).to(q.dtype)
