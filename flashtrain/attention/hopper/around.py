"""What runs before and after the backward kernel, in plain Triton: delta, the rows' statistics, and dq in its own order
and dtype. All of it is bound by memory.

Tensors of the inputs' dtype are those that TMA can address: neighbours along head_dim, rows aligned to 16 bytes.
HEAD_DIM is the width of a tile and COLUMNS the head dim, a multiple of 8.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_at(
    ptr, batch_head, num_heads, row, seq_q, first, stride_batch, stride_head, stride_row,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pointers to rows of one head and to columns [first, first + WIDTH) of a tile, and which of them there are."""
    base = ptr + batch_head // num_heads * stride_batch + batch_head % num_heads * stride_head
    column = first + tl.arange(0, WIDTH)
    ptrs = base + row.to(tl.int64)[:, None] * stride_row + column[None, :]
    inside = (row < seq_q)[:, None]
    if COLUMNS < HEAD_DIM:  # with 192 columns a whole part of 64 lies past them
        inside = inside & (column < COLUMNS)[None, :]
    return tl.multiple_of(ptrs, (1, 16)), inside


@triton.jit
def _delta_of(
    out_ptr, dout_ptr, head, num_heads, row, seq_q, out_batch, out_head, out_row, dout_batch, dout_head, dout_row,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """rowsum(out * dout) of some rows of one head; zero past the end."""
    out_ptrs, inside = _rows_at(
        out_ptr, head, num_heads, row, seq_q, 0, out_batch, out_head, out_row, HEAD_DIM, HEAD_DIM, COLUMNS
    )
    dout_ptrs, inside = _rows_at(
        dout_ptr, head, num_heads, row, seq_q, 0, dout_batch, dout_head, dout_row, HEAD_DIM, HEAD_DIM, COLUMNS
    )
    out, dout = tl.load(out_ptrs, inside, other=0.0), tl.load(dout_ptrs, inside, other=0.0)
    return tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)


@triton.jit(do_not_specialize=["num_heads", "seq_q"])
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, out_batch, out_head, out_row, dout_batch, dout_head, dout_row, num_heads, seq_q,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout), float32 [batch * num_heads, seq_q]."""
    num_blocks = tl.cdiv(seq_q, ROWS)
    head = (tl.program_id(0) // num_blocks).to(tl.int64)
    row = tl.program_id(0) % num_blocks * ROWS + tl.arange(0, ROWS)
    delta = _delta_of(
        out_ptr, dout_ptr, head, num_heads, row, seq_q, out_batch, out_head, out_row, dout_batch, dout_head, dout_row,
        HEAD_DIM, COLUMNS,
    )  # fmt: skip
    tl.store(delta_ptr + head * seq_q + row, delta, mask=row < seq_q)


@triton.jit(do_not_specialize=["lse_ptr", "delta_ptr", "num_heads", "seq_q", "padded", "all_rows"])
def prepare_kernel(
    lse_ptr, delta_ptr, out_ptr, dout_ptr, statistics_ptr, dq_ptr, turns_ptr,
    out_batch, out_head, out_row, dout_batch, dout_head, dout_row, num_heads, seq_q, padded, all_rows,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """lse in base 2 and delta, float32 [2, all_rows], padded so that rows past the end get no weight; dq and with
    ORDERED the turns, both of all rows, set to zero. GIVEN: delta is there, and out is not looked at."""
    # From the end, where the L2 cache still holds what the forward pass has written last, to the beginning, where the
    # backward pass finds it there.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    num_blocks = padded // ROWS
    first = program.to(tl.int64) * ROWS
    head = (program // num_blocks).to(tl.int64)
    row = program % num_blocks * ROWS + tl.arange(0, ROWS)
    real = row < seq_q
    lse = tl.load(lse_ptr + head * seq_q + row, mask=real, other=float("inf"))
    if GIVEN:
        delta = tl.load(delta_ptr + head * seq_q + row, mask=real, other=0.0)
    else:
        delta = _delta_of(
            out_ptr, dout_ptr, head, num_heads, row, seq_q, out_batch, out_head, out_row,
            dout_batch, dout_head, dout_row, HEAD_DIM, COLUMNS,
        )  # fmt: skip
    padded_row = first + tl.arange(0, ROWS)
    tl.store(statistics_ptr + padded_row, lse * 1.4426950408889634)
    tl.store(statistics_ptr + all_rows + padded_row, delta)
    tl.store(dq_ptr + first * HEAD_DIM + tl.arange(0, ROWS * HEAD_DIM), tl.zeros((ROWS * HEAD_DIM,), tl.float32))
    if ORDERED:
        TURNS: tl.constexpr = ROWS * HEAD_DIM // 8192  # a tile has two regions
        turns_ptr += program * TURNS
        tl.store(turns_ptr + tl.arange(0, TURNS), tl.zeros((TURNS,), tl.int32))


@triton.jit(do_not_specialize=["num_heads", "seq_q", "padded"])
def finish_kernel(
    sum_ptr, dq_ptr, dq_batch, dq_head, dq_row, num_heads, seq_q, padded, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq = scale * the sum, from one region of 64 queries and 64 columns as the backward kernel's threads hold it."""
    PARTS: tl.constexpr = HEAD_DIM // 64
    regions = padded // 64 * PARTS
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was added last lies in the L2 cache
    head = (program // regions).to(tl.int64)
    region = program % regions
    held = tl.load(sum_ptr + program.to(tl.int64) * 4096 + tl.arange(0, 4096))
    # Eight columns, warp, row and pair of columns in a warp, lower or upper eight rows, left or right of a pair.
    total = held.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
    row = region // PARTS * 64 + tl.arange(0, 64)
    first = region % PARTS * 64
    ptrs, inside = _rows_at(
        dq_ptr, head, num_heads, row, seq_q, first, dq_batch, dq_head, dq_row, 64, HEAD_DIM, COLUMNS
    )  # fmt: skip
    tl.store(ptrs, (total * scale).to(dq_ptr.dtype.element_ty), mask=inside)
