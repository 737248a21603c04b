"""The backward pass by recomputation: delta, then dq in one kernel and dk, dv in another.

Two kernels compute the scores twice where one would do it once; in return no sum needs atomics and every gradient is
the same bit for bit from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtrain.attention.plan import Limits
from flashtrain.attention.portable import tiles
from flashtrain.attention.portable.dkdv import grad_kv
from flashtrain.attention.portable.dq import grad_q
from flashtrain.attention.portable.launch import fit_tile, on_device, padded_head_dim, positive_scale, row_statistics

_DELTA_ROWS = 64


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, in the dtypes of its inputs, summed in float32.

    Args:
        dout: [batch, num_heads, seq_q, head_dim], any strides.
        q, k, v, limits, scale: as in `forward.forward`.
        lse, delta: float32 [batch, num_heads, seq_q], from `forward` and `delta`, or those of a longer sequence that
            k and v are a part of.
        deterministic: always so; the argument is there for kernels with a choice.

    Returns:
        dq like q, dk like k and dv like v.
    """
    q, scale, sign = positive_scale(q, scale)
    statistics = row_statistics(lse, delta)
    dk, dv = grad_kv(dout, q, k, v, statistics, limits, scale)
    dq = grad_q(dout, q, k, v, statistics, limits, scale)
    return (dq if sign == 1.0 else dq * sign), dk, dv


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
    """`delta` and `backward` in one; out and lse from `forward`, dlse as in `delta`."""
    return backward(dout, q, k, v, lse, delta(out, dout, dlse), limits, scale, deterministic)


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(out * dout) - dlse, float32 [batch, num_heads, seq_q]: what the softmax's gradient takes off dp.

    out, dout: [batch, num_heads, seq_q, head_dim], any strides; dlse: [batch, num_heads, seq_q] or None.
    """
    result = out.new_empty(out.shape[:3], dtype=torch.float32)
    if result.numel() == 0:
        return result
    batch, num_heads, seq_q, head_dim = out.shape
    out, dout = fit_tile(out, _DELTA_ROWS), fit_tile(dout, _DELTA_ROWS)
    dlse = dlse if dlse is None else dlse.to(torch.float32).contiguous()
    with on_device(out):
        _delta_kernel[(batch * num_heads * triton.cdiv(seq_q, _DELTA_ROWS),)](
            out, dout, dlse, result, *out.stride(), *dout.stride(), num_heads, seq_q,
            HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), BLOCK_M=_DELTA_ROWS,
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=tiles.VARYING)
def _delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr,
    out_batch, out_head, out_row, out_dim,
    dout_batch, dout_head, dout_row, dout_dim,
    num_heads, seq_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(seq_q, BLOCK_M)
    first = tl.program_id(0) % num_blocks * BLOCK_M
    batch_head = tl.program_id(0) // num_blocks
    batch, head = batch_head // num_heads, batch_head % num_heads
    out_base = tiles.origin(out_ptr, batch, head, out_batch, out_head)
    dout_base = tiles.origin(dout_ptr, batch, head, dout_batch, dout_head)
    out = tiles.load_tile(out_base, first, seq_q, out_row, out_dim, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout = tiles.load_tile(dout_base, first, seq_q, dout_row, dout_dim, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = first + tl.arange(0, BLOCK_M)
    offset = batch_head.to(tl.int64) * seq_q + row
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offset, mask=row < seq_q, other=0.0)
    tl.store(delta_ptr + offset, delta, mask=row < seq_q)
