"""The backward kernel for dq: one tile of queries walks over its visible keys, recomputes the weights from lse and adds
up dq in registers. No atomics: the sum has one order."""

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


def grad_q(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    limits: Limits,
    scale: float,
    config: Config | None = None,
) -> Tensor:
    """dq like q; arguments as in `backward.backward`, scale > 0, statistics from `launch.row_statistics`."""
    batch, num_heads, seq_q, head_dim = q.shape
    num_kv_heads, seq_k = k.shape[1], k.shape[2]
    dq = torch.empty_like(q)
    if dq.numel() == 0:
        return dq
    config = fit_blocks(config or choose_configs(q).dq, limits.blocks)
    q, dout = fit_tile(q, config.block_m), fit_tile(dout, config.block_m)
    k, v = fit_tile(k, config.block_n), fit_tile(v, config.block_n)
    rows, stride_rows = table_strides(limits.rows)
    group = num_heads // num_kv_heads
    grid = (batch * num_heads * tiles_a_head(seq_q, config, limits.blocks, 0),)
    with on_device(q):
        _dq_kernel[grid](
            q, k, v, dout, dq, statistics, rows, limits.q_lists,
            *q.stride(), *k.stride(), *v.stride(), *dout.stride(), *dq.stride(), statistics.stride(1), stride_rows,
            *list_strides(limits.blocks, seq_q, 0),
            batch * num_heads, num_heads, group, seq_q, seq_k, limits.left, limits.right, scale,
            heads_together(k.shape, k.element_size(), batch * num_heads),
            **kernel_constants(config, limits.blocks, head_dim, precision_of(q)),
            **config.launch_options(),
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=tiles.VARYING)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, statistics_ptr, rows_ptr, lists_ptr,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    dout_batch, dout_head, dout_row, dout_dim,
    dq_batch, dq_head, dq_row, dq_dim,
    statistics_head, stride_table, num_lists, lists_batch, lists_head,
    all_heads, num_heads, group, seq_q, seq_k, left, right, scale, heads_together,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LISTED_M: tl.constexpr, LISTED_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch_head, batch, head, first, _, lo, hi, begin, full_begin, full_end, end = tiles.own_walk(
        lists_ptr, num_lists, lists_batch, lists_head, rows_ptr, stride_table, all_heads, num_heads, heads_together,
        seq_q, seq_k, left, right, BLOCK_M, BLOCK_N, LISTED_M, True,
    )  # fmt: skip
    q_base = tiles.origin(q_ptr, batch, head, q_batch, q_head)
    k_base = tiles.origin(k_ptr, batch, head // group, k_batch, k_head)
    v_base = tiles.origin(v_ptr, batch, head // group, v_batch, v_head)
    dout_base = tiles.origin(dout_ptr, batch, head, dout_batch, dout_head)
    q = tiles.load_tile(q_base, first, seq_q, q_row, q_dim, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout = tiles.load_tile(dout_base, first, seq_q, dout_row, dout_dim, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    statistics_base = statistics_ptr + batch_head.to(tl.int64) * statistics_head
    minus_lse, delta = tiles.load_statistics(statistics_base, first, BLOCK_M)

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for MASKED in tl.static_range(2):
        dq = _add_blocks(
            dq, q, dout, minus_lse, delta, k_base, v_base, k_row, k_dim, v_row, v_dim,
            lists_ptr, lo, hi, begin, full_begin, full_end, end, seq_k, scale * LOG2_E,
            HEAD_DIM, BLOCK_D, BLOCK_N, LISTED_N, PRECISION, MASKED,
        )  # fmt: skip
    dq_base = tiles.origin(dq_ptr, batch, head, dq_batch, dq_head)
    tiles.store_tile(dq_base, first, seq_q, dq_row, dq_dim, dq * scale, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_blocks(
    dq, q, dout, minus_lse, delta, k_base, v_base, k_row, k_dim, v_row, v_dim,
    lists_ptr, lo, hi, begin, full_begin, full_end, end, seq_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LISTED_N: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds ds k over the full blocks of the run or list, or with MASKED over the partial ones."""
    for i in range(tiles.num_tiles(lists_ptr, begin, full_begin, full_end, end, BLOCK_N, LISTED_N, MASKED)):
        first = tiles.first_col(i, lists_ptr, begin, full_begin, full_end, BLOCK_N, LISTED_N, MASKED)
        k = tiles.load_tile(k_base, first, seq_k, k_row, k_dim, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        v = tiles.load_tile(v_base, first, seq_k, v_row, v_dim, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        s = tiles.dot(q, tl.trans(k), None, PRECISION)
        dp = tiles.dot(dout, tl.trans(v), None, PRECISION)
        p = tl.exp2(tl.fma(s, scale_log2, minus_lse[:, None]))
        if MASKED:
            p = tl.where(tiles.between(lo, hi, first, BLOCK_N), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tiles.dot(tiles.narrow(ds, k.dtype), k, dq, PRECISION)
    return dq
