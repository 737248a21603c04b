"""The operators behind `attention`: registered with PyTorch, so that torch.compile, autocast, activation checkpointing
and the FLOP counter see attention as one node.

Three operators: the forward gives out and lse; `delta` reduces out and its gradient to one number a row; the backward
takes lse and delta from outside, so that a ring of GPUs can hand in those of the whole sequence. None of them holds a
seq_q x seq_k tensor.

`flash_attention` is what `attention` calls. Outside torch.compile it goes past the operators, whose way through
PyTorch's dispatcher takes longer than attention over a thousand tokens.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from flashtrain.attention import portable
from flashtrain.attention.plan import Limits, Plan, visible_pairs

# The fields of `plan.Limits`.
_LIMITS = "Tensor? rows, Tensor? columns, int left, int right, Tensor? q_lists, Tensor? k_lists, int[] blocks"
_library = torch.library.Library("flashtrain", "DEF")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_LIMITS}, float scale, str backend, bool deterministic) "
    "-> (Tensor, Tensor)"
)
_library.define("attention_delta(Tensor out, Tensor dout, Tensor? dlse, str backend) -> Tensor")
_library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, "
    f"{_LIMITS}, float scale, str backend, bool deterministic) -> (Tensor, Tensor, Tensor)"
)

# backend name -> module with forward, delta, backward and gradients. `kernels_of` adds others when they are first used.
KERNELS: dict[str, ModuleType] = {"portable": portable}


def kernels_of(backend: str) -> ModuleType:
    """The module with a backend's forward, delta, backward and gradients."""
    if backend not in KERNELS:  # Gluon is only loaded where there is a Hopper GPU
        KERNELS[backend] = importlib.import_module(f"flashtrain.attention.{backend}")
    return KERNELS[backend]


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *limits, scale, backend, _deterministic = rest
    return kernels_of(backend).forward(q, k, v, Limits(*limits), scale)


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None, backend: str) -> Tensor:
    return kernels_of(backend).delta(out, dout, dlse)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *limits, scale, backend, deterministic = rest
    return kernels_of(backend).backward(dout, q, k, v, lse, delta, Limits(*limits), scale, deterministic)


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
    q, k, v, *limits, scale, backend, deterministic = inputs
    _remember(ctx, q, k, v, output, Limits(*limits), scale, backend, deterministic)


def _remember(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: tuple[Tensor, Tensor],
    limits: Limits,
    scale: float,
    backend: str,
    deterministic: bool,
) -> None:
    ctx.save_for_backward(q, k, v, *output)
    # Tables of integers, which no gradient flows through: they need not be saved as the others are.
    ctx.limits, ctx.scale, ctx.backend, ctx.deterministic = limits, scale, backend, deterministic
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """dq, dk and dv by the operators."""
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None
    dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
    # d lse / d s is the softmax itself, so a gradient on lse only shifts delta: ds = p * (dp - (delta - dlse)).
    delta = torch.ops.flashtrain.attention_delta(out, dout, dlse, ctx.backend)
    return torch.ops.flashtrain.attention_backward(
        dout, q, k, v, lse, delta, *ctx.limits, ctx.scale, ctx.backend, ctx.deterministic
    )


def _operator_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dout, dlse), *(None,) * (len(Limits._fields) + 3)


class _Direct(torch.autograd.Function):
    """The operators without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: tuple[Limits, float, str, bool]
    ) -> tuple[Tensor, Tensor]:
        limits, scale, backend, deterministic = settings
        output: tuple[Tensor, Tensor] = kernels_of(backend).forward(q, k, v, limits, scale)
        _remember(ctx, q, k, v, output, limits, scale, backend, deterministic)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None or torch.is_grad_enabled() or is_in_torch_dispatch_mode():
            # Rare ways, and those where somebody watches: by the operators, which also refuse a second derivative.
            return *_gradients(ctx, dout, dlse), None
        q, k, v, out, lse = ctx.saved_tensors
        grads = kernels_of(ctx.backend).gradients(
            dout, q, k, v, out, lse, dlse, ctx.limits, ctx.scale, ctx.deterministic
        )
        return *grads, None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, backend: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """out and lse by the kernels of `backend`."""
    if torch.compiler.is_compiling() or _watched(q, k, v):
        return torch.ops.flashtrain.attention_forward(q, k, v, *plan.limits, scale, backend, deterministic)
    return _Direct.apply(q, k, v, (plan.limits, scale, backend, deterministic))


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _watched(*tensors: Tensor) -> bool:
    """Whether somebody works on operators: counting FLOPs, choosing what to checkpoint, torch.func, subclasses."""
    return (
        is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _no_second_order(ctx: Any, *_grads: Any) -> None:
    raise RuntimeError(
        "flashtrain attention has no double backward; use backend='standard' where a gradient of a gradient is needed"
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


torch.library.register_autograd("flashtrain::attention_forward", _operator_gradients, setup_context=_save, lib=_library)
for _name in ("attention_delta", "attention_backward"):
    torch.library.register_autograd(f"flashtrain::{_name}", _no_second_order, setup_context=_save_nothing, lib=_library)


@register_flop_formula(torch.ops.flashtrain.attention_forward)
def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *rest: Any, **_: Any) -> int:
    """Two products of 2 * head_dim a visible pair. Documents and blocks are not taken off: shapes are all that is
    known here."""
    batch, num_heads, seq_q, head_dim = q_shape
    limits = Limits(*rest[: len(Limits._fields)])
    return 4 * batch * num_heads * head_dim * visible_pairs(seq_q, k_shape[2], limits.left, limits.right)


@register_flop_formula(torch.ops.flashtrain.attention_backward)
def _backward_flops(
    dout_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, lse: Any, delta: Any, *rest: Any, **_: Any
) -> int:
    """Five products where the forward has two; recomputing the scores counts, a second recomputation does not."""
    return _forward_flops(q_shape, k_shape, v_shape, *rest) * 5 // 2
