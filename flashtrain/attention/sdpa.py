"""PyTorch's scaled_dot_product_attention as a backend: the road on the CPU, and a peer to be measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.attention.plan import Plan
from flashtrain.attention.reference import standard_attention

# Queries a piece on the CPU where a mask has to be handed over as a tensor.
_CHUNK = 1024


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
    """out [batch, num_heads, seq_q, head_dim] for the shapes of `standard_attention`.

    Full and causal attention take PyTorch's fused kernels in linear memory. On the CPU packed documents are taken one
    by one and windows in chunks of queries, in linear memory too. On the GPU, and in a compiled model, any other mask
    is handed over as a seq_q x seq_k boolean tensor.

    A block layout is handed over as such a tensor everywhere, one for each batch row and head that has blocks of its
    own: right, but with neither the time nor the memory that a layout saves.
    """
    if q.numel() == 0 or plan.seq_k == 0:
        return standard_attention(q, k, v, plan, scale)[0]  # its score matrix is empty too
    if plan.q_lists is not None:
        return _masked(q, k, v, plan.dense(), scale)
    if plan.is_full:
        return _sdpa(q, k, v, scale)
    if plan.is_causal and plan.seq_q == plan.seq_k:
        return _sdpa(q, k, v, scale, is_causal=True)
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        return _masked(q, k, v, plan.dense(q.device), scale)
    lo, hi = plan.intervals(q.device)
    if lo.shape[0] == 1:
        return _in_pieces(q, k, v, lo[0], hi[0], scale)
    rows = [_in_pieces(q[i : i + 1], k[i : i + 1], v[i : i + 1], lo[i], hi[i], scale) for i in range(q.shape[0])]
    return torch.cat(rows)


def _in_pieces(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float) -> Tensor:
    """Attention to the keys [lo, hi) of each query, piece by piece; both never move backwards."""
    outs = []
    for first, last in _pieces(lo, hi):
        own_lo, own_hi = lo[first:last], hi[first:last]
        begin, end = int(own_lo[0]), int(own_hi[-1])
        if begin >= end:
            outs.append(torch.zeros_like(q[:, :, first:last]))
            continue
        own_q, own_k, own_v = q[:, :, first:last], k[:, :, begin:end], v[:, :, begin:end]
        if bool((own_lo == begin).all()) and bool((own_hi == end).all()):
            outs.append(_sdpa(own_q, own_k, own_v, scale))
        elif _is_causal(own_lo - begin, own_hi - begin, end - begin):
            outs.append(_sdpa(own_q, own_k, own_v, scale, is_causal=True))
        else:
            key = torch.arange(begin, end, device=q.device)
            visible = (key >= own_lo[:, None]) & (key < own_hi[:, None])
            outs.append(_masked(own_q, own_k, own_v, visible, scale))
    return torch.cat(outs, dim=2)


def _pieces(lo: Tensor, hi: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of queries: cut where a query starts behind all that those before it see, and, where a range needs a mask
    tensor, after every `_CHUNK` queries."""
    cuts = (torch.nonzero(hi[:-1] <= lo[1:]).flatten() + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, len(lo)], strict=True):
        own_lo, own_hi = lo[first:last], hi[first:last]
        whole = bool((own_lo == own_lo[0]).all()) and (
            bool((own_hi == own_hi[0]).all()) or _is_causal(own_lo - own_lo[0], own_hi - own_lo[0], last - first)
        )
        step = last - first if whole else _CHUNK
        yield from ((start, min(start + step, last)) for start in range(first, last, step))


def _is_causal(lo: Tensor, hi: Tensor, num_keys: int) -> bool:
    """Whether query i of a square piece sees the keys 0 to i."""
    square = len(lo) == num_keys
    return square and bool((lo == 0).all()) and bool((hi == torch.arange(1, num_keys + 1, device=hi.device)).all())


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    # SDPA's answer for a row that sees nothing has changed between versions and kernels: give such rows one key, and
    # take their output away again.
    blind = ~visible.any(dim=-1, keepdim=True)
    return _sdpa(q, k, v, scale, attn_mask=visible | blind).masked_fill(blind, 0.0)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool = False, attn_mask: Tensor | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
