"""The forward kernel: one tile of queries walks over its visible keys and keeps a running softmax (online softmax as in
FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1)."""

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
    positive_scale,
    precision_of,
    table_strides,
)
from flashtrain.attention.portable.tiles import LN_2, LOG2_E


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limits: Limits,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys, without the score matrix.

    Args:
        q: [batch, num_heads, seq_q, head_dim], float16, bfloat16 or float32, any strides.
        k, v: [batch, num_kv_heads, seq_k, head_dim]
        limits: which keys each query sees.
        config: tile sizes; from the table if None. Under a block layout they shrink to what divides its blocks.

    Returns:
        out like q, and lse float32 [batch, num_heads, seq_q], the natural log-sum-exp of the scaled scores.
    """
    batch, num_heads, seq_q, head_dim = q.shape
    num_kv_heads, seq_k = k.shape[1], k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    config = fit_blocks(config or choose_configs(q).forward, limits.blocks)
    q, scale, _ = positive_scale(q, scale)
    q, k, v = fit_tile(q, config.block_m), fit_tile(k, config.block_n), fit_tile(v, config.block_n)
    rows, stride_rows = table_strides(limits.rows)
    group = num_heads // num_kv_heads
    grid = (batch * num_heads * tiles_a_head(seq_q, config, limits.blocks, 0),)
    with on_device(q):
        _forward_kernel[grid](
            q, k, v, out, lse, rows, limits.q_lists, *q.stride(), *k.stride(), *v.stride(), *out.stride(), stride_rows,
            *list_strides(limits.blocks, seq_q, 0),
            batch * num_heads, num_heads, group, seq_q, seq_k, limits.left, limits.right, scale,
            heads_together(k.shape, k.element_size(), batch * num_heads),
            **kernel_constants(config, limits.blocks, head_dim, precision_of(q)),
            **config.launch_options(),
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=tiles.VARYING)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, lists_ptr,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    o_batch, o_head, o_row, o_dim,
    stride_table, num_lists, lists_batch, lists_head,
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
    q = tiles.load_tile(q_base, first, seq_q, q_row, q_dim, BLOCK_M, HEAD_DIM, BLOCK_D, True)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for MASKED in tl.static_range(2):
        acc, m, l = _attend(
            acc, m, l, q, k_base, v_base, k_row, k_dim, v_row, v_dim, lists_ptr, lo, hi,
            begin, full_begin, full_end, end, seq_k, scale * LOG2_E,
            HEAD_DIM, BLOCK_D, BLOCK_N, LISTED_N, PRECISION, MASKED,
        )  # fmt: skip

    # A row that saw nothing has l = 0 and m = -inf: out 0 and lse -inf.
    total = tl.where(l == 0, 1.0, l)
    out = acc / total[:, None]
    lse = m * scale + tl.log2(total) * LN_2
    o_base = tiles.origin(out_ptr, batch, head, o_batch, o_head)
    tiles.store_tile(o_base, first, seq_q, o_row, o_dim, out, BLOCK_M, HEAD_DIM, BLOCK_D)
    row = first + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + batch_head.to(tl.int64) * seq_q + row, lse, mask=row < seq_q)


@triton.jit
def _attend(
    acc, m, l, q, k_base, v_base, k_row, k_dim, v_row, v_dim, lists_ptr, lo, hi,
    begin, full_begin, full_end, end, seq_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LISTED_N: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the full blocks of the run or list, or with MASKED the partial ones, to the running softmax.

    m [BLOCK_M] is the largest raw score so far, l [BLOCK_M] the sum of the weights exp2(scale_log2 * (score - m)), acc
    [BLOCK_M, BLOCK_D] their weighted sum of v.
    """
    for i in range(tiles.num_tiles(lists_ptr, begin, full_begin, full_end, end, BLOCK_N, LISTED_N, MASKED)):
        first = tiles.first_col(i, lists_ptr, begin, full_begin, full_end, BLOCK_N, LISTED_N, MASKED)
        k = tiles.load_tile(k_base, first, seq_k, k_row, k_dim, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        s = tiles.dot(q, tl.trans(k), None, PRECISION)
        if MASKED:
            s = tl.where(tiles.between(lo, hi, first, BLOCK_N), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen nothing yet has m = -inf, and -inf - -inf is NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(tl.fma(s, scale_log2, -(m_safe * scale_log2)[:, None]))
        rescale = tl.exp2((m - m_safe) * scale_log2)
        v = tiles.load_tile(v_base, first, seq_k, v_row, v_dim, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        acc = tiles.dot(tiles.narrow(p, v.dtype), v, acc * rescale[:, None], PRECISION)
        l = l * rescale + tl.sum(p, 1)
        m = m_new
    return acc, m, l
