"""What the traffic benchmark compares: whole implementations, and the plain Triton forward kernel with other tiles than
the table's, with what each takes of a multiprocessor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import Causal, lower
from flashtrain.attention.backends import interpreted, supported
from flashtrain.attention.plan import Limits
from flashtrain.attention.portable import forward, gradients
from flashtrain.attention.portable.configs import Config, Configs
from measuring import theory
from measuring.attention import Case, Implementation, Shape, build
from measuring.report import Unavailable
from measuring.traffic import BOTH


def _tile(block_m: int, block_n: int) -> Config:
    """With warps and stages that suit it; registers are limited where that lets a second program of 8 warps in."""
    wide = block_m == 128
    limit = 128 if wide and block_n <= 64 else None
    return Config(block_m, block_n, 8 if wide else 4, 3 if block_n <= 128 else 2, limit)


# Queries a tile against 64 keys, then keys a tile against 128 queries.
SWEEP = [_tile(block_m, 64) for block_m in (16, 32, 64, 128)]
SWEEP += [_tile(128, block_n) for block_n in (16, 32, 128, 256)]
TINY = [_tile(16, 16)]


@dataclasses.dataclass(frozen=True)
class Point:
    """One case: an implementation by name, or the plain Triton forward kernel with tiles of its own, on one shape."""

    implementation: str
    shape: Shape
    config: Config | None = None

    @property
    def name(self) -> str:
        return f"{self.implementation}@{self.shape.seq_len}"

    @property
    def passes(self) -> Sequence[str]:
        return BOTH if self.config is None else BOTH[:1]

    def case(self, device: torch.device, inputs: Sequence[Tensor] | None = None) -> Case:
        tile, shape = self.config, self.shape
        built = build(self.implementation, shape, device) if tile is None else tiled(tile, shape, device)
        return Case(built, *(inputs or shape.inputs(device, torch.bfloat16, seed=1)))

    def row(self, configs: Configs) -> dict[str, Any]:
        """What is known before anything has run."""
        tile = None if self.config is None else dataclasses.asdict(self.config)
        least = {name: theory.least(self.shape)[name] for name in self.passes}
        if self.config is None:
            moved = theory.of(self.implementation, self.shape, configs)
        else:
            moved = {"forward": theory.portable(self.shape, configs._replace(forward=self.config))["forward"]}
        row = {"implementation": self.implementation, "tile": tile, **dataclasses.asdict(self.shape)}
        row |= {"failed": "not run", "wrong": False, "least": least}
        return row | {"theory": None if moved is None else theory.totals(moved)}


def name_of(config: Config) -> str:
    return f"{config.block_m}x{config.block_n}"


def tiled(config: Config, shape: Shape, device: torch.device) -> Implementation:
    """`portable.forward` with tiles of `config`. The backward pass has its own tiles and is there for the check: what
    the forward pass leaves for it must be right too.

    Raises:
        Unavailable: the kernels do not run here.
    """
    problem = supported("portable", torch.empty(1, 1, 1, shape.head_dim, device=device, dtype=torch.bfloat16))
    if problem is not None:
        raise Unavailable(problem)
    plan = lower(Causal() if shape.causal else None, shape.batch, shape.seq_len, shape.seq_len, device)
    return Implementation(name_of(config), functools.partial(_call, plan.limits, config))


def _call(limits: Limits, config: Config, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Tiled.apply(q, k, v, limits, config)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, limits: Limits, config: Config) -> Tensor:
        ctx.scale, ctx.limits = q.shape[3] ** -0.5, limits
        out, lse = forward(q, k, v, limits, ctx.scale, config)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return *gradients(dout[0], q, k, v, out, lse, None, ctx.limits, ctx.scale, True), None, None


@functools.cache
def resources(config: Config, capability: int, head_dim: int) -> dict[str, int] | None:
    """Registers and bytes spilled a thread, bytes of shared memory a program, and how many programs a multiprocessor
    has room for, of the kernel compiled in bfloat16 for `capability` (90 for 9.0). None in Triton's interpreter."""
    if interpreted():
        return None
    from flashtrain.attention.portable.offline import SHARED_LIMIT, compile_kernel

    taken = compile_kernel("forward", capability, head_dim, torch.bfloat16, config)
    threads, reserved = 32 * config.num_warps, 1024  # the driver keeps a KiB of shared memory for each program
    registers = -(-taken.registers // 8) * 8
    by_shared = (SHARED_LIMIT[capability] + reserved) // (taken.shared_bytes + reserved)
    return {
        "registers": taken.registers,
        "spilled_bytes": taken.spilled_bytes,
        "shared_bytes": taken.shared_bytes,
        "programs": min(65_536 // (registers * threads), 2048 // threads, by_shared),
    }
