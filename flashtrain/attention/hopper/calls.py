"""The calls of the Hopper backend, with the interface of the portable one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashtrain.attention import portable
from flashtrain.attention.backends import portable_backward
from flashtrain.attention.hopper.around import delta_kernel, finish_kernel, prepare_kernel
from flashtrain.attention.hopper.backward import backward_kernel
from flashtrain.attention.hopper.backward_wide import backward_wide_kernel
from flashtrain.attention.hopper.configs import BackwardConfig, ForwardConfig
from flashtrain.attention.hopper.forward import forward_kernel
from flashtrain.attention.hopper.launch import aligned, fits_tma, for_tma, launch
from flashtrain.attention.hopper.setups import LOG2_E, backward_setups, delta_setup, forward_setup
from flashtrain.attention.lists import average_length
from flashtrain.attention.plan import Limits
from flashtrain.attention.portable.launch import on_device, positive_scale, table_strides


def forward(
    q: Tensor, k: Tensor, v: Tensor, limits: Limits, scale: float, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys; arguments and results as in `portable.forward`, in float16 or
    bfloat16 and a head_dim that is a multiple of 8. Tensors that TMA cannot address are copied."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, scale, _ = positive_scale(q, scale)
    table, stride = table_strides(limits.rows)
    setup = forward_setup(
        q.shape,
        k.shape,
        (q.stride(), k.stride(), v.stride(), out.stride()),
        table is not None,
        stride,
        limits.left,
        limits.right,
        tuple(limits.blocks),
        0 if limits.q_lists is None else average_length(limits.q_lists.numel(), limits.blocks, q.shape[2], 0),
        scale * LOG2_E,
        config,
    )
    if setup is None or not aligned(q, k, v):
        copied, lse = forward(for_tma(q), for_tma(k), for_tma(v), limits, scale, config)
        return out.copy_(copied), lse
    unused = _unused(q.device)
    pointers = (lse, unused if table is None else table, unused if limits.q_lists is None else limits.q_lists)
    with on_device(q):
        launch(forward_kernel, q, setup, (q, k, v, out), pointers)
    return out, lse


@functools.cache
def _unused(device: torch.device) -> Tensor:
    """In the place of a table of integers that there is none of, and that a kernel compiled without one ignores."""
    return torch.empty(4, dtype=torch.int32, device=device)


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(out * dout) - dlse, as `portable.delta` gives it."""
    if dlse is not None or out.numel() == 0 or not (fits_tma(out) and fits_tma(dout)):
        return portable.delta(out, dout, dlse)
    result = out.new_empty(out.shape[:3], dtype=torch.float32)
    setup = delta_setup(out.shape, out.stride(), dout.stride())
    with on_device(out):
        launch(delta_kernel, out, setup, (), (out, dout, result))
    return result


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    limits: Limits,
    scale: float,
    deterministic: bool,
    config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, as `portable.backward` gives them, with dq summed in float32: in any order, or in one
    where `deterministic` asks for it. What `backends.portable_backward` names goes to the portable kernels."""
    if portable_backward(q.shape[3], limits.blocks, deterministic):
        return portable.backward(dout, q, k, v, lse, delta, limits, scale, deterministic)
    return _backward(dout, q, k, v, lse, delta, None, limits, scale, deterministic, config)


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    limits: Limits,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`delta` and `backward` in one, which saves a launch."""
    if dlse is not None or portable_backward(q.shape[3], limits.blocks, deterministic):
        return backward(dout, q, k, v, lse, delta(out, dout, dlse), limits, scale, deterministic)
    return _backward(dout, q, k, v, lse, None, out, limits, scale, deterministic, None)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    out: Tensor | None,
    limits: Limits,
    scale: float,
    deterministic: bool,
    config: BackwardConfig | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """delta, or else out, from which it follows."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    out = dout if out is None else out  # not looked at where delta is given
    positive_q, positive, sign = positive_scale(q, scale)
    table, stride = table_strides(limits.columns)
    setups = backward_setups(
        q.shape,
        k.shape,
        (
            dq.stride(),
            dk.stride(),
            dv.stride(),
            out.stride(),
            dout.stride(),
            positive_q.stride(),
            k.stride(),
            v.stride(),
        ),
        delta is not None,
        table is not None,
        stride,
        limits.left,
        limits.right,
        tuple(limits.blocks),
        positive,
        sign,
        deterministic,
        config,
    )
    if setups is None or not aligned(out, dout, q, k, v):
        dout, q, k, v, out = (for_tma(tensor) for tensor in (dout, q, k, v, out))
        grads = _backward(dout, q, k, v, lse, delta, out, limits, scale, deterministic, config)
        return dq.copy_(grads[0]), dk.copy_(grads[1]), dv.copy_(grads[2])
    lse_2, delta_2, dq_sum, turns = q.new_empty(setups.room, dtype=torch.float32).split_with_sizes(setups.parts)
    unused = _unused(q.device)
    turns = turns.view(torch.int32) if deterministic else unused
    lists = unused if limits.k_lists is None else limits.k_lists
    lse = lse.contiguous()
    given = lse if delta is None else delta.contiguous()
    with on_device(q):
        launch(prepare_kernel, q, setups.prepare, (), (lse, given, out, dout, lse_2, dq_sum, turns))
        pointers = (dq_sum, turns, dk, dv, lse_2, delta_2, unused if table is None else table, lists)
        kernel = backward_wide_kernel if setups.wide else backward_kernel
        launch(kernel, q, setups.backward, (positive_q, k, v, dout), pointers)
        launch(finish_kernel, q, setups.finish, (), (dq_sum, dq))
    return dq, dk, dv
