"""The forward kernel for Hopper: FlashAttention-3's pipeline (https://arxiv.org/abs/2407.08608, section 3) in Gluon.

A program owns a tile of queries, heaviest tiles first. In it a producer warp keeps a ring of key and value tiles filled
by TMA, and consumer warpgroups own 64 queries each. Inside a consumer the product with the values of block j-1
runs under the softmax of block j; named barriers make the consumers take turns on the tensor cores, so that one
exponentiates while another multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtrain.attention.hopper.compat import as_box, box_to_global
from flashtrain.attention.hopper.walk import (
    LN_2,
    block_at,
    blocks_of,
    heaviest_first,
    intervals,
    load_box,
    named_arrive,
    named_sync,
    places_of,
)
from flashtrain.attention.portable.tiles import tile_of

# Arguments that change from call to call and are no reason to compile again.
_VARYING = (
    "rows_ptr", "stride_rows", "lists_ptr", "num_lists", "lists_batch", "lists_head", "all_heads", "num_heads", "group",
    "heads_together", "seq_q", "seq_k", "left", "right",
)  # fmt: skip


@gluon.jit
def _take_turn(C: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait until consumer C may issue its products."""
    if CONSUMERS > 1:
        named_sync("8" if C == 0 else ("9" if C == 1 else "10"), "256")


@gluon.jit
def _pass_turn(C: gl.constexpr, CONSUMERS: gl.constexpr):
    if CONSUMERS == 2:
        named_arrive("9" if C == 0 else "8", "256")
    if CONSUMERS == 3:
        named_arrive("9" if C == 0 else ("10" if C == 1 else "8"), "256")


@gluon.jit
def _tile(seq_q, heads, lists, BLOCK_M: gl.constexpr, LIST_M: gl.constexpr):
    """First query, batch row, query head and key head of this program."""
    all_heads, num_heads, group, heads_together = heads
    TILES: gl.constexpr = LIST_M // BLOCK_M if LIST_M else 1
    num_blocks = gl.cdiv(seq_q, TILES * BLOCK_M) * TILES
    block, batch_head = tile_of(gl.program_id(0), num_blocks, all_heads, heads_together, LIST_M == 0)
    batch, head = batch_head // num_heads, batch_head % num_heads
    first = heaviest_first(lists, batch, head, block // TILES, LIST_M > 0) * TILES + block % TILES
    return first * BLOCK_M, batch, head, head // group


@gluon.jit
def _walk(
    first, batch, head, mask, lists, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr,
    TABLE: gl.constexpr, LIST_M: gl.constexpr, LIST_N: gl.constexpr,
):  # fmt: skip
    """begin, full_begin, full_end, end: the places that the queries from `first` visit, as in `blocks_of`. Lists have a
    place for each tile of keys of a block."""
    rows, stride_rows, seq_q, seq_k, left, right = mask
    if LIST_M:
        TILES: gl.constexpr = LIST_N // BLOCK_N
        begin, full_end, end = places_of(lists, batch, head, first // LIST_M)
        return begin * TILES, begin * TILES, full_end * TILES, end * TILES
    return blocks_of(
        rows, stride_rows, batch, first, seq_q, seq_k, left, right, BLOCK_M, BLOCK_N, NUM_WARPS, False, TABLE
    )


@gluon.jit
def _tile_at(lists, place, BLOCK_N: gl.constexpr, LIST_N: gl.constexpr):
    """The number of the tile of keys at a place of the walk."""
    if LIST_N == 0:
        return place
    TILES: gl.constexpr = LIST_N // BLOCK_N
    return block_at(lists, place // TILES) * TILES + place % TILES


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, buffers, barriers, mask, lists, heads,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    TABLE: gl.constexpr, LIST_M: gl.constexpr, LIST_N: gl.constexpr,
):  # fmt: skip
    """The producer warp: the queries, then keys and values from right to left."""
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    BYTES: gl.constexpr = 2 * BLOCK_N * HEAD_DIM
    q_s, k_s, v_s = buffers
    q_full, k_full, k_free, v_full, v_free = barriers
    rows, stride_rows, seq_q, seq_k, left, right = mask
    first, batch, head, kv_head = _tile(seq_q, heads, lists, BLOCK_M, LIST_M)
    begin, full_begin, full_end, end = _walk(
        first, batch, head, mask, lists, BLOCK_M, BLOCK_N, 1, TABLE, LIST_M, LIST_N
    )
    # Rows that see nothing visit a block all the same.
    num_blocks, last = gl.maximum(end - begin, 1), gl.maximum(end, 1) - 1
    for c in gl.static_range(CONSUMERS):
        load_box(q_desc, [batch, head, first + c * 64, 0], q_full.index(c), q_s.index(c), 128 * HEAD_DIM)
    # The next keys go before the values: a key tile is free again a whole softmax earlier.
    first_key = _tile_at(lists, last, BLOCK_N, LIST_N) * BLOCK_N
    load_box(k_desc, [batch, kv_head, first_key, 0], k_full.index(0), k_s.index(0), BYTES)
    for j in range(num_blocks):
        next_key = first_key
        if j + 1 < num_blocks:
            next_key = _tile_at(lists, last - j - 1, BLOCK_N, LIST_N) * BLOCK_N
            stage = (j + 1) % STAGES
            mbarrier.wait(k_free.index(stage), (((j + 1) // STAGES) & 1) ^ 1)
            load_box(k_desc, [batch, kv_head, next_key, 0], k_full.index(stage), k_s.index(stage), BYTES)
        stage = j % STAGES
        mbarrier.wait(v_free.index(stage), ((j // STAGES) & 1) ^ 1)
        load_box(v_desc, [batch, kv_head, first_key, 0], v_full.index(stage), v_s.index(stage), BYTES)
        first_key = next_key


@gluon.jit
def _softmax(s, m, scale_log2):
    """Weights exp2(scale_log2 * s - m), the new largest scaled score of each row, and what earlier sums shrink by."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    # A row that has seen nothing yet has m = -inf, and -inf - -inf is NaN.
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    return gl.exp2(s * scale_log2 - m_safe[:, None]), m_new, gl.exp2(m - m_safe)


@gluon.jit
def _partial_sum(p, BLOCK_N: gl.constexpr):
    """Row sums of what each thread holds; the sum over the four threads of a row waits for the end of the tile."""
    return gl.sum(gl.sum(p.reshape([64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _hide(s, lo, hi, first_key, BLOCK_N: gl.constexpr, LOWER: gl.constexpr, LAYOUT: gl.constexpr):
    key = (first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    visible = key < hi[:, None]
    if LOWER:
        visible = visible & (key >= lo[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _consume(
    C: gl.constexpr, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    LOWER: gl.constexpr, LATER: gl.constexpr, TABLE: gl.constexpr, LIST_M: gl.constexpr, LIST_N: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup C: queries [64 C, 64 C + 64) of the tile."""
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    q_s, k_s, v_s = buffers
    q_full, k_full, k_free, v_full, v_free = barriers
    rows, stride_rows, seq_q, seq_k, left, right = mask
    dtype: gl.constexpr = v_s.dtype
    first, batch, head, kv_head = _tile(seq_q, heads, lists, BLOCK_M, LIST_M)
    begin, full_begin, full_end, end = _walk(
        first, batch, head, mask, lists, BLOCK_M, BLOCK_N, 4, TABLE, LIST_M, LIST_N
    )
    num_blocks, last = gl.maximum(end - begin, 1), gl.maximum(end, 1) - 1
    first += C * 64
    if LATER and LIST_M == 0:
        own_begin, full_begin, full_end, own_end = blocks_of(
            rows, stride_rows, batch, first, seq_q, seq_k, left, right, 64, BLOCK_N, 4, False, TABLE
        )
    lo, hi = intervals(rows, stride_rows, batch, first, seq_q, seq_k, left, right, 64, row_layout, TABLE)
    if LIST_M:
        hi = gl.where(begin < end, hi, 0)  # the block that an empty list visits all the same
    zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, out_layout)
    m = gl.full([64], float("-inf"), gl.float32, row_layout)
    q = q_s.index(C)
    if C == CONSUMERS - 1:
        _pass_turn(C, CONSUMERS)

    # The first block, the rightmost, is masked in any case.
    mbarrier.wait(q_full.index(C), 0)
    mbarrier.wait(k_full.index(0), 0)
    _take_turn(C, CONSUMERS)
    s = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(C, CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    s = _hide(s, lo, hi, _tile_at(lists, last, BLOCK_N, LIST_N) * BLOCK_N, BLOCK_N, LOWER, s_layout)
    p, m, shrink = _softmax(s, m, scale_log2)
    total = _partial_sum(p, BLOCK_N)
    p = gl.convert_layout(p.to(dtype), p_layout)

    for j in range(1, num_blocks):
        stage = j % STAGES
        before = (j - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
        _take_turn(C, CONSUMERS)
        s = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
        pv = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
        _pass_turn(C, CONSUMERS)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(stage), count=1)
        if LATER:
            place = last - j
            partial = (place >= full_end) | (place < full_begin) if LOWER and LIST_M == 0 else place >= full_end
            if partial:
                s = _hide(s, lo, hi, _tile_at(lists, place, BLOCK_N, LIST_N) * BLOCK_N, BLOCK_N, LOWER, s_layout)
        weights, m, shrink = _softmax(s, m, scale_log2)
        shrink_total = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
        total = total * shrink_total[:, None] + _partial_sum(weights, BLOCK_N)
        acc = warpgroup_mma_wait(0, deps=[pv])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, out_row_layout)[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)

    stage = (num_blocks - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((num_blocks - 1) // STAGES) & 1)
    pv = warpgroup_mma(p, v_s.index(stage), acc, is_async=True)
    # A row that saw nothing has a total of 0 and m = -inf: out 0 and lse -inf.
    sums = gl.convert_layout(gl.sum(total, 1), row_layout)
    sums = gl.where(sums == 0.0, 1.0, sums)
    row = first + gl.arange(0, 64, layout=row_layout)
    lse_ptrs = lse_ptr + (batch * heads[1] + head).to(gl.int64) * seq_q + row
    gl.store(lse_ptrs, (m + gl.log2(sums)) * LN_2, mask=row < seq_q)
    acc = warpgroup_mma_wait(0, deps=[pv])
    acc = acc * (1.0 / gl.convert_layout(sums, out_row_layout))[:, None]
    # The queries are not needed any more: out leaves through their buffer.
    q._keep_alive()
    q.store(acc.to(dtype))
    fence_async_shared()
    box_to_global(out_desc, [batch, head, first, 0], as_box(q, out_desc))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, rows_ptr, lists_ptr, stride_rows, num_lists, lists_batch, lists_head,
    all_heads, num_heads, group, heads_together, seq_q, seq_k, left, right, scale_log2,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    LOWER: gl.constexpr, LATER: gl.constexpr, TABLE: gl.constexpr, LIST_M: gl.constexpr, LIST_N: gl.constexpr,
):  # fmt: skip
    """Descriptors over [batch, heads, seq, head_dim] with boxes of 64 queries and BLOCK_N keys; lse float32
    [batch, num_heads, seq_q]; rows as in a plan, or None for the window `left`, `right`. HEAD_DIM is the width of a
    tile: of a smaller head dim TMA reads zeros beyond, and writes nothing there.

    LOWER: a query's interval of keys may begin after key 0. LATER: other blocks of a tile than the rightmost may be
    partial. LIST_M, LIST_N: `lists_ptr` holds work lists, as in a plan, for blocks of so many queries and keys, whole
    tiles; 0 without lists.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, HEAD_DIM], q_layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    fence_async_shared()
    buffers = (q_s, k_s, v_s)
    barriers = (q_full, k_full, k_free, v_full, v_free)
    mask = (rows_ptr, stride_rows, seq_q, seq_k, left, right)
    lists = (lists_ptr, num_lists, lists_batch, lists_head)
    heads = (all_heads, num_heads, group, heads_together)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (0, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2, CONSUMERS,
                        BLOCK_N, HEAD_DIM, STAGES, LOWER, LATER, TABLE, LIST_M, LIST_N)),
            (_produce, (q_desc, k_desc, v_desc, buffers, barriers, mask, lists, heads, CONSUMERS, BLOCK_N,
                        HEAD_DIM, STAGES, TABLE, LIST_M, LIST_N)),
        ], [1], [24])  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2, CONSUMERS,
                        BLOCK_N, HEAD_DIM, STAGES, LOWER, LATER, TABLE, LIST_M, LIST_N)),
            (_consume, (1, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2, CONSUMERS,
                        BLOCK_N, HEAD_DIM, STAGES, LOWER, LATER, TABLE, LIST_M, LIST_N)),
            (_produce, (q_desc, k_desc, v_desc, buffers, barriers, mask, lists, heads, CONSUMERS, BLOCK_N,
                        HEAD_DIM, STAGES, TABLE, LIST_M, LIST_N)),
        ], [4, 1], [240, 24])  # fmt: skip
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (0, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2, CONSUMERS,
                        BLOCK_N, HEAD_DIM, STAGES, LOWER, LATER, TABLE, LIST_M, LIST_N)),
            (_consume, (1, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2, CONSUMERS,
                        BLOCK_N, HEAD_DIM, STAGES, LOWER, LATER, TABLE, LIST_M, LIST_N)),
            (_consume, (2, out_desc, lse_ptr, buffers, barriers, mask, lists, heads, scale_log2, CONSUMERS,
                        BLOCK_N, HEAD_DIM, STAGES, LOWER, LATER, TABLE, LIST_M, LIST_N)),
            (_produce, (q_desc, k_desc, v_desc, buffers, barriers, mask, lists, heads, CONSUMERS, BLOCK_N,
                        HEAD_DIM, STAGES, TABLE, LIST_M, LIST_N)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
