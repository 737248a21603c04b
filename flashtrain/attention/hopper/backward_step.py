"""What a consumer of the backward kernel does with one tile of queries: see `backward`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtrain.attention.hopper.turns import await_turn, peek_turn
from flashtrain.attention.hopper.walk import arrive_at, intervals, named_sync, sync_at


@gluon.jit
def hide(
    s, first_query, first_key, batch, mask, AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr,
    TABLE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of 64 keys and some queries, s^T [64, queries], -inf where a key does not see a query."""
    columns, stride_columns, seq_q, seq_k, left, right = mask
    key_layout: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    query = (first_query + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    lo, hi = intervals(columns, stride_columns, batch, first_key, seq_k, seq_q, right, left, 64, key_layout, TABLE)
    if AFTER:
        s = gl.where(query >= lo[:, None], s, float("-inf"))
    if BEFORE:
        s = gl.where(query < hi[:, None], s, float("-inf"))
    if EDGE:
        key = first_key + gl.arange(0, 64, layout=key_layout)
        s = gl.where((key < seq_k)[:, None], s, float("-inf"))
    return s


@gluon.jit
def add_dq(dq_ptr, region, dq, LAYOUT: gl.constexpr):
    """Add a consumer's part of dq, 64 queries, to its regions, one or several in a row: sixteen bytes a thread and 512
    a warp at a time."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    col = gl.arange(0, dq.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    # A thread has two neighbours in row r and two in row r + 8 of every eight columns.
    offset = col // 8 * 512 + (row // 16 * 128 + row % 8 * 16 + col % 8 // 2 * 4)
    ptrs = (dq_ptr + region.to(gl.int64) * 4096 + offset).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.b32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f", [ptrs, dq], dtype=gl.int8, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _alone(
    tile, stage, p_narrow, ds, ds_narrow, dk, dv, dq_ptr, buffers, HEAD_DIM: gl.constexpr, DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The products of a consumer without a second one, from the weights and ds of a tile of 64 queries: it adds all
    columns of dq, 64 at a time, which is what registers have room for."""
    q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s = buffers
    dq_zeros = gl.zeros([64, 64], gl.float32, DQ_LAYOUT)
    all_ds = ds_s.index(0)
    named_sync("8", "128")  # until all warps have taken the last tile's ds into dq
    all_ds.store(ds)
    fence_async_shared()
    dv_next = warpgroup_mma(p_narrow, dout_s.index(stage), dv, is_async=True)
    named_sync("9", "128")
    dq_next = warpgroup_mma(all_ds.permute((1, 0)), k_s.slice(0, 64, dim=1), dq_zeros, use_acc=False, is_async=True)
    dk_next = warpgroup_mma(ds_narrow, q_s.index(stage), dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=[dv_next])
    dq_part = warpgroup_mma_wait(1, deps=[dq_next])
    PARTS: gl.constexpr = HEAD_DIM // 64
    add_dq(dq_ptr, tile * PARTS, dq_part, DQ_LAYOUT)
    dk = warpgroup_mma_wait(0, deps=[dk_next])
    if PARTS == 2:  # not beside dk: clearing its registers meanwhile would make the products wait for each other
        dq_next = warpgroup_mma(
            all_ds.permute((1, 0)), k_s.slice(64, 64, dim=1), dq_zeros, use_acc=False, is_async=True
        )
        dq_part = warpgroup_mma_wait(0, deps=[dq_next])
        add_dq(dq_ptr, tile * PARTS + 1, dq_part, DQ_LAYOUT)
    return dk, dv


@gluon.jit
def step(
    C: gl.constexpr, j, head, block, partial, dk, dv, s, more, first_key, batch, dq, buffers, barriers,
    mask, k, v, scale_log2,
    CONSUMERS: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr, BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, ORDERED: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Consumer C adds one tile of queries to dk and dv, and its part of dq to the sum.

    AHEAD: s comes in ready, and that of the next tile is computed while this tile's dq is added.
    """
    WIDTH: gl.constexpr = HEAD_DIM if BLOCK_M == 128 else (64 if CONSUMERS == 1 else HEAD_DIM // 2)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s = buffers
    kv_full, q_full, dout_full, free, added = barriers
    dq_ptr, tiles, turns_ptr, turn, before_begin, before_end = dq
    dtype: gl.constexpr = k_s.dtype
    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dq_zeros = gl.zeros([64, WIDTH], gl.float32, dq_layout)
    stage = j % STAGES
    phase = (j // STAGES) & 1
    tile = head * tiles + block
    if ORDERED:
        seen = peek_turn(turns_ptr + tile)
    if not AHEAD:
        mbarrier.wait(q_full.index(stage), phase)
        s_next = warpgroup_mma(k, q_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(stage), phase)
    dp_next = warpgroup_mma(v, dout_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=[s_next])
    # Scores are hidden, not weights: the exponentials then run on into what follows, behind no branch.
    s = s * scale_log2 - lse_s.index(stage).load(query_layout)[None, :]
    if AFTER or BEFORE or EDGE:
        if partial:
            s = hide(s, block * BLOCK_M, first_key, batch, mask, AFTER, BEFORE, EDGE, TABLE, s_layout)
    p = gl.exp2(s)
    p_narrow = gl.convert_layout(p.to(dtype), p_layout)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    ds = (p * (dp - delta_s.index(stage).load(query_layout)[None, :])).to(dtype)
    ds_narrow = gl.convert_layout(ds, p_layout)
    if CONSUMERS == 1:
        dk, dv = _alone(tile, stage, p_narrow, ds, ds_narrow, dk, dv, dq_ptr, buffers, HEAD_DIM, dq_layout)
        mbarrier.arrive(free.index(stage), count=1)
        return dk, dv, s
    # The other consumer learns at once that this half of ds is there; dv and dk need no exchange and run meanwhile.
    # Two pairs of barriers in turn: one consumer may come to the next tile before the other has left this one.
    ds_both = ds_s.index(j % 2)
    ds_both.slice(C * 64, 64, dim=0).store(ds)
    fence_async_shared()
    arrive_at(8 + 2 * C + j % 2, "256")
    dv_next = warpgroup_mma(p_narrow, dout_s.index(stage), dv, is_async=True)
    if AHEAD:
        dk_next = warpgroup_mma(ds_narrow, q_s.index(stage), dk, is_async=True)
    sync_at(10 - 2 * C + j % 2, "256")
    if BLOCK_M == 128:
        part = ds_both.slice(C * 64, 64, dim=1).permute((1, 0))
        dq_next = warpgroup_mma(part, k_s, dq_zeros, use_acc=False, is_async=True)
    else:
        part = k_s.slice(C * WIDTH, WIDTH, dim=1)
        dq_next = warpgroup_mma(ds_both.permute((1, 0)), part, dq_zeros, use_acc=False, is_async=True)
    if AHEAD:
        dv, dk = warpgroup_mma_wait(1, deps=[dv_next, dk_next])
        mbarrier.arrive(free.index(stage), count=1)
        # After the last tile this computes a stale one, which nobody uses.
        next_stage = (j + 1) % STAGES
        mbarrier.wait(q_full.index(next_stage), ((j + 1) // STAGES) & 1, pred=more)
        s_next = warpgroup_mma(k, q_s.index(next_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        dk_next = warpgroup_mma(ds_narrow, q_s.index(stage), dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv_next])
    dq_part = warpgroup_mma_wait(1, deps=[dq_next])
    if ORDERED:
        if (block >= before_begin) & (block < before_end) & (seen != turn - 1):
            await_turn(turns_ptr + tile, turn - 1)
    add_dq(dq_ptr, tile * 2 + C, dq_part, dq_layout)
    if ORDERED:
        mbarrier.arrive(added.index(stage), count=1)
    if AHEAD:
        s = warpgroup_mma_wait(0, deps=[s_next])
    else:
        dk = warpgroup_mma_wait(0, deps=[dk_next])
        mbarrier.arrive(free.index(stage), count=1)
    return dk, dv, s
