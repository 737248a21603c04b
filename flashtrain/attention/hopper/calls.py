"""The three calls of the Hopper backend, with the interface of the portable one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtrain.attention import portable
from flashtrain.attention.hopper.around import delta_kernel, finish_kernel, prepare_kernel
from flashtrain.attention.hopper.backward import backward_kernel
from flashtrain.attention.hopper.configs import BackwardConfig, ForwardConfig
from flashtrain.attention.hopper.forward import forward_kernel
from flashtrain.attention.hopper.launch import Box, fits_tma, for_tma, launch, writable
from flashtrain.attention.hopper.setups import BLOCK_N, backward_setups, delta_setup, forward_setup
from flashtrain.attention.plan import Limits
from flashtrain.attention.portable.launch import on_device, positive_scale, table_strides

LOG2_E = math.log2(math.e)


def forward(
    q: Tensor, k: Tensor, v: Tensor, limits: Limits, scale: float, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys; arguments and results as in `portable.forward`, in float16 or
    bfloat16 and head_dim 64 or 128. Tensors that TMA cannot address are copied."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    blocks = tuple(limits.blocks)
    config, setup = forward_setup(q.shape, k.shape, limits.rows is not None, limits.left, limits.right, blocks, config)
    q, scale, _ = positive_scale(q, scale)
    q, k, v, target = for_tma(q), for_tma(k), for_tma(v), writable(out)
    table, stride = table_strides(limits.rows)
    queries, keys = (1, 1, 64, q.shape[3]), (1, 1, config.block_n, q.shape[3])
    with on_device(q):
        launch(forward_kernel, q, setup, (
            Box(q, queries), Box(k, keys), Box(v, keys), Box(target, queries), lse, _or_unused(table, lse),
            _or_unused(limits.q_lists, lse), stride, *setup.numbers, scale * LOG2_E,
        ))  # fmt: skip
    if target is not out:
        out.copy_(target)
    return out, lse


def _or_unused(table: Tensor | None, other: Tensor) -> Tensor:
    """A table, or something of its type in its place, which no kernel compiled without one looks at."""
    return other.view(torch.int32) if table is None else table


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(out * dout) - dlse, as `portable.delta` gives it."""
    if dlse is not None or out.numel() == 0 or not (fits_tma(out) and fits_tma(dout)):
        return portable.delta(out, dout, dlse)
    result = out.new_empty(out.shape[:3], dtype=torch.float32)
    setup = delta_setup(out.shape, out.stride(), dout.stride())
    with on_device(out):
        launch(delta_kernel, out, setup, (out, dout, result, *setup.numbers))
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
    where `deterministic` asks for it, which with a block layout is left to the portable kernels."""
    if deterministic and limits.blocks:
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
    if dlse is not None or (deterministic and limits.blocks) or not fits_tma(out):
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
    q, scale, sign = positive_scale(q, scale)
    q, k, v, dout = for_tma(q), for_tma(k), for_tma(v), for_tma(dout)
    targets = writable(dq), writable(dk), writable(dv)
    out = dout if out is None else out  # not looked at where delta is given
    strides = tuple(tensor.stride()[:3] for tensor in (*targets, out, dout))
    table, stride = table_strides(limits.columns)
    setups = backward_setups(
        q.shape,
        k.shape,
        strides,
        delta is not None,
        table is not None,
        limits.left,
        limits.right,
        tuple(limits.blocks),
        deterministic,
        config,
    )
    head_dim = q.shape[3]
    statistics = q.new_empty(2, setups.rows, dtype=torch.float32)
    dq_sum = q.new_empty(setups.rows * head_dim, dtype=torch.float32)
    turns = q.new_empty(setups.turns, dtype=torch.int32) if deterministic else statistics.view(torch.int32)
    queries, keys = (1, 1, setups.block_m, head_dim), (1, 1, BLOCK_N, head_dim)
    with on_device(q):
        launch(prepare_kernel, q, setups.prepare, (
            lse.contiguous(), lse if delta is None else delta.contiguous(), out, dout, statistics, dq_sum, turns,
            *setups.prepare.numbers,
        ))  # fmt: skip
        launch(backward_kernel, q, setups.backward, (
            Box(q, queries), Box(k, keys), Box(v, keys), Box(dout, queries), dq_sum, turns, targets[1], targets[2],
            statistics[0], statistics[1], _or_unused(table, statistics), _or_unused(limits.k_lists, statistics), stride,
            *setups.backward.numbers, scale, scale * LOG2_E,
        ))  # fmt: skip
        launch(finish_kernel, q, setups.finish, (dq_sum, targets[0], *setups.finish.numbers, scale * sign))
    for result, target in zip((dq, dk, dv), targets, strict=True):
        if target is not result:
            result.copy_(target)
    return dq, dk, dv
