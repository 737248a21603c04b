"""The backward kernel for dk and dv: one tile of keys walks over the queries that see it, in every query head of its
group, and adds up both gradients in registers. No atomics: the sums have one order.

It works on transposed scores, keys by queries: then the weights come out of one product in the layout in which the
next one takes its left operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtrain.attention.lists import list_strides
from flashtrain.attention.plan import Limits
from flashtrain.attention.portable import tiles
from flashtrain.attention.portable.configs import Config, choose_configs, fit_blocks, kernel_constants, tiles_a_head
from flashtrain.attention.portable.launch import (
    fit_tile,
    heads_together,
    on_device,
    precision_of,
    table_strides,
)
from flashtrain.attention.portable.tiles import LOG2_E


def grad_kv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    limits: Limits,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """dk like k, dv like v; arguments as in `backward.backward`, scale > 0, statistics from `launch.row_statistics`."""
    batch, num_heads, seq_q, head_dim = q.shape
    num_kv_heads, seq_k = k.shape[1], k.shape[2]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    if dk.numel() == 0:
        return dk, dv
    config = fit_blocks(config or choose_configs(q).dkdv, limits.blocks)
    q, dout = fit_tile(q, config.block_m), fit_tile(dout, config.block_m)
    k, v = fit_tile(k, config.block_n), fit_tile(v, config.block_n)
    columns, stride_columns = table_strides(limits.columns)
    group = num_heads // num_kv_heads
    grid = (batch * num_kv_heads * tiles_a_head(seq_k, config, limits.blocks, 1),)
    with on_device(q):
        _dkdv_kernel[grid](
            q, k, v, dout, dk, dv, statistics, columns, limits.k_lists,
            *q.stride(), *k.stride(), *v.stride(), *dout.stride(), *dk.stride(), *dv.stride(),
            statistics.stride(1), stride_columns, *list_strides(limits.blocks, seq_k, 1),
            batch * num_kv_heads, num_kv_heads, seq_q, seq_k, limits.left, limits.right, scale,
            heads_together(q.shape, q.element_size(), batch * num_kv_heads),
            GROUP=group,
            **kernel_constants(config, limits.blocks, head_dim, precision_of(q)),
            **config.launch_options(),
        )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=tiles.VARYING)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, statistics_ptr, columns_ptr, lists_ptr,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    dout_batch, dout_head, dout_row, dout_dim,
    dk_batch, dk_head, dk_row, dk_dim,
    dv_batch, dv_head, dv_row, dv_dim,
    statistics_head, stride_table, num_lists, lists_batch, lists_head,
    all_heads, num_heads, seq_q, seq_k, left, right, scale, heads_together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LISTED_M: tl.constexpr, LISTED_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Lists are numbered by query heads: here `number` is that of the first one of the group.
    batch_head, batch, head, first, number, lo, hi, begin, full_begin, full_end, end = tiles.own_walk(
        lists_ptr, num_lists, lists_batch, GROUP * lists_head, columns_ptr, stride_table, all_heads, num_heads,
        heads_together, seq_k, seq_q, right, left, BLOCK_N, BLOCK_M, LISTED_N, False,
    )  # fmt: skip
    k_base = tiles.origin(k_ptr, batch, head, k_batch, k_head)
    v_base = tiles.origin(v_ptr, batch, head, v_batch, v_head)
    k = tiles.load_tile(k_base, first, seq_k, k_row, k_dim, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v = tiles.load_tile(v_base, first, seq_k, v_row, v_dim, BLOCK_N, HEAD_DIM, BLOCK_D, True)

    # Query heads of a group are neighbours: one origin and a stride reach them all.
    q_base = tiles.origin(q_ptr, batch, head * GROUP, q_batch, q_head)
    dout_base = tiles.origin(dout_ptr, batch, head * GROUP, dout_batch, dout_head)
    statistics_base = statistics_ptr + batch_head.to(tl.int64) * GROUP * statistics_head

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for MASKED in tl.static_range(2):
        if lists_ptr is None:
            dk, dv = _add_blocks(
                dk, dv, k, v, q_base, dout_base, statistics_base, q_head, q_row, q_dim, dout_head, dout_row, dout_dim,
                statistics_head, lists_ptr, lo, hi, begin, full_begin, full_end, end, seq_q, scale * LOG2_E,
                GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, LISTED_M, PRECISION, MASKED,
            )  # fmt: skip
        else:  # each query head of the group has a list of its own
            for member in range(GROUP):
                begin, full_begin, full_end, end = tiles.listed_run(lists_ptr, num_lists, number + member * lists_head)
                member = tl.cast(member, tl.int64)
                dk, dv = _add_blocks(
                    dk, dv, k, v, q_base + member * q_head, dout_base + member * dout_head,
                    statistics_base + member * statistics_head, q_head, q_row, q_dim, dout_head, dout_row, dout_dim,
                    statistics_head, lists_ptr, lo, hi, begin, full_begin, full_end, end, seq_q, scale * LOG2_E,
                    1, HEAD_DIM, BLOCK_D, BLOCK_M, LISTED_M, PRECISION, MASKED,
                )  # fmt: skip
    dk_base = tiles.origin(dk_ptr, batch, head, dk_batch, dk_head)
    dv_base = tiles.origin(dv_ptr, batch, head, dv_batch, dv_head)
    tiles.store_tile(dk_base, first, seq_k, dk_row, dk_dim, dk * scale, BLOCK_N, HEAD_DIM, BLOCK_D)
    tiles.store_tile(dv_base, first, seq_k, dv_row, dv_dim, dv, BLOCK_N, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_blocks(
    dk, dv, k, v, q_base, dout_base, statistics_base, q_head, q_row, q_dim, dout_head, dout_row, dout_dim,
    statistics_head, lists_ptr, lo, hi, begin, full_begin, full_end, end, seq_q, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    LISTED_M: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds ds^T q and p^T dout over the full blocks of the run or list, or with MASKED the partial ones, of all query
    heads."""
    num_blocks = tiles.num_tiles(lists_ptr, begin, full_begin, full_end, end, BLOCK_M, LISTED_M, MASKED)
    for i in range(num_blocks * GROUP):
        member = i // num_blocks if GROUP > 1 else i * 0
        first = tiles.first_col(
            i - member * num_blocks, lists_ptr, begin, full_begin, full_end, BLOCK_M, LISTED_M, MASKED
        )
        member = tl.cast(member, tl.int64)
        q_ptr, dout_ptr = q_base + member * q_head, dout_base + member * dout_head
        q = tiles.load_tile(q_ptr, first, seq_q, q_row, q_dim, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED)
        dout = tiles.load_tile(dout_ptr, first, seq_q, dout_row, dout_dim, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED)
        minus_lse, delta = tiles.load_statistics(statistics_base + member * statistics_head, first, BLOCK_M)
        # Both products before the weights: the second runs on the tensor cores while the exponentials are taken.
        s = tiles.dot(k, tl.trans(q), None, PRECISION)
        dp = tiles.dot(v, tl.trans(dout), None, PRECISION)
        p = tl.exp2(tl.fma(s, scale_log2, minus_lse[None, :]))
        if MASKED:
            p = tl.where(tiles.between(lo, hi, first, BLOCK_M), p, 0.0)
        dv = tiles.dot(tiles.narrow(p, dout.dtype), dout, dv, PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tiles.dot(tiles.narrow(ds, q.dtype), q, dk, PRECISION)
    return dk, dv
