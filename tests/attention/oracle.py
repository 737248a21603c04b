"""What tests hold attention against: float64 standard attention, and what plain PyTorch makes of the same inputs.

The rule, as in FlashAttention's own tests: the largest error against float64 is at most twice that of plain PyTorch in
the same dtype, and so is the root mean square error, which a bias cannot hide from. Plain PyTorch is sometimes exact by
luck, so both have a small floor at the rounding step of the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain.attention import Mask, Plan, attention, lower, standard_attention

NAMES = ("out", "lse", "dq", "dk", "dv")
# The rounding step of each dtype, and what float32 sums of numbers near 1 may be off.
STEP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUM = 2.0**-18


@dataclass
class Case:
    """Inputs of one attention call and the gradients that come back to it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    scale: float
    plan: Plan

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def make_case(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    mask: Mask | None = None,
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    seq: tuple[int, int] = (65, 65),
    head_dim: int = 64,
    seed: int = 0,
    scale: float | None = None,
) -> Case:
    """Random inputs; heads are (query, key) heads and seq the numbers of (queries, keys)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return Case(
        q=randn(batch, heads[0], seq[0], head_dim),
        k=randn(batch, heads[1], seq[1], head_dim),
        v=randn(batch, heads[1], seq[1], head_dim),
        dout=randn(batch, heads[0], seq[0], head_dim),
        dlse=randn(batch, heads[0], seq[0], dtype=torch.float32),
        scale=head_dim**-0.5 if scale is None else scale,
        plan=lower(mask, batch, seq[0], seq[1], device),
    )


def run(case: Case, backend: str = "portable") -> dict[str, Tensor]:
    """out, lse and the gradients through the public function; no lse from `sdpa`, which has none."""
    leaves = [tensor.detach().requires_grad_() for tensor in case.inputs()]
    if backend == "sdpa":
        out = attention(*leaves, case.plan, scale=case.scale, backend=backend)
        results, grads_in = [out], [case.dout]
    else:
        out, lse = attention(*leaves, case.plan, scale=case.scale, backend=backend, return_lse=True)
        results, grads_in = [out, lse], [case.dout, _seen(lse, case.dlse)]
    grads = torch.autograd.grad(results, leaves, grads_in)
    names = ("out", "dq", "dk", "dv") if backend == "sdpa" else NAMES
    return dict(zip(names, [*(r.detach() for r in results), *grads], strict=True))


def run_standard(case: Case, dtype: torch.dtype, with_lse: bool = True) -> dict[str, Tensor]:
    """The same by standard attention in `dtype`."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in case.inputs()]
    out, lse = standard_attention(*leaves, case.plan, case.scale)
    grads_in = [case.dout.to(dtype), _seen(lse, case.dlse).to(lse.dtype) * with_lse]
    grads = torch.autograd.grad([out, lse], leaves, grads_in)
    return dict(zip(NAMES, [out.detach(), lse.detach(), *grads], strict=True))


def assert_accurate(case: Case, backend: str = "portable", ours: dict[str, Tensor] | None = None) -> None:
    """The rule at the top of this file, for every result."""
    dtype, with_lse = case.q.dtype, backend != "sdpa"
    ours = run(case, backend) if ours is None else ours
    truth = run_standard(case, torch.float64, with_lse)
    plain = run_standard(case, dtype, with_lse)
    for name, result in ours.items():
        assert result.shape == truth[name].shape, f"{name}: {result.shape}"
        if name == "lse":
            assert_lse(result, truth[name], dtype, backend)
        else:
            assert result.dtype == dtype, f"{name}: {result.dtype}"
            assert_close(name, result, plain[name], truth[name])


def assert_close(name: str, ours: Tensor, plain: Tensor, truth: Tensor) -> None:
    dtype = ours.dtype
    ours, plain = ours.double(), plain.double()
    assert torch.isfinite(truth).all(), f"{name}: the reference itself is not finite"
    assert torch.isfinite(ours).all(), f"{name} is not finite"
    if truth.numel() == 0:
        return
    floor = STEP[dtype] if dtype != torch.float32 else SUM
    error = (ours - truth).abs().max()
    allowed = 2 * (plain - truth).abs().max() + floor * truth.abs().max().clamp_min(1.0)
    assert error <= allowed, f"{name}: largest error {error:.3g}, allowed {allowed:.3g}"
    error, allowed = _rms(ours - truth), 2 * _rms(plain - truth) + STEP[dtype] * _rms(truth) + SUM / 4
    assert error <= allowed, f"{name}: root mean square error {error:.3g}, allowed {allowed:.3g}"


def assert_lse(ours: Tensor, truth: Tensor, dtype: torch.dtype, backend: str = "portable") -> None:
    """lse is float32 whatever the inputs are, and -inf exactly where a query sees nothing."""
    assert ours.dtype == torch.float32
    assert torch.equal(torch.isneginf(ours), torch.isneginf(truth)), "lse is -inf in other rows"
    seen = ~torch.isneginf(truth)
    error = (ours.double() - truth)[seen].abs()
    step = STEP[dtype] if backend == "standard" else STEP[torch.float32]
    assert (error <= 16 * step * truth[seen].abs().clamp_min(1.0)).all(), f"lse: largest error {error.max():.3g}"


def _seen(lse: Tensor, dlse: Tensor) -> Tensor:
    """A loss on lse leaves out the rows that see nothing: their lse is -inf."""
    return dlse.masked_fill(torch.isneginf(lse.detach()), 0.0)


def _rms(error: Tensor) -> Tensor:
    return error.pow(2).mean().sqrt()
