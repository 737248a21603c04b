"""The backward kernel for Hopper: dq, dk and dv in one pass over the scores, as in FlashAttention-3
(https://arxiv.org/abs/2407.08608, appendix B), in Gluon.

A program owns 128 keys and walks over the queries that see them. Two consumer warpgroups own 64 keys each. They compute
scores transposed, s^T = k q^T and dp^T = v dout^T, so that p^T and ds^T feed dv += p^T dout and dk += ds^T q from
registers. Only ds goes through shared memory, for dq = ds k, which the two share (by queries, or by columns where the
tile has 64 queries) and which TMA adds to a float32 tensor in global memory, in any order. A producer warp brings q,
dout and the rows' statistics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtrain.attention.hopper.compat import add_to_global, as_box, copy_to_shared
from flashtrain.attention.hopper.walk import blocks_of, intervals, load_box, named_sync
from flashtrain.attention.portable.tiles import tile_of

BLOCK_N = gl.constexpr(128)


# Arguments that change from call to call and are no reason to compile again.
_VARYING = (
    "columns_ptr", "stride_statistics", "stride_columns", "all_kv_heads", "num_kv_heads", "heads_together", "seq_q",
    "seq_k", "left", "right",
)  # fmt: skip


@gluon.jit
def _keys(seq_k, heads):
    """First key, batch row and key head of this program."""
    all_kv_heads, num_kv_heads, heads_together = heads
    block, batch_head = tile_of(gl.program_id(0), gl.cdiv(seq_k, BLOCK_N), all_kv_heads, heads_together, False)
    return block * BLOCK_N, batch_head // num_kv_heads, batch_head % num_kv_heads


@gluon.jit
def _run(first_key, batch, mask, BLOCK_M: gl.constexpr, NUM_WARPS: gl.constexpr, TABLE: gl.constexpr):
    """The run of blocks of queries that see this program's keys."""
    columns, stride_columns, seq_q, seq_k, left, right = mask
    return blocks_of(
        columns, stride_columns, batch, first_key, seq_k, seq_q, right, left, BLOCK_N, BLOCK_M, NUM_WARPS, True, TABLE
    )


@gluon.jit
def _visit(j, begin, num_blocks, GROUP: gl.constexpr):
    """Query head of the group and block of queries of step j."""
    if GROUP == 1:
        return 0, begin + j
    return j // num_blocks, begin + j % num_blocks


@gluon.jit
def _produce(
    descriptors, statistics, buffers, barriers, mask, heads,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """The producer warp: keys and values once, then queries, dout and statistics step by step."""
    q_desc, k_desc, v_desc, dout_desc, dq_desc = descriptors
    lse_ptr, delta_ptr, stride_statistics = statistics
    q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s = buffers
    kv_full, q_full, dout_full, free = barriers
    first_key, batch, kv_head = _keys(mask[3], heads)
    begin, full_begin, full_end, end = _run(first_key, batch, mask, BLOCK_M, 1, TABLE)
    load_box(k_desc, [batch, kv_head, first_key, 0], kv_full.index(0), k_s, 2 * BLOCK_N * HEAD_DIM)
    load_box(v_desc, [batch, kv_head, first_key, 0], kv_full.index(1), v_s, 2 * BLOCK_N * HEAD_DIM)
    row = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    # Query heads of a group are neighbours.
    first_head = kv_head * GROUP
    row_of_head = (batch * heads[1] * GROUP + first_head).to(gl.int64) * stride_statistics
    for j in range((end - begin) * GROUP):
        member, block = _visit(j, begin, end - begin, GROUP)
        stage = j % STAGES
        first = block * BLOCK_M
        statistics_at = row_of_head + member * stride_statistics + first
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        copy_to_shared(lse_s.index(stage), lse_ptr + statistics_at + row)
        async_copy.mbarrier_arrive(q_full.index(stage), increment_count=False)
        load_box(q_desc, [batch, first_head + member, first, 0], q_full.index(stage), q_s.index(stage),
                 2 * BLOCK_M * HEAD_DIM)  # fmt: skip
        copy_to_shared(delta_s.index(stage), delta_ptr + statistics_at + row)
        async_copy.mbarrier_arrive(dout_full.index(stage), increment_count=False)
        load_box(dout_desc, [batch, first_head + member, first, 0], dout_full.index(stage), dout_s.index(stage),
                 2 * BLOCK_M * HEAD_DIM)  # fmt: skip


@gluon.jit
def _add_dq(dq_desc, dq_s, slot, head, first, C: gl.constexpr, BLOCK_M: gl.constexpr, DQ_SLOTS: gl.constexpr):
    """Send off consumer C's part of dq."""
    WIDTH: gl.constexpr = dq_s.shape[2]
    part = dq_s.index(C * DQ_SLOTS + slot)
    if BLOCK_M == 128:
        add_to_global(dq_desc, [head, first + C * 64, 0], as_box(part, dq_desc))
    else:
        add_to_global(dq_desc, [head, first, C * WIDTH], as_box(part, dq_desc))


@gluon.jit
def _step(
    C: gl.constexpr, j, head, block, partial, dk, dv, s, more, first_key, batch, dq_desc, buffers, barriers, mask, k, v,
    scale_log2,
    AFTER: gl.constexpr, BEFORE: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, DQ_SLOTS: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Consumer C adds one tile of queries to dk and dv and sends its part of dq.

    AHEAD: s comes in ready, and that of the next tile is computed while this tile's dq is stored.
    """
    WIDTH: gl.constexpr = HEAD_DIM if BLOCK_M == 128 else HEAD_DIM // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s = buffers
    kv_full, q_full, dout_full, free = barriers
    columns, stride_columns, seq_q, seq_k, left, right = mask
    dtype: gl.constexpr = k_s.dtype
    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dq_zeros = gl.zeros([64, WIDTH], gl.float32, dq_layout)
    stage = j % STAGES
    phase = (j // STAGES) & 1
    if not AHEAD:
        mbarrier.wait(q_full.index(stage), phase)
        s_next = warpgroup_mma(k, q_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(stage), phase)
    dp_next = warpgroup_mma(v, dout_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=[s_next])
    p = gl.exp2(s * scale_log2 - lse_s.index(stage).load(query_layout)[None, :])
    if AFTER or BEFORE:
        if partial:
            query = (block * BLOCK_M + gl.arange(0, BLOCK_M, layout=query_layout))[None, :]
            lo, hi = intervals(
                columns, stride_columns, batch, first_key, seq_k, seq_q, right, left, 64, key_layout, TABLE
            )
            if AFTER:
                p = gl.where(query >= lo[:, None], p, 0.0)
            if BEFORE:
                p = gl.where(query < hi[:, None], p, 0.0)
    p_narrow = gl.convert_layout(p.to(dtype), p_layout)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    ds = (p * (dp - delta_s.index(stage).load(query_layout)[None, :])).to(dtype)
    dv_next = warpgroup_mma(p_narrow, dout_s.index(stage), dv, is_async=True)
    if AHEAD:  # dk needs no exchange: it runs under the barrier below
        dk_next = warpgroup_mma(gl.convert_layout(ds, p_layout), q_s.index(stage), dk, is_async=True)
    ds_both = ds_s.index(j % 2)
    ds_both.slice(C * 64, 64, dim=0).store(ds)
    fence_async_shared()
    named_sync("8", "256")
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
        dk_next = warpgroup_mma(gl.convert_layout(ds, p_layout), q_s.index(stage), dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv_next])
    dq = warpgroup_mma_wait(1, deps=[dq_next])
    slot = j % DQ_SLOTS
    tma.store_wait(DQ_SLOTS - 1)  # what was in the slot has been read
    dq_s.index(C * DQ_SLOTS + slot).store(dq)
    fence_async_shared()
    _add_dq(dq_desc, dq_s, slot, head, block * BLOCK_M, C, BLOCK_M, DQ_SLOTS)
    if AHEAD:
        s = warpgroup_mma_wait(0, deps=[s_next])
    else:
        dk = warpgroup_mma_wait(0, deps=[dk_next])
        mbarrier.arrive(free.index(stage), count=1)
    return dk, dv, s


@gluon.jit
def _consume(
    C: gl.constexpr, descriptors, dk_ptr, dv_ptr, dk_strides, dv_strides, buffers, barriers, mask, heads, scale,
    scale_log2,
    GROUP: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, DQ_SLOTS: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup C: keys [64 C, 64 C + 64) of the program's 128."""
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    q_desc, k_desc, v_desc, dout_desc, dq_desc = descriptors
    q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s = buffers
    kv_full, q_full, dout_full, free = barriers
    columns, stride_columns, seq_q, seq_k, left, right = mask
    first_key, batch, kv_head = _keys(seq_k, heads)
    begin, full_begin, full_end, end = _run(first_key, batch, mask, BLOCK_M, 4, TABLE)
    steps = (end - begin) * GROUP
    first_key += C * 64
    first_head = (batch * heads[1] + kv_head) * GROUP
    dk = gl.zeros([64, HEAD_DIM], gl.float32, d_layout)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, d_layout)
    s = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    k = k_s.slice(C * 64, 64, dim=0)
    v = v_s.slice(C * 64, 64, dim=0)
    mbarrier.wait(kv_full.index(0), 0)
    if AHEAD:
        mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
        s_next = warpgroup_mma(k, q_s.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_next])
    mbarrier.wait(kv_full.index(1), 0)
    for j in range(steps):
        member, block = _visit(j, begin, end - begin, GROUP)
        partial = (block < full_begin) | (block >= full_end) if BEFORE else block < full_begin
        dk, dv, s = _step(
            C, j, first_head + member, block, partial, dk, dv, s, j + 1 < steps, first_key, batch, dq_desc, buffers,
            barriers, mask, k, v, scale_log2, AFTER, BEFORE, BLOCK_M, HEAD_DIM, STAGES, AHEAD, DQ_SLOTS, TABLE,
        )  # fmt: skip
    key = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, d_layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, d_layout))[None, :]
    dk_base = dk_ptr + batch.to(gl.int64) * dk_strides[0] + kv_head.to(gl.int64) * dk_strides[1]
    dv_base = dv_ptr + batch.to(gl.int64) * dv_strides[0] + kv_head.to(gl.int64) * dv_strides[1]
    inside = (key < seq_k)[:, None]
    key = key.to(gl.int64)[:, None]
    gl.store(dk_base + key * dk_strides[2] + dim, (dk * scale).to(k_s.dtype), mask=inside)
    gl.store(dv_base + key * dv_strides[2] + dim, dv.to(k_s.dtype), mask=inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_VARYING)
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dk_ptr, dv_ptr, lse_ptr, delta_ptr, columns_ptr,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, stride_statistics, stride_columns,
    all_kv_heads, num_kv_heads, heads_together, seq_q, seq_k, left, right, scale, scale_log2,
    GROUP: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, TABLE: gl.constexpr, BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, DQ_SLOTS: gl.constexpr,
):  # fmt: skip
    """Descriptors over [batch, heads, seq, head_dim] with boxes of BLOCK_M queries and 128 keys; dq float32
    [batch * num_heads, seq_q, head_dim], zeroed; lse in base 2 and delta float32 [batch * num_heads, padded seq_q].

    AFTER: a key may be seen only after some query. BEFORE: only before some query.
    """
    dtype: gl.constexpr = k_desc.dtype
    WIDTH: gl.constexpr = HEAD_DIM if BLOCK_M == 128 else HEAD_DIM // 2
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], gl.float32)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], q_layout)
    dout_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], q_layout)
    k_s = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], k_layout)
    v_s = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], k_layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [2 * DQ_SLOTS, 64, WIDTH], dq_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=33)  # 32 threads that copy statistics, and TMA
        mbarrier.init(dout_full.index(stage), count=33)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc, dout_desc, dq_desc)
    statistics = (lse_ptr, delta_ptr, stride_statistics)
    buffers = (q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s)
    barriers = (kv_full, q_full, dout_full, free)
    mask = (columns_ptr, stride_columns, seq_q, seq_k, left, right)
    heads = (all_kv_heads, num_kv_heads, heads_together)
    dk_strides = (dk_batch, dk_head, dk_row)
    dv_strides = (dv_batch, dv_head, dv_row)
    gl.warp_specialize([
        (_consume, (0, descriptors, dk_ptr, dv_ptr, dk_strides, dv_strides, buffers, barriers, mask, heads, scale,
                    scale_log2, GROUP, AFTER, BEFORE, BLOCK_M, HEAD_DIM, STAGES, AHEAD, DQ_SLOTS, TABLE)),
        (_consume, (1, descriptors, dk_ptr, dv_ptr, dk_strides, dv_strides, buffers, barriers, mask, heads, scale,
                    scale_log2, GROUP, AFTER, BEFORE, BLOCK_M, HEAD_DIM, STAGES, AHEAD, DQ_SLOTS, TABLE)),
        (_produce, (descriptors, statistics, buffers, barriers, mask, heads, GROUP, BLOCK_M, HEAD_DIM,
                    STAGES, TABLE)),
    ], [4, 1], [240, 24])  # fmt: skip
