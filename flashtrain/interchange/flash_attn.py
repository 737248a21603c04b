"""FlashAttention's function signatures on our attention, for code that was written for the flash-attn package.

    from flashtrain.interchange.flash_attn import flash_attn_func, flash_attn_varlen_func

Arguments, their order and their defaults are those of flash-attn 2. What ours does not have raises ValueError and names
the argument. A query that sees no key has out 0, as there; its lse is -inf here.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flashtrain.attention import Causal, Documents, Full, Mask, Plan, SlidingWindow, attention, lower

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a batch of sequences of one length.

    Args:
        q: [batch, seq_q, num_heads, head_dim].
        k, v: [batch, seq_k, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) if None.
        causal: with other numbers of keys than queries, the two are aligned at the end.
        window_size: keys before and behind its own position that a query sees, -1 for all.
        deterministic: gradients equal bit for bit from run to run.
        return_attn_probs: also return lse, and None in the place of the dropout's pattern.

    Returns:
        out [batch, seq_q, num_heads, head_dim], or (out, lse [batch, num_heads, seq_q] float32, None).

    Raises:
        ValueError: dropout_p, softcap or alibi_slopes is given, or shapes do not fit.
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    _check_dims(4, "[batch, seq, heads, head_dim]", q, k, v)
    mask = _mask(causal, window_size)
    return _call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, softmax_scale, deterministic,
                 return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention over sequences packed one behind the other.

    The lengths are read from the device once for each pair of tensors cu_seqlens, not at each call.

    Args:
        q: [total_q, num_heads, head_dim].
        k, v: [total_k, num_kv_heads, head_dim].
        cu_seqlens_q, cu_seqlens_k: int [sequences + 1], where each begins, and the total.
        max_seqlen_q, max_seqlen_k: not needed here.
        The others are those of `flash_attn_func`; alignment at the end holds for each sequence.

    Returns:
        out [total_q, num_heads, head_dim], or (out, lse [num_heads, total_q] float32, None).

    Raises:
        ValueError: as for `flash_attn_func`, a block_table is given, or the lengths do not add up to the totals.
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    _check_dims(3, "[total, heads, head_dim]", q, k, v)
    plan = _packed_plan(cu_seqlens_q, cu_seqlens_k, causal, window_size, len(q), len(k), q.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    result = _call(q, k, v, plan, softmax_scale, deterministic, return_attn_probs)
    if isinstance(result, Tensor):
        return result[0]
    return result[0][0], result[1][0], None


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Plan, scale: float | None, deterministic: bool, with_lse: bool
) -> Result:
    """q, k, v [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim]."""
    wish = True if deterministic else None
    if not with_lse:
        return attention(q, k, v, mask, scale=scale, deterministic=wish).transpose(1, 2).contiguous()
    out, lse = attention(q, k, v, mask, scale=scale, deterministic=wish, return_lse=True)
    return out.transpose(1, 2).contiguous(), lse, None


def _mask(causal: bool, window_size: Window) -> Mask:
    left, right = window_size
    mask: Mask = Causal() if causal else Full()
    if left < 0 and right < 0:
        return mask
    return mask & SlidingWindow(None if left < 0 else left, None if right < 0 else right)


# By the tensors themselves: a model hands the same two to each of its layers.
_plans: Any = WeakTensorKeyDictionary()


def _packed_plan(
    cu_q: Tensor, cu_k: Tensor, causal: bool, window_size: Window, total_q: int, total_k: int, device: torch.device
) -> Plan:
    key = (causal, tuple(window_size), total_q, total_k, device, _version(cu_q), _version(cu_k))
    kept = _plans.get(cu_q)
    if kept is not None and kept[0] == key and None not in key and kept[1]() is cu_k:
        return kept[2]
    documents = Documents.from_offsets(cu_q.tolist(), cu_k.tolist())
    plan = lower(_mask(causal, window_size) & documents, 1, total_q, total_k, device)
    _plans[cu_q] = (key, weakref.ref(cu_k), plan)
    return plan


def _version(tensor: Tensor) -> int | None:
    """Goes up with each change in place; None where PyTorch does not count them."""
    return None if tensor.is_inference() else tensor._version


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value):
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise ValueError(f"{name}={shown}: flashtrain's attention has no such thing; leave {name} at its default")


def _check_dims(count: int, layout: str, *tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(len(shape) != count for shape in shapes):
        raise ValueError(f"q, k and v are {layout}; got {', '.join(map(str, shapes))}")
