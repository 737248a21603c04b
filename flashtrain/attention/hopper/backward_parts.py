"""What the backward kernels share: which tiles of queries a program visits, the producer warp that brings them, and
writing dk and dv."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtrain.attention.hopper.compat import copy_to_shared
from flashtrain.attention.hopper.turns import end_turn
from flashtrain.attention.hopper.walk import block_at, blocks_of, heaviest_first, load_box, places_of
from flashtrain.attention.portable.tiles import tile_of

# Arguments that change from call to call and are no reason to compile again.
VARYING = (
    "columns_ptr", "lists_ptr", "turns_ptr", "stride_statistics", "stride_columns", "num_lists", "lists_batch",
    "lists_head", "all_kv_heads", "num_kv_heads", "heads_together", "seq_q", "seq_k", "left", "right",
)  # fmt: skip


@gluon.jit
def keys_of(seq_k, heads, lists, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, LIST_M: gl.constexpr):
    """First key, batch row and key head of this program."""
    all_kv_heads, num_kv_heads, heads_together = heads
    block, batch_head = tile_of(gl.program_id(0), gl.cdiv(seq_k, BLOCK_N), all_kv_heads, heads_together, False)
    batch, kv_head = batch_head // num_kv_heads, batch_head % num_kv_heads
    block = heaviest_first(lists, batch, kv_head * GROUP, block, LIST_M > 0)
    return block * BLOCK_N, batch, kv_head


@gluon.jit
def walk(
    first_key, batch, head, mask, lists, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr,
    TABLE: gl.constexpr, LIST_M: gl.constexpr,
):  # fmt: skip
    """begin, full_begin, full_end, end: the places of queries that see the BLOCK_N keys from first_key, as in
    `blocks_of`. Lists have places for blocks of LIST_M queries."""
    columns, stride_columns, seq_q, seq_k, left, right = mask
    if LIST_M:
        begin, full_end, end = places_of(lists, batch, head, first_key // BLOCK_N)
        return begin, begin, full_end, end
    return blocks_of(
        columns, stride_columns, batch, first_key, seq_k, seq_q, right, left, BLOCK_N, BLOCK_M, NUM_WARPS, True,
        TABLE,
    )  # fmt: skip


@gluon.jit
def turn_of(first_key, BLOCK_N: gl.constexpr):
    """The number of a program in the order in which they add to dq, from 1."""
    return first_key // BLOCK_N + 1


@gluon.jit
def tile_at_step(
    j, lists, begin, num_blocks, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, ORDERED: gl.constexpr,
    LIST_M: gl.constexpr,
):  # fmt: skip
    """Query head of the group, place and tile of queries of step j. Query heads of a group share their list. With
    ORDERED the last queries come first."""
    member, rest = 0, j
    if GROUP > 1:
        member, rest = j // num_blocks, j % num_blocks
    if LIST_M:
        TILES: gl.constexpr = LIST_M // BLOCK_M
        place = begin + rest // TILES
        return member, place, block_at(lists, place) * TILES + rest % TILES
    if ORDERED:
        rest = num_blocks - 1 - rest
    return member, begin + rest, begin + rest


@gluon.jit
def count_tiles(begin, end, BLOCK_M: gl.constexpr, LIST_M: gl.constexpr):
    """Tiles of queries of one head."""
    if LIST_M:
        return (end - begin) * (LIST_M // BLOCK_M)
    return end - begin


@gluon.jit
def produce(
    descriptors, statistics, turns_ptr, buffers, barriers, mask, lists, heads,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, ORDERED: gl.constexpr, TABLE: gl.constexpr, LIST_M: gl.constexpr,
):  # fmt: skip
    """The producer warp: keys and values once, then queries, dout and statistics step by step.

    With ORDERED it also ends the turns. That waits for memory, and this warp has the time.
    """
    EXTRA: gl.constexpr = STAGES - 1 if ORDERED else 0
    q_desc, k_desc, v_desc, dout_desc = descriptors
    lse_ptr, delta_ptr, stride_statistics = statistics
    q_s, dout_s, k_s, v_s, lse_s, delta_s = buffers
    kv_full, q_full, dout_full, free, added = barriers
    first_key, batch, kv_head = keys_of(mask[3], heads, lists, GROUP, BLOCK_N, LIST_M)
    begin, full_begin, full_end, end = walk(
        first_key, batch, kv_head * GROUP, mask, lists, BLOCK_M, BLOCK_N, 1, TABLE, LIST_M
    )
    load_box(k_desc, [batch, kv_head, first_key, 0], kv_full.index(0), k_s, 2 * BLOCK_N * HEAD_DIM)
    load_box(v_desc, [batch, kv_head, first_key, 0], kv_full.index(1), v_s, 2 * BLOCK_N * HEAD_DIM)
    row = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    # Query heads of a group are neighbours.
    first_head = kv_head * GROUP
    row_of_head = (batch * heads[1] * GROUP + first_head).to(gl.int64) * stride_statistics
    num_blocks = count_tiles(begin, end, BLOCK_M, LIST_M)
    steps = num_blocks * GROUP
    for j in range(steps + EXTRA):
        stage = j % STAGES
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        if EXTRA == 0 or j < steps:
            member, place, block = tile_at_step(j, lists, begin, num_blocks, GROUP, BLOCK_M, ORDERED, LIST_M)
            first = block * BLOCK_M
            statistics_at = row_of_head + member * stride_statistics + first
            copy_to_shared(lse_s.index(stage), lse_ptr + statistics_at + row)
            async_copy.mbarrier_arrive(q_full.index(stage), increment_count=False)
            load_box(q_desc, [batch, first_head + member, first, 0], q_full.index(stage), q_s.index(stage),
                     2 * BLOCK_M * HEAD_DIM)  # fmt: skip
            copy_to_shared(delta_s.index(stage), delta_ptr + statistics_at + row)
            async_copy.mbarrier_arrive(dout_full.index(stage), increment_count=False)
            load_box(dout_desc, [batch, first_head + member, first, 0], dout_full.index(stage), dout_s.index(stage),
                     2 * BLOCK_M * HEAD_DIM)  # fmt: skip
        if ORDERED:
            if j >= STAGES:
                mbarrier.wait(added.index(stage), ((j // STAGES) & 1) ^ 1)
                member, place, block = tile_at_step(
                    j - STAGES, lists, begin, num_blocks, GROUP, BLOCK_M, ORDERED, LIST_M
                )
                tile = (batch * heads[1] * GROUP + first_head + member) * (stride_statistics // BLOCK_M) + block
                end_turn(turns_ptr + tile, turn_of(first_key, BLOCK_N))


@gluon.jit
def store_gradient(
    ptr, strides, batch, kv_head, first_key, seq_k, grad, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write a consumer's part of dk or dv, from a key and column FIRST on, where the tensor has them."""
    key = first_key + gl.arange(0, grad.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dim = FIRST + gl.arange(0, grad.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    base = ptr + batch.to(gl.int64) * strides[0] + kv_head.to(gl.int64) * strides[1]
    inside = (key < seq_k)[:, None]
    if FIRST + grad.shape[1] > COLUMNS:
        inside = inside & (dim < COLUMNS)
    gl.store(base + key.to(gl.int64)[:, None] * strides[2] + dim, grad, mask=inside)
