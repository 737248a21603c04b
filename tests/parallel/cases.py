"""Attention calls that are computed whole in one place and by shards in several."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from flashtrain.attention import BlockLayout, Causal, Documents, Mask, SlidingWindow, attention, layouts
from flashtrain.attention.block_layout import per_head
from flashtrain.parallel import ContextParallel, ring, shard, unshard
from flashtrain.parallel.plan import _steps, lower_ring

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One call; `mask` names one of `MASKS`. heads: query heads, key heads."""

    mask: str
    method: str = "ring"
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (4, 4)
    batch: int = 2
    head_dim: int = 8
    backend: str = "standard"
    wrapped: str = ""  # "checkpoint": computed again in the backward pass; "compile"; "autocast"

    @property
    def seq_len(self) -> int:
        return 512 if "layout" in self.mask else 96

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, dout of the whole sequence."""
        generator = torch.Generator().manual_seed(3)
        q_heads, kv_heads = self.heads
        return tuple(
            torch.randn(self.batch, n, self.seq_len, self.head_dim, generator=generator, dtype=torch.float64).to(
                self.dtype
            )
            for n in (q_heads, kv_heads, kv_heads, q_heads)
        )

    def whole(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv, in float64 by the definition."""
        exact = replace(self, dtype=torch.float64)
        q, k, v, dout = (x.double() for x in self.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, exact.mask_of(), backend="standard")
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def mask_of(self) -> Mask | None:
        return (MASKS | REFUSED)[self.mask](self.heads[0])


def _local(heads: int) -> BlockLayout:
    return layouts.local_global(512, block=64, window=1)


def _by_head(heads: int) -> BlockLayout:
    return per_head([layouts.dilated(512, 64, window=head % 3, dilation=2) for head in range(heads)])


_CROSSING = Documents(((7, 50, 0, 39), (96,)))  # over the borders of chunks of 12 and 24
MASKS: dict[str, Callable[[int], Mask | None]] = {
    "full": lambda heads: None,
    "causal": lambda heads: Causal(),
    "narrow window": lambda heads: Causal() & SlidingWindow(5),
    "wide window": lambda heads: Causal() & SlidingWindow(60),
    "two-sided window": lambda heads: SlidingWindow(20, 3),
    "documents": lambda heads: _CROSSING,
    "one packing for all rows": lambda heads: Documents(((5, 6, 60, 25),)) & Causal(),
    "causal documents": lambda heads: Causal() & _CROSSING,
    "window in documents": lambda heads: Causal() & SlidingWindow(9) & _CROSSING,
    "blind rows": lambda heads: Causal() & Documents(((40, 56), (96, 0)), ((10, 86), (0, 96))),
    "layout": _local,
    "causal layout": lambda heads: Causal() & _local(heads),
    "layout by head": lambda heads: Causal() & _by_head(heads),
    "layout in documents": lambda heads: Causal() & _local(heads) & Documents(((100, 412), (512,))),
}

REFUSED: dict[str, Callable[[int], Mask | None]] = {
    "576 tokens": lambda heads: layouts.local_global(576, block=64),
}


def attend(
    rank: int,
    size: int,
    case: Case,
    context: Callable[..., Any] = noop_context_fn,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one rank's shard; rank and size are those of the group."""
    parallel = ContextParallel(group or dist.group.WORLD, case.method, case.backend)
    plan = parallel.lower(case.mask_of(), case.batch, case.seq_len, "cpu")
    *inputs, dout = (shard(x, rank, size, dim=2) for x in case.inputs())
    leaves = [x.requires_grad_() for x in inputs]
    call: Any = parallel
    if case.wrapped == "compile":
        call = torch.compile(parallel.__call__, fullgraph=True, dynamic=False, backend="aot_eager")
    if case.wrapped == "checkpoint":
        out = checkpoint(call, *leaves, plan, use_reentrant=False, context_fn=context)
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.wrapped == "autocast"):
            out = call(*leaves, plan)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def attend_in_pairs(rank: int, size: int, cases: tuple[Case, ...]) -> tuple[Tensor, ...]:
    """`attend` of two neighbours each, who have a case of their own."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    return attend(rank % 2, 2, cases[rank // 2], group=pairs[rank // 2])


def recompilations(rank: int, size: int, method: str) -> int:
    """Graphs that are made for one call with plans of three packings, one after another."""
    case = Case("causal documents", method)
    parallel = ContextParallel(dist.group.WORLD, method, "standard")
    inputs = [shard(x, rank, size, dim=2) for x in case.inputs()[:3]]
    counter = torch._dynamo.testing.CompileCounter()
    call = torch.compile(parallel.__call__, fullgraph=True, dynamic=False, backend=counter)
    for lengths in ((50, 46), (13, 80, 3), (96,)):
        plan = parallel.lower(Causal() & Documents((lengths,)), case.batch, case.seq_len, "cpu")
        assert torch.equal(call(*inputs, plan), parallel(*inputs, plan))
    return counter.frame_count


def backward_without_plan(rank: int, size: int, wrapped: str) -> tuple[Tensor, ...]:
    """out, dq, dk, dv where nobody holds the plan any more when the backward pass begins."""
    case = Case("causal documents")
    parallel = ContextParallel(dist.group.WORLD, "ring", "standard")
    call: Any = torch.compile(parallel.__call__, fullgraph=True, backend="aot_eager") if wrapped else parallel
    *inputs, dout = (shard(x, rank, size, dim=2) for x in case.inputs())
    leaves = [x.requires_grad_() for x in inputs]
    out = call(*leaves, parallel.lower(case.mask_of(), case.batch, case.seq_len, "cpu"))
    lower_ring.cache_clear()
    gc.collect()
    grads = torch.autograd.grad(out, leaves, dout)
    result = out.detach(), *grads
    if not wrapped:
        del out
        gc.collect()
        assert not _steps, "steps are kept that nobody can ask for"
    return result


def forward_passes(rank: int, size: int) -> int:
    """How often the ring goes forward where checkpointing keeps its results."""
    calls = []
    forward = ring.forward

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        return forward(*arguments)

    ring.forward = counted
    try:
        kept = [torch.ops.flashtrain.ring_forward.default]
        attend(rank, size, Case("causal", wrapped="checkpoint"), partial(create_selective_checkpoint_contexts, kept))
    finally:
        ring.forward = forward
    return len(calls)


def error_of(rank: int, size: int, case: Case, seq_len: int) -> str:
    """The message that a sequence of that length is refused with, "" if it is not."""
    parallel = ContextParallel(dist.group.WORLD, case.method, case.backend)
    mask = case.mask_of()
    try:
        plan = parallel.lower(mask, case.batch, seq_len, "cpu")
        parallel(*(shard(x, rank, size, dim=2) for x in case.inputs()[:3]), plan)
    except ValueError as error:
        return str(error)
    return ""


def joined(results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence from those of all ranks."""
    return [unshard(parts, dim=2) for parts in zip(*results, strict=True)]


def require_close(found: list[Tensor], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    for name, ours, truth in zip(NAMES, found, wanted, strict=True):
        error = (ours.double() - truth).abs().max().item()
        assert error <= tolerance * max(1.0, truth.abs().max().item()), f"{name} is off by {error:.3g}"
