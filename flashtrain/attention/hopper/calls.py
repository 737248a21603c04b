"""The three calls of the Hopper backend, with the interface of the portable one."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtrain.attention import portable
from flashtrain.attention.hopper.backward import backward_kernel
from flashtrain.attention.hopper.configs import BACKWARD, BackwardConfig, ForwardConfig, forward_config
from flashtrain.attention.hopper.forward import forward_kernel
from flashtrain.attention.hopper.launch import Box, Setup, for_tma, launch, writable
from flashtrain.attention.plan import OPEN
from flashtrain.attention.portable.launch import heads_together, on_device, positive_scale, table_strides

delta = portable.delta
LOG2_E = math.log2(math.e)
BLOCK_N = 128  # keys a program of the backward kernel
# Statistics are padded to whole tiles of queries of any size up to this.
_ROWS = 128
_Shape = tuple[int, ...]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor | None,
    left: int,
    right: int,
    scale: float,
    config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys; arguments and results as in `portable.forward`, in float16 or
    bfloat16 and head_dim 64 or 128. Tensors that TMA cannot address are copied."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    config, setup = _forward_setup(q.shape, k.shape, rows is not None, left, right, config)
    q, scale, _ = positive_scale(q, scale)
    q, k, v, target = for_tma(q), for_tma(k), for_tma(v), writable(out)
    table, stride = table_strides(rows)
    queries, keys = (1, 1, 64, q.shape[3]), (1, 1, config.block_n, q.shape[3])
    with on_device(q):
        launch(forward_kernel, (q.dtype, q.device), setup, (
            Box(q, queries), Box(k, keys), Box(v, keys), Box(target, queries), lse, lse.view(torch.int32) if table is None else table,
            stride, *setup.numbers, scale * LOG2_E,
        ))  # fmt: skip
    if target is not out:
        out.copy_(target)
    return out, lse


@functools.lru_cache(maxsize=256)
def _forward_setup(
    q_shape: _Shape, k_shape: _Shape, table: bool, left: int, right: int, config: ForwardConfig | None
) -> tuple[ForwardConfig, Setup]:
    batch, num_heads, seq_q, head_dim = q_shape
    num_kv_heads, seq_k = k_shape[1], k_shape[2]
    full = not table and left == OPEN and right == OPEN
    config = config or forward_config(head_dim, seq_k, full, table)
    all_heads = batch * num_heads
    # Half of the L2 cache where the portable kernels stream a quarter: 2 to 3 % at 16k.
    together = 1 if full else heads_together(k_shape, 2, all_heads, share=2)
    constants = {
        "CONSUMERS": config.consumers,
        "BLOCK_N": config.block_n,
        "HEAD_DIM": head_dim,
        "STAGES": config.stages,
        "LOWER": table or left < OPEN,
        "LATER": table or left < OPEN or not _one_partial(right, seq_k - seq_q, config),
        "TABLE": table,
    }
    numbers = (all_heads, num_heads, num_heads // num_kv_heads, together, seq_q, seq_k, left, right)
    return config, Setup(all_heads * -(-seq_q // config.block_m), numbers, constants, config.max_registers)


def _one_partial(right: int, shift: int, config: ForwardConfig) -> bool:
    """Whether no block but the rightmost of a tile of queries can hold something invisible, as far as `right` goes."""
    if right == OPEN:
        return True
    return config.block_n % config.block_m == 0 and (shift + right) % config.block_m == 0


def backward(
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
    deterministic: bool,
    config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, as `portable.backward` gives them, with dq summed in float32 in any order; in a fixed
    order by the portable kernels where `deterministic` asks for it."""
    if deterministic:
        return portable.backward(dout, q, k, v, lse, delta, rows, columns, left, right, scale, deterministic)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    batch, num_heads, seq_q, head_dim = q.shape
    config = config or BACKWARD[head_dim]
    setup = _backward_setup(q.shape, k.shape, columns is not None, left, right, config)
    q, scale, sign = positive_scale(q, scale)
    q, k, v, dout = for_tma(q), for_tma(k), for_tma(v), for_tma(dout)
    dk_target, dv_target = writable(dk), writable(dv)
    table, stride = table_strides(columns)
    all_heads, padded = batch * num_heads, -(-seq_q // _ROWS) * _ROWS
    statistics = q.new_empty(2, all_heads, padded, dtype=torch.float32)
    dq_sum = q.new_empty(all_heads, seq_q, head_dim, dtype=torch.float32)
    strides = (*dk_target.stride()[:3], *dv_target.stride()[:3])
    queries, keys = (1, 1, config.block_m, head_dim), (1, 1, BLOCK_N, head_dim)
    with on_device(q):
        _prepare[(padded // _ROWS * all_heads,)](
            lse, delta, statistics, dq_sum, seq_q, padded, all_heads, HEAD_DIM=head_dim, ROWS=_ROWS
        )
        launch(backward_kernel, (q.dtype, q.device, max(strides) >= 2**31), setup, (
            Box(q, queries), Box(k, keys), Box(v, keys), Box(dout, queries), Box(dq_sum, config.dq_box(head_dim)),
            dk_target, dv_target, statistics[0], statistics[1], lse.view(torch.int32) if table is None else table, *strides, padded,
            stride, *setup.numbers, scale, scale * LOG2_E,
        ))  # fmt: skip
        _finish[(padded // _ROWS * all_heads,)](
            dq_sum, dq, *dq.stride(), num_heads, seq_q, scale * sign, HEAD_DIM=head_dim, ROWS=_ROWS
        )
    for result, target in ((dk, dk_target), (dv, dv_target)):
        if target is not result:
            result.copy_(target)
    return dq, dk, dv


@functools.lru_cache(maxsize=256)
def _backward_setup(
    q_shape: _Shape, k_shape: _Shape, table: bool, left: int, right: int, config: BackwardConfig
) -> Setup:
    batch, num_heads, seq_q, head_dim = q_shape
    num_kv_heads, seq_k = k_shape[1], k_shape[2]
    all_kv_heads = batch * num_kv_heads
    full = not table and left == OPEN and right == OPEN
    constants = {
        "GROUP": num_heads // num_kv_heads,
        "AFTER": table or right < OPEN,
        "BEFORE": table or left < OPEN,
        "TABLE": table,
        "BLOCK_M": config.block_m,
        "HEAD_DIM": head_dim,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "DQ_SLOTS": config.dq_slots,
    }
    together = 1 if full else heads_together(q_shape, 2, all_kv_heads)
    numbers = (all_kv_heads, num_kv_heads, together, seq_q, seq_k, left, right)
    return Setup(all_kv_heads * -(-seq_k // BLOCK_N), numbers, constants)


@triton.jit(do_not_specialize=["seq_q", "padded", "all_heads"])
def _prepare(
    lse_ptr, delta_ptr, statistics_ptr, dq_ptr, seq_q, padded, all_heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """lse in base 2 and delta, padded so that rows past the end get no weight, and dq set to zero."""
    num_blocks = tl.cdiv(seq_q, ROWS)
    head = (tl.program_id(0) // num_blocks).to(tl.int64)
    row = tl.program_id(0) % num_blocks * ROWS + tl.arange(0, ROWS)
    real = row < seq_q
    lse = tl.load(lse_ptr + head * seq_q + row, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + head * seq_q + row, mask=real, other=0.0)
    tl.store(statistics_ptr + head * padded + row, lse * 1.4426950408889634)
    tl.store(statistics_ptr + (all_heads + head) * padded + row, delta)
    ptrs = dq_ptr + (head * seq_q + row)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(ptrs, tl.zeros((ROWS, HEAD_DIM), tl.float32), mask=real[:, None])


@triton.jit(do_not_specialize=["num_heads", "seq_q"])
def _finish(
    sum_ptr, dq_ptr, dq_batch, dq_head, dq_row, dq_dim, num_heads, seq_q, scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq = scale * the sum, in the dtype and strides of dq."""
    num_blocks = tl.cdiv(seq_q, ROWS)
    batch_head = (tl.program_id(0) // num_blocks).to(tl.int64)
    row = (tl.program_id(0) % num_blocks * ROWS + tl.arange(0, ROWS))[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    total = tl.load(sum_ptr + (batch_head * seq_q + row) * HEAD_DIM + dim, mask=row < seq_q, other=0.0)
    base = dq_ptr + batch_head // num_heads * dq_batch + batch_head % num_heads * dq_head
    ptrs = base + row.to(tl.int64) * dq_row + dim.to(tl.int64) * dq_dim
    tl.store(ptrs, (total * scale).to(dq_ptr.dtype.element_ty), mask=row < seq_q)
