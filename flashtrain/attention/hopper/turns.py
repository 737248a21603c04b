"""Programs that add to one place in an order: each waits for the one before it, which makes a float sum the same bit
for bit from run to run, as the deterministic mode of FlashAttention's own kernels does.

A turn is an int32 in global memory: the number of the program that has added last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def peek_turn(turn_ptr):
    """The turn as it is now. Read early, it has come when it is needed, and seldom has to be waited for."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [turn_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_turn(turn_ptr, number):
    """Wait until the program `number` has added. What follows must only add: nothing else is ordered behind this."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred waiting;
        .reg .b32 seen;
        AGAIN: ld.relaxed.gpu.global.b32 seen, [$1];
        setp.ne.b32 waiting, seen, $2;
        @waiting bra AGAIN;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [turn_ptr, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(turn_ptr, number):
    """Say that this program has added, after a barrier of all threads that did.

    One thread of each warp says so. Numbers only grow: a thread that is held up must not take the turn back from a
    program that is further on.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.max.s32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [turn_ptr, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
