"""What the two Hopper kernels share on the device: named barriers, and which tiles to visit.

The walk is that of the portable kernels (`portable.tiles`): a tile's rows see one run of blocks, full ones between
partial ones. With work lists (`plan.Plan.q_lists`) a run is one of places in a list, full blocks before partial ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtrain.attention.hopper.compat import as_box, box_to_shared
from flashtrain.attention.portable.tiles import run_of, window_bounds

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def named_sync(number: gl.constexpr, threads: gl.constexpr):
    """Wait until `threads` threads have come to a hardware barrier. Triton uses the numbers below 8."""
    gl.inline_asm_elementwise(
        "bar.sync " + number + ", " + threads + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def named_arrive(number: gl.constexpr, threads: gl.constexpr):
    """Come to a hardware barrier without waiting."""
    gl.inline_asm_elementwise(
        "bar.arrive " + number + ", " + threads + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sync_at(number, threads: gl.constexpr):
    """`named_sync` where the number is only known on the device."""
    gl.inline_asm_elementwise(
        "bar.sync $1, " + threads + "; mov.u32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_at(number, threads: gl.constexpr):
    """`named_arrive` where the number is only known on the device."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, " + threads + "; mov.u32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_box(descriptor, coordinates, full, buffer, BYTES: gl.constexpr):
    """Copy a box from global to shared memory; `full` completes when it is there."""
    mbarrier.expect(full, BYTES)
    box_to_shared(descriptor, coordinates, full, as_box(buffer, descriptor))


@gluon.jit
def intervals(
    table,
    stride_table,
    batch,
    first_row,
    num_rows,
    num_cols,
    left,
    right,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    TABLE: gl.constexpr,
):
    """lo and hi [BLOCK]: the columns [lo, hi) that each row sees. Rows past the end may say anything."""
    row = first_row + gl.arange(0, BLOCK, layout=LAYOUT)
    if not TABLE:
        shift = num_cols - num_rows
        return row + shift - left, gl.minimum(row + shift + right + 1, num_cols)
    base = table + batch.to(gl.int64) * stride_table
    lo = gl.load(base + row, mask=row < num_rows, other=0)
    hi = gl.load(base + num_rows + row, mask=row < num_rows, other=0)
    return lo, hi


@gluon.jit
def blocks_of(
    table,
    stride_table,
    batch,
    first_row,
    num_rows,
    num_cols,
    left,
    right,
    ROWS: gl.constexpr,
    BLOCK_COLS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PADDED: gl.constexpr,
    TABLE: gl.constexpr,
):
    """begin <= full_begin <= full_end <= end of the tile of ROWS rows from first_row: blocks [begin, end) are needed,
    and in those of [full_begin, full_end) every row sees every column. ROWS need not be a power of two. With
    PADDED what lies past the last column counts as seen by all who see that one."""
    if not TABLE:
        lo_min, lo_max, hi_min, hi_max = window_bounds(first_row, ROWS, num_rows, num_cols, left, right)
    else:
        WIDE: gl.constexpr = 64 if ROWS <= 64 else (128 if ROWS <= 128 else 256)
        row = gl.arange(0, WIDE, layout=gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
        real = (row < ROWS) & (first_row + row < num_rows)
        base = table + batch.to(gl.int64) * stride_table + first_row
        lo = gl.load(base + row, mask=real, other=0)
        hi = gl.load(base + num_rows + row, mask=real, other=0)
        # A row that sees nothing asks for no block and lets no block be full; rows past the end do neither.
        sees = lo < hi
        lo_min = gl.min(gl.where(sees, lo, num_cols), 0)
        hi_max = gl.max(gl.where(sees, hi, 0), 0)
        lo_max = gl.max(gl.where(sees, lo, 0), 0)
        hi_min = gl.min(gl.where(sees, hi, gl.where(real, 0, num_cols)), 0)
    if PADDED:
        hi_min = gl.where(hi_min == num_cols, gl.cdiv(num_cols, BLOCK_COLS) * BLOCK_COLS, hi_min)
    return run_of(lo_min, lo_max, hi_min, hi_max, BLOCK_COLS)


@gluon.jit
def heaviest_first(lists, batch, head, rank, LISTS: gl.constexpr):
    """The block of rows with the rank-th longest list of this head; without lists blocks come as they are numbered."""
    if not LISTS:
        return rank
    lists_ptr, num_lists, batch_stride, head_stride = lists
    return gl.load(lists_ptr + 2 * num_lists + 1 + batch * batch_stride + head * head_stride + rank)


@gluon.jit
def places_of(lists, batch, head, block):
    """begin <= full_end <= end: in the list of this block of rows the places [begin, full_end) hold full blocks and
    [full_end, end) partial ones."""
    lists_ptr, num_lists, batch_stride, head_stride = lists
    number = lists_ptr + (batch * batch_stride + head * head_stride + block)
    return gl.load(number), gl.load(number + num_lists + 1), gl.load(number + 1)


@gluon.jit
def block_at(lists, place):
    """The number of the block at a place in a list."""
    return gl.load(lists[0] + place)
