"""The operators behind `attention`: registered with PyTorch, so that torch.compile, autocast, activation checkpointing
and the FLOP counter see attention as one node.

Three operators: the forward gives out and lse; `delta` reduces out and its gradient to one number a row; the backward
takes lse and delta from outside, so that a ring of GPUs can hand in those of the whole sequence. None of them holds a
seq_q x seq_k tensor.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flashtrain.attention import portable
from flashtrain.attention.plan import visible_pairs

_PLAN = "Tensor? rows, Tensor? columns, int left, int right"
_library = torch.library.Library("flashtrain", "DEF")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_PLAN}, float scale, str backend, bool deterministic) "
    "-> (Tensor, Tensor)"
)
_library.define("attention_delta(Tensor out, Tensor dout, Tensor? dlse, str backend) -> Tensor")
_library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, "
    f"{_PLAN}, float scale, str backend, bool deterministic) -> (Tensor, Tensor, Tensor)"
)

# backend name -> module with forward, delta and backward. `kernels_of` adds the others when they are first used.
KERNELS: dict[str, ModuleType] = {"portable": portable}


def kernels_of(backend: str) -> ModuleType:
    """The module with a backend's forward, delta and backward."""
    if backend not in KERNELS:  # Gluon is only loaded where there is a Hopper GPU
        KERNELS[backend] = importlib.import_module(f"flashtrain.attention.{backend}")
    return KERNELS[backend]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    left: int,
    right: int,
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    return kernels_of(backend).forward(q, k, v, rows, left, right, scale)


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None, backend: str) -> Tensor:
    return kernels_of(backend).delta(out, dout, dlse)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    left: int,
    right: int,
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels_of(backend).backward(dout, q, k, v, lse, delta, rows, columns, left, right, scale, deterministic)


for _device in ("CUDA", "CPU"):  # the CPU runs the same kernels in Triton's interpreter
    _library.impl("attention_forward", _forward, _device)
    _library.impl("attention_delta", _delta, _device)
    _library.impl("attention_backward", _backward, _device)


@torch.library.register_fake("flashtrain::attention_forward", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("flashtrain::attention_delta", lib=_library)
def _(out: Tensor, *_rest: Any) -> Tensor:
    return out.new_empty(out.shape[:3], dtype=torch.float32)


@torch.library.register_fake("flashtrain::attention_backward", lib=_library)
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rows, columns, left, right, scale, backend, deterministic = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, rows, columns)
    ctx.window, ctx.scale, ctx.backend, ctx.deterministic = (left, right), scale, backend, deterministic
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, rows, columns = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 10
    dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
    # d lse / d s is the softmax itself, so a gradient on lse only shifts delta: ds = p * (dp - (delta - dlse)).
    delta = torch.ops.flashtrain.attention_delta(out, dout, dlse, ctx.backend)
    dq, dk, dv = torch.ops.flashtrain.attention_backward(
        dout, q, k, v, lse, delta, rows, columns, *ctx.window, ctx.scale, ctx.backend, ctx.deterministic
    )
    return dq, dk, dv, None, None, None, None, None, None, None


def _no_second_order(ctx: Any, *_grads: Any) -> None:
    raise RuntimeError(
        "flashtrain attention has no double backward; use backend='standard' where a gradient of a gradient is needed"
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


torch.library.register_autograd("flashtrain::attention_forward", _gradients, setup_context=_save, lib=_library)
for _name in ("attention_delta", "attention_backward"):
    torch.library.register_autograd(f"flashtrain::{_name}", _no_second_order, setup_context=_save_nothing, lib=_library)


@register_flop_formula(torch.ops.flashtrain.attention_forward)
def _forward_flops(
    q_shape: Any, k_shape: Any, v_shape: Any, rows: Any, columns: Any, left: int, right: int, *_rest: Any, **_: Any
) -> int:
    """Two products of 2 * head_dim a visible pair. Documents are counted as one: shapes are all that is known here."""
    batch, num_heads, seq_q, head_dim = q_shape
    return 4 * batch * num_heads * head_dim * visible_pairs(seq_q, k_shape[2], left, right)


@register_flop_formula(torch.ops.flashtrain.attention_backward)
def _backward_flops(
    dout_shape: Any,
    q_shape: Any,
    k_shape: Any,
    v_shape: Any,
    lse: Any,
    delta: Any,
    rows: Any,
    columns: Any,
    left: int,
    right: int,
    *_rest: Any,
    **_: Any,
) -> int:
    """Five products where the forward has two; recomputing the scores counts, a second recomputation does not."""
    return _forward_flops(q_shape, k_shape, v_shape, rows, columns, left, right) * 5 // 2
