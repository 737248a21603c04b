"""What a launch needs beside tensors, worked out once for each kind of call."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from flashtrain.attention.hopper.configs import (
    BackwardConfig,
    ForwardConfig,
    backward_config,
    forward_config,
    tile_width,
)
from flashtrain.attention.hopper.launch import Setup, strides_fit
from flashtrain.attention.lists import list_strides
from flashtrain.attention.plan import OPEN
from flashtrain.attention.portable.launch import heads_together

LOG2_E = math.log2(math.e)
# Statistics and the sum of dq are padded to whole tiles of queries of any size up to this.
ROWS = 128
REGION = 4096  # numbers in a region of the sum of dq
_Shape = tuple[int, ...]


@functools.lru_cache(maxsize=256)
def forward_setup(
    q_shape: _Shape,
    k_shape: _Shape,
    strides: tuple[_Shape, ...],
    table: bool,
    table_stride: int,
    left: int,
    right: int,
    blocks: tuple[int, ...],
    row_blocks: int,
    scale_log2: float,
    config: ForwardConfig | None,
) -> Setup | None:
    """None where TMA cannot address the tensors.

    strides: those of q, k, v and out. table_stride: from one batch row of documents to the next. row_blocks: blocks in
    the average row of a block layout, 0 without one. scale_log2: the factor on the scores, in base 2.
    """
    if not _fit((q_shape, k_shape, k_shape, q_shape), strides):
        return None
    batch, num_heads, seq_q, head_dim = q_shape
    num_kv_heads, seq_k = k_shape[1], k_shape[2]
    full = not table and not blocks and left == OPEN and right == OPEN
    config = config or forward_config(head_dim, seq_k, full, table, blocks, row_blocks)
    all_heads = batch * num_heads
    # Half of the L2 cache where the portable kernels stream a quarter: 2 to 3 % at 16k.
    together = 1 if full else heads_together(k_shape, 2, all_heads, share=2)
    constants = {
        "CONSUMERS": config.consumers,
        "BLOCK_N": config.block_n,
        "HEAD_DIM": tile_width(head_dim),
        "STAGES": config.stages,
        "LOWER": table or left < OPEN,
        "LATER": bool(blocks) or table or left < OPEN or not _one_partial(right, seq_k - seq_q, config),
        "TABLE": table,
        "LIST_M": blocks[0] if blocks else 0,
        "LIST_N": blocks[1] if blocks else 0,
    }
    numbers = (
        table_stride,
        *list_strides(blocks, seq_q, 0),
        all_heads,
        num_heads,
        num_heads // num_kv_heads,
        together,
        seq_q,
        seq_k,
        left,
        right,
        scale_log2,
    )
    queries, keys = (1, 1, 64, tile_width(head_dim)), (1, 1, config.block_n, tile_width(head_dim))
    boxes = (queries, keys, keys, queries)
    block_m = max(config.block_m, blocks[0]) if blocks else config.block_m
    programs = all_heads * -(-seq_q // block_m) * (block_m // config.block_m)
    return Setup(programs, boxes, numbers, constants, config.max_registers)


def _fit(shapes: tuple[_Shape, ...], strides: tuple[_Shape, ...]) -> bool:
    return all(strides_fit(shape, stride) for shape, stride in zip(shapes, strides, strict=True))


def _one_partial(right: int, shift: int, config: ForwardConfig) -> bool:
    """Whether no block but the rightmost of a tile of queries can hold something invisible, as far as `right` goes."""
    if right == OPEN:
        return True
    return config.block_n % config.block_m == 0 and (shift + right) % config.block_m == 0


@functools.lru_cache(maxsize=256)
def delta_setup(shape: _Shape, out_stride: _Shape, dout_stride: _Shape) -> Setup:
    batch, num_heads, seq_q, head_dim = shape
    numbers = (*out_stride[:3], *dout_stride[:3], num_heads, seq_q)
    rows = _rows(head_dim)
    constants = {"HEAD_DIM": tile_width(head_dim), "COLUMNS": head_dim, "ROWS": rows}
    return Setup(batch * num_heads * -(-seq_q // rows), (), numbers, constants)


def _rows(head_dim: int) -> int:
    """Rows of out and dout that a program multiplies: no more than its registers hold, and a part of ROWS."""
    return ROWS if tile_width(head_dim) <= 128 else ROWS // 2


class BackwardSetups(NamedTuple):
    """The three launches of a backward pass, and how much room they need.

    Attributes:
        parts: 32-bit numbers of lse and of delta (rows of all heads, each padded to whole tiles), of the sum of dq, and
            of turns (tiles of queries of all heads).
        room: their sum.
        wide: whether the kernel is that for wide tiles.
    """

    parts: tuple[int, int, int, int]
    room: int
    wide: bool
    prepare: Setup
    backward: Setup
    finish: Setup


@functools.lru_cache(maxsize=256)
def backward_setups(
    q_shape: _Shape,
    k_shape: _Shape,
    strides: tuple[_Shape, ...],
    given: bool,
    table: bool,
    table_stride: int,
    left: int,
    right: int,
    blocks: tuple[int, ...],
    scale: float,
    sign: float,
    deterministic: bool,
    config: BackwardConfig | None,
) -> BackwardSetups | None:
    """None where TMA cannot address the tensors.

    strides: those of dq, dk, dv, out, dout, q, k and v. given: delta is there, and out is not. scale: the factor on the
    scores. sign: a factor on dq alone.
    """
    if not _fit((q_shape, k_shape, k_shape, q_shape, q_shape, q_shape, k_shape, k_shape), strides):
        return None
    batch, num_heads, seq_q, head_dim = q_shape
    num_kv_heads, seq_k = k_shape[1], k_shape[2]
    width = tile_width(head_dim)
    config = config or backward_config(head_dim, blocks)
    all_heads, all_kv_heads = batch * num_heads, batch * num_kv_heads
    padded = -(-seq_q // ROWS) * ROWS
    rows = all_heads * padded
    regions = rows * width // REGION
    full = not table and not blocks and left == OPEN and right == OPEN
    # In order, programs of one head wait for each other unless those of others come between them.
    together = 1 if full and not deterministic else heads_together(q_shape, 2, all_kv_heads)
    constants = {
        "CONSUMERS": config.consumers,
        "GROUP": num_heads // num_kv_heads,
        "AFTER": table or right < OPEN,
        "BEFORE": table or left < OPEN,
        "EDGE": seq_k % config.block_n != 0,
        "TABLE": table,
        "BLOCK_M": config.block_m,
        "HEAD_DIM": width,
        "COLUMNS": head_dim,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "ORDERED": deterministic,
        "LIST_M": blocks[0] if blocks else 0,
    }
    numbers = (
        table_stride,
        *list_strides(blocks, seq_k, 1),
        *strides[1][:3],
        *strides[2][:3],
        padded,
        all_kv_heads,
        num_kv_heads,
        together,
        seq_q,
        seq_k,
        left,
        right,
        scale,
        scale * LOG2_E,
    )
    queries, keys = (1, 1, config.block_m, width), (1, 1, config.block_n, width)
    around = {"HEAD_DIM": width, "COLUMNS": head_dim}
    parts = (rows, rows, regions * REGION, rows // config.block_m)
    return BackwardSetups(
        parts=parts,
        room=sum(parts),
        wide=config.wide,
        prepare=Setup(
            rows // _rows(head_dim),
            (),
            (*strides[3][:3], *strides[4][:3], num_heads, seq_q, padded, rows),
            {**around, "ROWS": _rows(head_dim), "ORDERED": deterministic, "GIVEN": given},
        ),
        backward=Setup(
            all_kv_heads * -(-seq_k // config.block_n),
            (queries, keys, keys, queries),
            numbers,
            constants,
            config.max_registers,
        ),
        finish=Setup(regions, (), (*strides[0][:3], num_heads, seq_q, padded, scale * sign), around),
    )
