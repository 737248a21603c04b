"""How tensors of the Hopper kernels lie in memory: strides, poison, results beyond 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, attention
from tests.attention.hopper_cases import BF16, ON_HOPPER, hopper
from tests.attention.oracle import Case, assert_accurate, make_case
from tests.attention.test_on_gpu import needs_memory

pytestmark = ON_HOPPER


def as_lying(case: Case) -> dict[str, Case]:
    """The same numbers lying differently in memory."""
    tensors = [*case.inputs(), case.dout]
    batch, dim = case.q.shape[0], case.q.shape[3]

    def fused(x: Tensor, at: int) -> Tensor:  # what a GPT's one projection gives
        wide = torch.full((batch, x.shape[2], 3, x.shape[1], dim), float("nan"), device=x.device, dtype=x.dtype)
        view = wide[:, :, at].transpose(1, 2)
        return view.copy_(x)

    def misaligned(x: Tensor) -> Tensor:
        flat = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)
        return flat[1:].view(x.shape).copy_(x)

    def poisoned(x: Tensor) -> Tensor:
        size = (batch + 1, x.shape[1] + 1, x.shape[2] + 150, dim + 8)
        big = torch.full(size, float("nan"), device=x.device, dtype=x.dtype)
        return big[:batch, : x.shape[1], : x.shape[2], :dim].copy_(x)

    changed = {
        "fused": [fused(x, i % 3) for i, x in enumerate(tensors)],
        "misaligned": [misaligned(x) for x in tensors],
        "poisoned": [poisoned(x) for x in tensors],
        "columns": [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors],
        "expanded": [*tensors[:3], torch.ones((), device=case.q.device, dtype=case.q.dtype).expand_as(case.dout)],
    }
    return {name: Case(*four, case.dlse, case.scale, case.plan) for name, four in changed.items()}


@pytest.mark.parametrize("head_dim", [64, 128, 96, 256])
@pytest.mark.parametrize("which", ["fused", "misaligned", "poisoned", "columns", "expanded"])
def test_any_strides_give_the_same_forward_bits_and_right_gradients(device, which, head_dim):
    case = make_case(device, BF16, Causal(), batch=2, heads=(4, 2), seq=(333, 457), head_dim=head_dim)
    variant = as_lying(case)[which]
    base, results = hopper(case), hopper(variant)
    assert torch.equal(results["out"], base["out"]) and torch.equal(results["lse"], base["lse"])
    assert_accurate(variant, "hopper", results)


@pytest.mark.parametrize("head_dim", [64, 128, 96, 256, 200])
@pytest.mark.parametrize("seq", [(703, 703), (300, 2048), (2048, 300)], ids=str)
def test_every_element_of_every_result_is_written(device, seq, head_dim, monkeypatch):
    """Uninitialised memory holds NaN here, and what is left unwritten would show it."""
    case = make_case(device, BF16, Causal(), heads=(4, 2), seq=seq, head_dim=head_dim)
    empty_like, new_empty = torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    results = hopper(case)
    assert all(torch.isfinite(results[name]).all() for name in ("out", "dq", "dk", "dv"))
    assert not torch.isnan(results["lse"]).any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_beyond_32_bits_the_last_of_a_batch_and_the_last_rows_are_right(device, head_dim):
    needs_memory(60)
    shape = (2**31 // (16 * 512 * head_dim) + 1, 16, 512, head_dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=BF16) for _ in range(4))

    def grads(*tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = attention(*leaves, Causal(), backend="hopper", deterministic=False)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    many = [x[-1:].clone() for x in grads(q, k, v, dout)]
    alone = grads(*(x[-1:] for x in (q, k, v, dout)))
    assert torch.equal(many[0], alone[0])
    for a, b in zip(many[1:], alone[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)
