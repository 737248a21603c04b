"""What a launch needs beside tensors, worked out once for each kind of call."""

from __future__ import annotations

import functools
from typing import NamedTuple

from flashtrain.attention.hopper.configs import BACKWARD, BackwardConfig, ForwardConfig, forward_config
from flashtrain.attention.hopper.launch import Setup
from flashtrain.attention.lists import list_strides
from flashtrain.attention.plan import OPEN
from flashtrain.attention.portable.launch import heads_together

BLOCK_N = 128  # keys a program of the backward kernel
# Statistics and the sum of dq are padded to whole tiles of queries of any size up to this.
ROWS = 128
REGION = 4096  # numbers in a region of the sum of dq
_Shape = tuple[int, ...]


@functools.lru_cache(maxsize=256)
def forward_setup(
    q_shape: _Shape,
    k_shape: _Shape,
    table: bool,
    left: int,
    right: int,
    blocks: tuple[int, ...],
    config: ForwardConfig | None,
) -> tuple[ForwardConfig, Setup]:
    batch, num_heads, seq_q, head_dim = q_shape
    num_kv_heads, seq_k = k_shape[1], k_shape[2]
    full = not table and not blocks and left == OPEN and right == OPEN
    config = config or forward_config(head_dim, seq_k, full, table, bool(blocks))
    all_heads = batch * num_heads
    # Half of the L2 cache where the portable kernels stream a quarter: 2 to 3 % at 16k.
    together = 1 if full else heads_together(k_shape, 2, all_heads, share=2)
    constants = {
        "CONSUMERS": config.consumers,
        "BLOCK_N": config.block_n,
        "HEAD_DIM": head_dim,
        "STAGES": config.stages,
        "LOWER": table or left < OPEN,
        "LATER": bool(blocks) or table or left < OPEN or not _one_partial(right, seq_k - seq_q, config),
        "TABLE": table,
        "LISTS": bool(blocks),
    }
    numbers = (
        *list_strides(blocks, seq_q, 0),
        all_heads,
        num_heads,
        num_heads // num_kv_heads,
        together,
        seq_q,
        seq_k,
        left,
        right,
    )
    return config, Setup(all_heads * -(-seq_q // config.block_m), numbers, constants, config.max_registers)


def _one_partial(right: int, shift: int, config: ForwardConfig) -> bool:
    """Whether no block but the rightmost of a tile of queries can hold something invisible, as far as `right` goes."""
    if right == OPEN:
        return True
    return config.block_n % config.block_m == 0 and (shift + right) % config.block_m == 0


@functools.lru_cache(maxsize=256)
def delta_setup(shape: _Shape, out_stride: _Shape, dout_stride: _Shape) -> Setup:
    batch, num_heads, seq_q, head_dim = shape
    numbers = (*out_stride[:3], *dout_stride[:3], num_heads, seq_q)
    return Setup(batch * num_heads * -(-seq_q // ROWS), numbers, {"HEAD_DIM": head_dim, "ROWS": ROWS})


class BackwardSetups(NamedTuple):
    """The three launches of a backward pass, and how much room they need.

    Attributes:
        block_m: queries a tile.
        rows: of all heads, each padded to whole tiles.
        turns: tiles of queries of all heads.
    """

    block_m: int
    rows: int
    turns: int
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
    left: int,
    right: int,
    blocks: tuple[int, ...],
    deterministic: bool,
    config: BackwardConfig | None,
) -> BackwardSetups:
    """strides: those of dq, dk, dv, out and dout, without that of head_dim, which is one. given: delta is there, and
    out is not."""
    batch, num_heads, seq_q, head_dim = q_shape
    num_kv_heads, seq_k = k_shape[1], k_shape[2]
    config = config or BACKWARD[head_dim]
    all_heads, all_kv_heads = batch * num_heads, batch * num_kv_heads
    padded = -(-seq_q // ROWS) * ROWS
    rows = all_heads * padded
    regions = rows * head_dim // REGION
    full = not table and not blocks and left == OPEN and right == OPEN
    # In order, programs of one head wait for each other unless those of many others come between them.
    if deterministic:
        together = heads_together(q_shape, 2, all_kv_heads, share=4)
    else:
        together = 1 if full else heads_together(q_shape, 2, all_kv_heads)
    constants = {
        "GROUP": num_heads // num_kv_heads,
        "AFTER": table or right < OPEN,
        "BEFORE": table or left < OPEN,
        "TABLE": table,
        "BLOCK_M": config.block_m,
        "HEAD_DIM": head_dim,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "ORDERED": deterministic,
        "LISTS": bool(blocks),
    }
    lists = list_strides(blocks, seq_k, 1)
    numbers = (
        *lists,
        *strides[1],
        *strides[2],
        padded,
        all_kv_heads,
        num_kv_heads,
        together,
        seq_q,
        seq_k,
        left,
        right,
    )
    ends = {"HEAD_DIM": head_dim, "ROWS": ROWS}
    return BackwardSetups(
        block_m=config.block_m,
        rows=rows,
        turns=rows // config.block_m,
        prepare=Setup(
            rows // ROWS,
            (*strides[3], *strides[4], num_heads, seq_q, padded, rows),
            {**ends, "ORDERED": deterministic, "GIVEN": given},
        ),
        backward=Setup(all_kv_heads * -(-seq_k // BLOCK_N), numbers, constants),
        finish=Setup(regions, (*strides[0], num_heads, seq_q, padded), {"HEAD_DIM": head_dim}),
    )
