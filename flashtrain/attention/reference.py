"""Standard attention in plain PyTorch: the definition of right, and the `standard` backend.

It holds the whole seq_q x seq_k score matrix, which is what runs out of memory at long context. Everything is computed
in the dtype of its inputs: call it with float64 for the truth, with bfloat16 for what plain PyTorch would give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtrain.attention.plan import Plan


def standard_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys.

    Args:
        q: [batch, num_heads, seq_q, head_dim]
        k, v: [batch, num_kv_heads, seq_k, head_dim]; num_heads is a multiple of num_kv_heads, and query head h reads
            key head h // (num_heads / num_kv_heads).

    Returns:
        out [batch, num_heads, seq_q, head_dim], lse [batch, num_heads, seq_q] (natural log, float32 or wider). A query
        that sees no key has out 0, lse -inf, and no part in any gradient.
    """
    group = q.shape[1] // max(1, k.shape[1])
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-2, -1)) * scale
    if not plan.is_full:
        scores = scores.masked_fill(~plan.dense(q.device), float("-inf"))
    lse = torch.logsumexp(scores.to(_lse_dtype(q)), dim=-1)
    # A row of -inf would make the softmax and its gradient NaN, and no later `where` removes a NaN from a gradient.
    blind = (lse == float("-inf"))[..., None]
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return weights @ v, lse


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
