"""The backward kernel for head dims above 128: dk and dv of the 128 keys that `backward` gives a program would be more
than the registers of a multiprocessor.

A program owns 64 keys, and its two consumer warpgroups share each tile of 64 queries in two ways. Of the scores each
has half of the queries: s^T = k q^T and dp^T = v dout^T over all columns, and from them half of p^T and of ds^T. Of dk,
dv and dq each has half of the columns, over all queries. There it takes its own half of p^T and ds^T from registers and
the other's from shared memory, so that the two meet once a tile, with products of their own to run until they do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtrain.attention.hopper.backward_parts import (
    VARYING,
    count_tiles,
    keys_of,
    produce,
    store_gradient,
    tile_at_step,
    walk,
)
from flashtrain.attention.hopper.backward_step import add_dq, hide
from flashtrain.attention.hopper.walk import arrive_at, sync_at


@gluon.jit
def _step(
    C: gl.constexpr, j, tile, block, partial, dk, dv, first_key, batch, dq_ptr, buffers, barriers, mask, scale_log2,
    AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr, TABLE: gl.constexpr, BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer C adds one tile of queries to its columns of dk and dv, and its columns of dq to the sum."""
    HALF: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = HEAD_DIM // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    q_s, dout_s, kv_s, lse_s, delta_s, p_s, ds_s = buffers
    # Zero, which the compiler cannot know: it works out where the parts of k and v lie at every tile, for next to
    # nothing, in place of keeping all of these addresses in registers that are not there.
    zero = j >> 30
    k_s, v_s = kv_s.index(zero), kv_s.index(zero + 1)
    kv_full, q_full, dout_full, free = barriers
    dtype: gl.constexpr = k_s.dtype
    OWN: gl.constexpr = C * HALF
    OTHER: gl.constexpr = (1 - C) * HALF
    stage = j % STAGES
    phase = (j // STAGES) & 1
    q, dout = q_s.index(stage), dout_s.index(stage)
    # Two buffers in turn: one consumer may come to the next tile before the other has left this one.
    p_both, ds_both = p_s.index(j % 2), ds_s.index(j % 2)
    s_zeros = gl.zeros([64, HALF], gl.float32, s_layout)
    dq_zeros = gl.zeros([BLOCK_M, WIDTH], gl.float32, d_layout)
    mbarrier.wait(q_full.index(stage), phase)
    s = warpgroup_mma(k_s, q.slice(OWN, HALF, dim=0).permute((1, 0)), s_zeros, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(stage), phase)
    dp = warpgroup_mma(v_s, dout.slice(OWN, HALF, dim=0).permute((1, 0)), s_zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    s = s * scale_log2 - lse_s.index(stage).slice(OWN, HALF, dim=0).load(query_layout)[None, :]
    if AFTER or BEFORE or EDGE:
        if partial:
            s = hide(s, block * BLOCK_M + OWN, first_key, batch, mask, AFTER, BEFORE, EDGE, TABLE, s_layout)
    p = gl.exp2(s)
    p_narrow = p.to(dtype)
    p_both.slice(OWN, HALF, dim=1).store(p_narrow)
    columns_of_q, columns_of_dout = q.slice(C * WIDTH, WIDTH, dim=1), dout.slice(C * WIDTH, WIDTH, dim=1)
    p_narrow = gl.convert_layout(p_narrow, p_layout)
    dv = warpgroup_mma(p_narrow, columns_of_dout.slice(OWN, HALF, dim=0), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * (dp - delta_s.index(stage).slice(OWN, HALF, dim=0).load(query_layout)[None, :])).to(dtype)
    ds_both.slice(OWN, HALF, dim=1).store(ds)
    fence_async_shared()
    arrive_at(8 + 2 * C + j % 2, "256")
    ds_narrow = gl.convert_layout(ds, p_layout)
    dk = warpgroup_mma(ds_narrow, columns_of_q.slice(OWN, HALF, dim=0), dk, is_async=True)
    sync_at(10 - 2 * C + j % 2, "256")
    dq = warpgroup_mma(
        ds_both.permute((1, 0)), k_s.slice(C * WIDTH, WIDTH, dim=1), dq_zeros, use_acc=False, is_async=True
    )
    p_other, ds_other = p_both.slice(OTHER, HALF, dim=1), ds_both.slice(OTHER, HALF, dim=1)
    dv = warpgroup_mma(p_other, columns_of_dout.slice(OTHER, HALF, dim=0), dv, is_async=True)
    dk = warpgroup_mma(ds_other, columns_of_q.slice(OTHER, HALF, dim=0), dk, is_async=True)
    dq = warpgroup_mma_wait(2, deps=[dq])
    REGIONS: gl.constexpr = WIDTH // 64
    add_dq(dq_ptr, (tile * 2 + C) * REGIONS, dq, d_layout)
    dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    mbarrier.arrive(free.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume(
    C: gl.constexpr, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2,
    GROUP: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr, TABLE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup C: scores of queries [32 C, 32 C + 32) of a tile, and half C of the columns of the rest."""
    WIDTH: gl.constexpr = HEAD_DIM // 2
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    kv_full = barriers[0]
    dtype: gl.constexpr = buffers[2].dtype
    seq_k = mask[3]
    dq_ptr, tiles, dk_ptr, dv_ptr, dk_strides, dv_strides = outputs
    first_key, batch, kv_head = keys_of(seq_k, heads, lists, GROUP, BLOCK_N, 0)
    begin, full_begin, full_end, end = walk(
        first_key, batch, kv_head * GROUP, mask, lists, BLOCK_M, BLOCK_N, 4, TABLE, 0
    )
    num_blocks = count_tiles(begin, end, BLOCK_M, 0)
    first_head = (batch * heads[1] + kv_head) * GROUP
    dk = gl.zeros([BLOCK_N, WIDTH], gl.float32, d_layout)
    dv = gl.zeros([BLOCK_N, WIDTH], gl.float32, d_layout)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    for j in range(num_blocks * GROUP):
        member, place, block = tile_at_step(j, lists, begin, num_blocks, GROUP, BLOCK_M, False, 0)
        partial = (place < full_begin) | (place >= full_end) if BEFORE else place < full_begin
        if EDGE:
            partial = partial | (first_key + BLOCK_N > seq_k)
        dk, dv = _step(
            C, j, (first_head + member) * tiles + block, block, partial, dk, dv, first_key, batch, dq_ptr, buffers,
            barriers, mask, scale_log2, AFTER, BEFORE, EDGE, TABLE, BLOCK_M, HEAD_DIM, STAGES,
        )  # fmt: skip
    dk, dv = (dk * scale).to(dtype), dv.to(dtype)
    store_gradient(dk_ptr, dk_strides, batch, kv_head, first_key, seq_k, dk, C * WIDTH, COLUMNS, d_layout)
    store_gradient(dv_ptr, dv_strides, batch, kv_head, first_key, seq_k, dv, C * WIDTH, COLUMNS, d_layout)


@gluon.jit(do_not_specialize=VARYING)
def backward_wide_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_ptr, turns_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, columns_ptr, lists_ptr,
    stride_columns, num_lists, lists_batch, lists_head, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    stride_statistics, all_kv_heads, num_kv_heads, heads_together, seq_q, seq_k, left, right, scale, scale_log2,
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr,
    TABLE: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, ORDERED: gl.constexpr, LIST_M: gl.constexpr,
):  # fmt: skip
    """Arguments as in `backward.backward_kernel`, so that both are launched alike, with boxes of 64 queries and of 64
    keys; without AHEAD, ORDERED and LIST_M."""
    gl.static_assert(CONSUMERS == 2 and BLOCK_M == 64 and not AHEAD and not ORDERED and LIST_M == 0)
    BLOCK_N: gl.constexpr = 64
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    # Swizzled in the width of half of the queries, which is what a consumer writes.
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_M, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], q_layout)
    dout_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], q_layout)
    kv_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, HEAD_DIM], k_layout)
    p_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], p_layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], p_layout)
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
        mbarrier.init(free.index(stage), count=CONSUMERS)
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc, dout_desc)
    statistics = (lse_ptr, delta_ptr, stride_statistics)
    buffers = (q_s, dout_s, kv_s, lse_s, delta_s, p_s, ds_s)
    barriers = (kv_full, q_full, dout_full, free)
    mask = (columns_ptr, stride_columns, seq_q, seq_k, left, right)
    lists = (lists_ptr, num_lists, lists_batch, lists_head)
    heads = (all_kv_heads, num_kv_heads, heads_together)
    outputs = (
        dq_ptr, stride_statistics // BLOCK_M, dk_ptr, dv_ptr, (dk_batch, dk_head, dk_row), (dv_batch, dv_head, dv_row),
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (0, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2, GROUP, AFTER, BEFORE, EDGE,
                    TABLE, BLOCK_M, BLOCK_N, HEAD_DIM, COLUMNS, STAGES)),
        (_consume, (1, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2, GROUP, AFTER, BEFORE, EDGE,
                    TABLE, BLOCK_M, BLOCK_N, HEAD_DIM, COLUMNS, STAGES)),
        (produce, (descriptors, statistics, turns_ptr, (q_s, dout_s, kv_s.index(0), kv_s.index(1), lse_s, delta_s),
                    (kv_full, q_full, dout_full, free, free), mask, lists, heads, BLOCK_N, GROUP,
                    BLOCK_M, HEAD_DIM, STAGES, AHEAD, ORDERED, TABLE, LIST_M)),
    ], [4, 1], [240, 24])  # fmt: skip
