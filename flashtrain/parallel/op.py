"""The ring and the exchange between ranks as operators: torch.compile, activation checkpointing and autocast see one
node each, whatever travels inside.

A group is named, and a plan numbered, since operators take tensors and plain values only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.parallel import partial, ring
from flashtrain.parallel.plan import steps_of

_library = torch.library.Library("flashtrain", "FRAGMENT")
_library.define(
    "ring_forward(Tensor q, Tensor k, Tensor v, Tensor plan, str group, float scale, str backend, bool deterministic) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "ring_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan, str group, "
    "float scale, str backend, bool deterministic) -> (Tensor, Tensor, Tensor)"
)
_library.define("exchange(Tensor parts, str group) -> Tensor")

_groups: dict[str, dist.ProcessGroup] = {}


def name_of(group: dist.ProcessGroup) -> str:
    """The name under which the operators know a group."""
    name: str = group.group_name
    _groups[name] = group
    return name


def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, group: str, scale: float, backend: str, _deterministic: bool
) -> tuple[Tensor, Tensor]:
    return ring.forward(q, k, v, steps_of(plan), scale, backend, ring.ToNextRank(_groups[group], 0))


def _ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Tensor,
    group: str,
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, sums = (ring.ToNextRank(_groups[group], tag) for tag in (0, 1))
    settings = steps_of(plan), scale, backend, deterministic
    dq, (dk, dv) = ring.backward(dout, q, k, v, out, lse, *settings, keys, sums)
    return dq, torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _exchange(parts: Tensor, group: str) -> Tensor:
    parts = parts.contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=_groups[group])
    return arrived


for _device in ("CUDA", "CPU"):
    _library.impl("ring_forward", _ring_forward, _device)
    _library.impl("ring_backward", _ring_backward, _device)
    _library.impl("exchange", _exchange, _device)


@torch.library.register_fake("flashtrain::ring_forward", lib=_library)
def _(q: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=partial.wide(q.dtype))


@torch.library.register_fake("flashtrain::ring_backward", lib=_library)
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@torch.library.register_fake("flashtrain::exchange", lib=_library)
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _save_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, plan, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, plan)
    ctx.set_materialize_grads(False)


def _ring_gradients(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
    """dq, dk and dv; the lse goes to no one but the backward pass."""
    *saved, plan = ctx.saved_tensors
    nothing = (None,) * (1 + len(ctx.settings))
    if dout is None:
        return None, None, None, *nothing
    return *torch.ops.flashtrain.ring_backward(dout, *saved, plan, *ctx.settings), *nothing


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.flashtrain.exchange(grad, ctx.group), None


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _no_second_order(ctx: Any, *_grads: Any) -> None:
    raise RuntimeError("attention over several ranks has no double backward; compute that on one")


torch.library.register_autograd("flashtrain::ring_forward", _ring_gradients, setup_context=_save_ring, lib=_library)
torch.library.register_autograd(
    "flashtrain::ring_backward", _no_second_order, setup_context=_save_nothing, lib=_library
)
torch.library.register_autograd("flashtrain::exchange", _exchange_back, setup_context=_save_group, lib=_library)
