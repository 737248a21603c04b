"""Attention: what may attend to what, and how fast. This page is the whole public surface.

    out = attention(q, k, v, Causal() & Documents(((700, 324),)))

Lower a mask once a step with `lower` and hand the plan to every layer.
"""

from __future__ import annotations

import logging
from typing import Literal, overload

import torch
from torch import Tensor

from flashtrain.attention import layouts
from flashtrain.attention.backends import BACKENDS, choose_backend, portable_backward, supported
from flashtrain.attention.block_layout import BlockLayout
from flashtrain.attention.lists import check_lists
from flashtrain.attention.masks import Causal, Documents, Full, Mask, SlidingWindow
from flashtrain.attention.op import flash_attention
from flashtrain.attention.plan import Plan, lower
from flashtrain.attention.reference import standard_attention
from flashtrain.attention.sdpa import sdpa_attention

__all__ = [
    "BACKENDS",
    "BlockLayout",
    "Causal",
    "Documents",
    "Full",
    "Mask",
    "Plan",
    "SlidingWindow",
    "attention",
    "choose_backend",
    "layouts",
    "lower",
    "supported",
]

_log = logging.getLogger(__name__)
_said: set[object] = set()  # lines, and the calls that they were about


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Plan | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Plan | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Plan | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q k^T) v over the visible keys.

    Args:
        q: [batch, num_heads, seq_q, head_dim], float16, bfloat16 or float32, any strides.
        k, v: [batch, num_kv_heads, seq_k, head_dim], same dtype; num_heads is a multiple of num_kv_heads. Query head h
            reads key head h // (num_heads / num_kv_heads).
        mask: a mask (`Causal() & SlidingWindow(1023)`), a plan that `lower` made from one, or None for no limit.
            With fewer queries than keys the two are aligned at the end.
        scale: factor on the scores; 1 / sqrt(head_dim) if None.
        backend: one of `BACKENDS`. `auto` takes the fastest that can do the call and says once which and why.
        deterministic: gradients equal bit for bit from run to run; None follows
            torch.use_deterministic_algorithms. The portable kernels always are, the Hopper ones on request.
        return_lse: also return the log-sum-exp of the scaled scores, [batch, num_heads, seq_q] float32. It is
            differentiable.

    Returns:
        out, shaped like q, or (out, lse). A query that sees no key has out 0 and lse -inf.

    Under autocast q, k and v are cast to the autocast dtype. float32 is true float32 unless
    `torch.backends.cuda.matmul.allow_tf32` is set. Gradients of gradients are refused except by `standard`.

    Raises:
        ValueError: shapes, dtypes, devices or lengths that do not fit, or a call that the named backend cannot do.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    plan = mask if isinstance(mask, Plan) else lower(mask, q.shape[0], q.shape[2], k.shape[2], q.device)
    _check_plan(plan, q, k)
    group = q.shape[1] // k.shape[1]
    chosen = choose_backend(backend, q, return_lse, plan.blocks, group)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not torch.compiler.is_compiling():
        _say_once(backend, chosen, q, plan.blocks, group, deterministic)
    if chosen == "sdpa":
        return sdpa_attention(q, k, v, plan, scale)
    if chosen == "standard":
        out, lse = standard_attention(q, k, v, plan, scale)
    else:
        out, lse = flash_attention(q, k, v, plan, scale, chosen, deterministic)
    return (out, lse) if return_lse else out


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise ValueError(f"attention takes [batch, heads, seq, head_dim]; got {_shapes(q, k, v)}")
    if k_shape != v_shape or q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3]:
        raise ValueError(f"q, k and v must agree in batch and head_dim, and k and v in shape; got {_shapes(q, k, v)}")
    if k_shape[1] == 0 or q_shape[1] % k_shape[1]:
        raise ValueError(f"num_heads={q_shape[1]} must be a multiple of num_kv_heads={k_shape[1]}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one dtype or use autocast")
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}; move them to one device")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_plan(plan: Plan, q: Tensor, k: Tensor) -> None:
    if (plan.seq_q, plan.seq_k) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the plan is for {plan.seq_q} queries and {plan.seq_k} keys, q has {q.shape[2]} and k {k.shape[2]}; "
            "lower the mask for these lengths"
        )
    if plan.rows is not None and plan.rows.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"the plan is for {plan.rows.shape[0]} rows and the batch has {q.shape[0]}")
    if plan.rows is not None and plan.rows.device != q.device:
        raise ValueError(f"the plan is on {plan.rows.device} and q on {q.device}; lower the mask on {q.device}")
    check_lists(plan.q_lists, plan.blocks, q)


def _say_once(requested: str, chosen: str, q: Tensor, blocks: tuple[int, ...], group: int, deterministic: bool) -> None:
    key = (requested, chosen, q.dtype, q.shape[-1], q.device, blocks, group, deterministic)
    if key in _said:
        return
    _said.add(key)
    if chosen == "hopper" and (reason := portable_backward(q.shape[-1], blocks, deterministic)):
        _say(f"attention takes the portable kernels for the backward pass: {reason}")
    if requested != "auto":
        return
    line = f"attention takes the {chosen} backend for {q.dtype}, head_dim {q.shape[-1]}, on {q.device.type}"
    if (
        chosen == "portable"
        and (reason := supported("hopper", q, blocks=blocks, group=group))
        and torch.cuda.get_device_capability(q.device)[0] == 9
    ):
        line += f": {reason}"
    if chosen in ("sdpa", "standard"):
        line += f": {supported('portable', q) or 'Triton interprets its kernels here, for tests'}"
    _say(line)


def _say(line: str) -> None:
    if line not in _said:
        _said.add(line)
        _log.info(line)
