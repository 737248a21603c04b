"""The backward kernel for Hopper: dq, dk and dv in one pass over the scores, as in FlashAttention-3
(https://arxiv.org/abs/2407.08608, appendix B), in Gluon.

A program owns 128 keys and walks over the queries that see them. Two consumer warpgroups own 64 keys each; with blocks
of 64 keys there is one. They compute scores transposed, s^T = k q^T and dp^T = v dout^T, so that p^T and ds^T feed
dv += p^T dout and dk += ds^T q from registers. Only ds goes through shared memory, for dq = ds k, which two consumers
share (by queries, or by columns where the tile has 64 queries). Each adds its part to a float32 tensor in global memory
straight from registers: shared memory is what the tensor cores wait for here, and TMA would write and read every part
there once more. In which order programs add is left open, or fixed (ORDERED). A producer warp brings q, dout and the
rows' statistics. dq is summed in regions of 64 queries by 64 columns, laid out as the threads hold them;
`around.finish_kernel` brings it in order.
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
    turn_of,
    walk,
)
from flashtrain.attention.hopper.backward_step import step
from flashtrain.attention.hopper.turns import end_turn
from flashtrain.attention.hopper.walk import sync_at


@gluon.jit
def _consume(
    C: gl.constexpr, descriptors, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2,
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr,
    BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    ORDERED: gl.constexpr, TABLE: gl.constexpr, LIST_M: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup C: keys [64 C, 64 C + 64) of the program's."""
    BLOCK_N: gl.constexpr = 64 * CONSUMERS
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s = buffers
    kv_full, q_full, dout_full, free, added = barriers
    columns, stride_columns, seq_q, seq_k, left, right = mask
    dq_ptr, tiles, turns_ptr, dk_ptr, dv_ptr, dk_strides, dv_strides = outputs
    first_key, batch, kv_head = keys_of(seq_k, heads, lists, GROUP, BLOCK_N, LIST_M)
    begin, full_begin, full_end, end = walk(
        first_key, batch, kv_head * GROUP, mask, lists, BLOCK_M, BLOCK_N, 4, TABLE, LIST_M
    )
    num_blocks = count_tiles(begin, end, BLOCK_M, LIST_M)
    steps = num_blocks * GROUP
    # Programs add to a tile of dq from the first keys to the last, each behind the one before it where that visits the
    # tile. They walk from the last queries to the first: with a causal mask all of a head begin at one tile then, each
    # behind the one that was started before it, the longest first, and none waits for a program that has no
    # multiprocessor yet.
    turn, before_begin, before_end = 0, 0, 0
    if ORDERED:
        turn = turn_of(first_key, BLOCK_N)
        if first_key > 0:
            before_begin, _full_begin, _full_end, before_end = walk(
                first_key - BLOCK_N, batch, kv_head * GROUP, mask, lists, BLOCK_M, BLOCK_N, 4, TABLE, LIST_M
            )
    dq = (dq_ptr, tiles, turns_ptr, turn, before_begin, before_end)
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
        member, place, block = tile_at_step(j, lists, begin, num_blocks, GROUP, BLOCK_M, ORDERED, LIST_M)
        if LIST_M:
            partial = place >= full_end
        else:
            partial = (place < full_begin) | (place >= full_end) if BEFORE else place < full_begin
        if EDGE:  # past the last key scores are 0, which may be far above all that a query sees
            partial = partial | (first_key + 64 > seq_k)
        dk, dv, s = step(
            C, j, first_head + member, block, partial, dk, dv, s, j + 1 < steps, first_key, batch, dq, buffers,
            barriers, mask, k, v, scale_log2, CONSUMERS, AFTER, BEFORE, EDGE, BLOCK_M, HEAD_DIM, STAGES, AHEAD,
            ORDERED, TABLE,
        )  # fmt: skip
    if ORDERED:  # the turn of the last tile is not the producer's to end
        sync_at(12, "256")
        if steps > 0 and C == 0:
            member, place, block = tile_at_step(steps - 1, lists, begin, num_blocks, GROUP, BLOCK_M, ORDERED, LIST_M)
            end_turn(turns_ptr + (first_head + member) * tiles + block, turn)
    dk, dv = (dk * scale).to(k_s.dtype), dv.to(k_s.dtype)
    store_gradient(dk_ptr, dk_strides, batch, kv_head, first_key, seq_k, dk, 0, COLUMNS, d_layout)
    store_gradient(dv_ptr, dv_strides, batch, kv_head, first_key, seq_k, dv, 0, COLUMNS, d_layout)


@gluon.jit(do_not_specialize=VARYING)
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_ptr, turns_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, columns_ptr, lists_ptr,
    stride_columns, num_lists, lists_batch, lists_head, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    stride_statistics, all_kv_heads, num_kv_heads, heads_together, seq_q, seq_k, left, right, scale, scale_log2,
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, AFTER: gl.constexpr, BEFORE: gl.constexpr, EDGE: gl.constexpr,
    TABLE: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, ORDERED: gl.constexpr, LIST_M: gl.constexpr,
):  # fmt: skip
    """Descriptors over [batch, heads, seq, COLUMNS] with boxes of BLOCK_M queries and 64 CONSUMERS keys; lse in base 2
    and delta float32 [batch * num_heads, padded seq_q]; dq float32, zeroed, [batch * num_heads * padded seq_q / 64,
    HEAD_DIM / 64, 4096], regions of 64 queries and 64 columns; turns int32, one a tile, zeroed.

    AFTER: a key may be seen only after some query. BEFORE: only before some query. EDGE: the last program has keys
    past the end. ORDERED: programs add to a tile of dq in one order. LIST_M: `lists_ptr` holds work lists, as in a
    plan, for blocks of so many queries, whole tiles, and 64 CONSUMERS keys; 0 without lists; not with ORDERED. One
    consumer has BLOCK_M 64, and neither AHEAD nor ORDERED.
    """
    BLOCK_N: gl.constexpr = 64 * CONSUMERS
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], q_layout)
    dout_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], q_layout)
    k_s = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], k_layout)
    v_s = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], k_layout)
    # Two consumers, who read each other's half, take two in turn.
    ds_s = gl.allocate_shared_memory(dtype, [CONSUMERS, BLOCK_N, BLOCK_M], ds_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    added = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=33)  # 32 threads that copy statistics, and TMA
        mbarrier.init(dout_full.index(stage), count=33)
        mbarrier.init(free.index(stage), count=CONSUMERS)
        mbarrier.init(added.index(stage), count=CONSUMERS)
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc, dout_desc)
    statistics = (lse_ptr, delta_ptr, stride_statistics)
    buffers = (q_s, dout_s, k_s, v_s, lse_s, delta_s, ds_s)
    barriers = (kv_full, q_full, dout_full, free, added)
    mask = (columns_ptr, stride_columns, seq_q, seq_k, left, right)
    lists = (lists_ptr, num_lists, lists_batch, lists_head)
    heads = (all_kv_heads, num_kv_heads, heads_together)
    outputs = (
        dq_ptr, stride_statistics // BLOCK_M, turns_ptr, dk_ptr, dv_ptr, (dk_batch, dk_head, dk_row),
        (dv_batch, dv_head, dv_row),
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (0, descriptors, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2, CONSUMERS,
                        GROUP, AFTER, BEFORE, EDGE, BLOCK_M, HEAD_DIM, COLUMNS, STAGES, AHEAD, ORDERED, TABLE,
                        LIST_M)),
            (produce, (descriptors, statistics, turns_ptr, buffers[:6], barriers, mask, lists, heads, BLOCK_N, GROUP,
                        BLOCK_M, HEAD_DIM, STAGES, AHEAD, ORDERED, TABLE, LIST_M)),
        ], [1], [24])  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, descriptors, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2, CONSUMERS,
                        GROUP, AFTER, BEFORE, EDGE, BLOCK_M, HEAD_DIM, COLUMNS, STAGES, AHEAD, ORDERED, TABLE,
                        LIST_M)),
            (_consume, (1, descriptors, outputs, buffers, barriers, mask, lists, heads, scale, scale_log2, CONSUMERS,
                        GROUP, AFTER, BEFORE, EDGE, BLOCK_M, HEAD_DIM, COLUMNS, STAGES, AHEAD, ORDERED, TABLE,
                        LIST_M)),
            (produce, (descriptors, statistics, turns_ptr, buffers[:6], barriers, mask, lists, heads, BLOCK_N, GROUP,
                        BLOCK_M, HEAD_DIM, STAGES, AHEAD, ORDERED, TABLE, LIST_M)),
        ], [4, 1], [240, 24])  # fmt: skip
