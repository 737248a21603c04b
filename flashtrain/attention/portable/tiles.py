"""What the kernels share on the device: products, tiles in and out of memory, and which tiles to visit.

One source runs on the GPU and in Triton's interpreter. The interpreter computes bfloat16 wrongly and without a word (it
multiplies bit patterns and truncates casts), so every product goes through `dot` and every cast to the input dtype
through `narrow`.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Arguments that change from call to call and are no reason to compile again. Strides are: alignment is worth it.
VARYING = (
    "stride_table", "num_lists", "lists_batch", "lists_head", "all_heads", "num_heads", "group", "seq_q", "seq_k",
    "left", "right", "heads_together",
)  # fmt: skip


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b in float32; acc may be None."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x in `dtype`, rounded to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def origin(ptr, batch, head, stride_batch, stride_head):
    """Where one head of one batch row begins. In 64 bits: batch * stride passes 2**31 at long context."""
    return ptr + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head


@triton.jit
def load_tile(
    base,
    first_row,
    num_rows,
    stride_row,
    stride_dim,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """Rows [first_row, first_row + BLOCK) of a head, [BLOCK, BLOCK_D]; zeros beyond num_rows and HEAD_DIM.

    The tile's origin is in 64 bits, offsets inside it in 32, which `launch.fit_tile` makes sure is enough.
    """
    row, dim = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    ptrs = base + first_row.to(tl.int64) * stride_row + (row * stride_row + dim * stride_dim)
    if CHECK_ROWS and HEAD_DIM < BLOCK_D:
        return tl.load(ptrs, mask=(first_row + row < num_rows) & (dim < HEAD_DIM), other=0.0)
    if CHECK_ROWS:
        return tl.load(ptrs, mask=first_row + row < num_rows, other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(ptrs, mask=dim < HEAD_DIM, other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_tile(
    base,
    first_row,
    num_rows,
    stride_row,
    stride_dim,
    tile,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The inverse of `load_tile`, float32 to the dtype in memory."""
    row, dim = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    ptrs = base + first_row.to(tl.int64) * stride_row + (row * stride_row + dim * stride_dim)
    tl.store(ptrs, narrow(tile, base.dtype.element_ty), mask=(first_row + row < num_rows) & (dim < HEAD_DIM))


@triton.jit
def load_statistics(base, first_row, BLOCK: tl.constexpr):
    """-lse in base 2 and delta of a tile's rows, [BLOCK] each, of a head that `launch.row_statistics` packed."""
    ptr = base + first_row.to(tl.int64) * 2
    pairs = tl.load(ptr + (tl.arange(0, BLOCK)[:, None] * 2 + tl.arange(0, 2)[None, :]))
    minus_lse, delta = tl.split(pairs)
    return minus_lse, delta


@triton.jit
def tile_of(program, num_blocks, num_heads, heads_together, LAST_FIRST: tl.constexpr):
    """Block and head of a program. A few heads at a time, so that what they stream stays in the L2 cache; among them
    the heaviest blocks first, so that no long one is left for the end."""
    first_head = program // (num_blocks * heads_together) * heads_together
    heads = tl.minimum(heads_together, num_heads - first_head)
    rest = program - first_head * num_blocks
    block = rest // heads
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, first_head + rest % heads


@triton.jit
def listed_tile(lists, num_lists, owner, rank, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """First row of the tile that is rank-th from the heaviest, and its block's number, of the head whose lists begin
    with number `owner`. `lists` is in the form that `attention.lists` describes; a listed block is LISTED rows."""
    TILES: tl.constexpr = LISTED // BLOCK
    block = tl.load(lists + (2 * num_lists + 1 + owner) + rank // TILES)
    return block * LISTED + rank % TILES * BLOCK, block


@triton.jit
def listed_run(lists, num_lists, number):
    """begin, full_begin, full_end, end of list `number` as places in `lists`: full entries, then partial ones."""
    begin, end = tl.load(lists + number), tl.load(lists + number + 1)
    return begin, begin, tl.load(lists + (num_lists + 1) + number), end


@triton.jit
def intervals(table, stride_table, batch, first_row, num_rows, num_cols, left, right, BLOCK: tl.constexpr):
    """lo, hi [BLOCK] as `visible_run` gives them."""
    row = first_row + tl.arange(0, BLOCK)
    if table is None:
        shift = num_cols - num_rows
        lo = tl.maximum(row + shift - left, 0)
        hi = tl.minimum(row + shift + right + 1, num_cols)
    else:
        base = table + batch.to(tl.int64) * stride_table
        lo = tl.load(base + row, mask=row < num_rows, other=0)
        hi = tl.load(base + num_rows + row, mask=row < num_rows, other=0)
    return lo, hi


@triton.jit
def visible_run(
    table,
    stride_table,
    batch,
    first_row,
    num_rows,
    num_cols,
    left,
    right,
    BLOCK: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """What the rows of a tile see.

    Rows are queries and columns keys, or the other way round with left and right exchanged: the same formula serves
    both. `table` is [batch, 2, num_rows] or None for the formula.

    Returns:
        lo, hi [BLOCK]: the columns that each row sees; block numbers begin <= full_begin <= full_end <= end: the tile
        needs the blocks [begin, end), and in those of [full_begin, full_end) every element is visible.
    """
    lo, hi = intervals(table, stride_table, batch, first_row, num_rows, num_cols, left, right, BLOCK)
    if table is None:
        lo_min, lo_max, hi_min, hi_max = window_bounds(first_row, BLOCK, num_rows, num_cols, left, right)
    else:
        real = first_row + tl.arange(0, BLOCK) < num_rows
        # A row that sees nothing asks for no block and lets no block be full; rows past the end do neither.
        sees = lo < hi
        lo_min = tl.min(tl.where(sees, lo, num_cols), 0)
        hi_max = tl.max(tl.where(sees, hi, 0), 0)
        lo_max = tl.max(tl.where(sees, lo, 0), 0)
        hi_min = tl.min(tl.where(sees, hi, tl.where(real, 0, num_cols)), 0)
    begin, full_begin, full_end, end = run_of(lo_min, lo_max, hi_min, hi_max, BLOCK_COLS)
    return lo, hi, begin, full_begin, full_end, end


@triton.jit
def window_bounds(first_row, block, num_rows, num_cols, left, right):
    """Of the intervals [lo, hi) that a tile's rows see through a window: smallest and largest lo, smallest and largest
    hi. Both only grow with the row, so the tile's first and last row bound them."""
    first = first_row + num_cols - num_rows
    last = tl.minimum(first_row + block, num_rows) - 1 + num_cols - num_rows
    lo_min = tl.maximum(first - left, 0)
    lo_max = tl.maximum(last - left, 0)
    hi_min = tl.maximum(tl.minimum(first + right + 1, num_cols), 0)
    hi_max = tl.maximum(tl.minimum(last + right + 1, num_cols), 0)
    return lo_min, lo_max, hi_min, hi_max


@triton.jit
def run_of(lo_min, lo_max, hi_min, hi_max, BLOCK_COLS: tl.constexpr):
    """The blocks that a tile needs, begin <= full_begin <= full_end <= end, from the bounds of its rows' intervals."""
    end = tl.cdiv(hi_max, BLOCK_COLS)
    begin = tl.minimum(lo_min // BLOCK_COLS, end)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(lo_max, BLOCK_COLS), begin), end)
    full_end = tl.maximum(tl.minimum(hi_min // BLOCK_COLS, end), full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def own_walk(
    lists, num_lists, lists_batch, lists_head, table, stride_table, all_heads, num_heads, heads_together,
    num_rows, num_cols, left, right,
    BLOCK: tl.constexpr, BLOCK_COLS: tl.constexpr, LISTED: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Which tile of rows this program has, and what it visits: where every kernel begins.

    Rows, columns, `table`, left and right are those of `visible_run`; `lists`, in the form that `attention.lists`
    describes, may be None, and LAST_FIRST says in which order tiles are taken then.

    Returns:
        batch_head, batch, head: of `all_heads`, which are num_heads in each batch row.
        first: the tile's first row.
        number: of its list.
        lo, hi [BLOCK]: the columns that each row sees.
        begin <= full_begin <= full_end <= end: of its blocks of columns, or of the places in its list, [begin, end) are
            visited, and of those [full_begin, full_end) are full.
    """
    if lists is None:
        block, batch_head = tile_of(tl.program_id(0), tl.cdiv(num_rows, BLOCK), all_heads, heads_together, LAST_FIRST)
        batch, head = batch_head // num_heads, batch_head % num_heads
        first, number = block * BLOCK, block
        lo, hi, begin, full_begin, full_end, end = visible_run(
            table, stride_table, batch, first, num_rows, num_cols, left, right, BLOCK, BLOCK_COLS
        )
    else:
        num_ranks = tl.cdiv(num_rows, LISTED) * (LISTED // BLOCK)
        rank, batch_head = tile_of(tl.program_id(0), num_ranks, all_heads, heads_together, False)
        batch, head = batch_head // num_heads, batch_head % num_heads
        owner = batch * lists_batch + head * lists_head
        first, block = listed_tile(lists, num_lists, owner, rank, LISTED, BLOCK)
        number = owner + block
        begin, full_begin, full_end, end = listed_run(lists, num_lists, number)
        lo, hi = intervals(table, stride_table, batch, first, num_rows, num_cols, left, right, BLOCK)
    return batch_head, batch, head, first, number, lo, hi, begin, full_begin, full_end, end


@triton.jit
def num_visited(begin, full_begin, full_end, end, MASKED: tl.constexpr):
    """How many full blocks, or with MASKED partial ones, a run has."""
    if MASKED:
        return (full_begin - begin) + (end - full_end)
    return full_end - full_begin


@triton.jit
def visited(i, begin, full_begin, full_end, MASKED: tl.constexpr):
    """The number of the i-th full block, or with MASKED of the i-th partial one: those left of the full ones come
    first, then those right of them."""
    if MASKED:
        on_the_left = full_begin - begin
        return tl.where(i < on_the_left, begin + i, full_end + i - on_the_left)
    return full_begin + i


@triton.jit
def num_tiles(lists, begin, full_begin, full_end, end, BLOCK: tl.constexpr, LISTED: tl.constexpr, MASKED: tl.constexpr):
    """`num_visited` of a run of blocks, or of a list, in tiles of BLOCK columns."""
    count = num_visited(begin, full_begin, full_end, end, MASKED)
    return count if lists is None else count * (LISTED // BLOCK)


@triton.jit
def first_col(i, lists, begin, full_begin, full_end, BLOCK: tl.constexpr, LISTED: tl.constexpr, MASKED: tl.constexpr):
    """First column of the i-th tile of `num_tiles`."""
    if lists is None:
        col = visited(i, begin, full_begin, full_end, MASKED) * BLOCK
    else:
        TILES: tl.constexpr = LISTED // BLOCK
        block = tl.load(lists + visited(i // TILES, begin, full_begin, full_end, MASKED))
        col = block * LISTED + i % TILES * BLOCK
    return col


@triton.jit
def between(lo, hi, first_col, BLOCK_COLS: tl.constexpr):
    """Which columns of a block each row sees, bool [rows, BLOCK_COLS]."""
    col = (first_col + tl.arange(0, BLOCK_COLS))[None, :]
    return (col >= lo[:, None]) & (col < hi[:, None])
