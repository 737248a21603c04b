"""PyTorch's scaled_dot_product_attention as a backend: the road on the CPU, and a peer to be measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.attention.plan import Plan


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
    """out [batch, num_heads, seq_q, head_dim] for the shapes of `standard_attention`.

    Full and causal attention take PyTorch's fused kernels in linear memory, packed documents with nothing but a causal
    limit do so document by document; any other mask is handed over as a seq_q x seq_k boolean tensor.
    """
    gqa = q.shape[1] != k.shape[1]
    if plan.is_full and plan.seq_k > 0:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa)
    if plan.is_causal and plan.seq_q == plan.seq_k:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    visible = plan.dense(q.device)
    # SDPA's answer for a row that sees nothing has changed between versions and kernels: give such rows one key, and
    # take their output away again.
    blind = ~visible.any(dim=-1, keepdim=True)
    if plan.seq_k == 0:
        return torch.zeros_like(q)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, scale=scale, enable_gqa=gqa)
    return out.masked_fill(blind, 0.0)
