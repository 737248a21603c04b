"""Which bits of the Hopper kernels are the same every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, attention, layouts
from tests.attention.hopper_cases import BF16, MASKS, ON_HOPPER, hopper
from tests.attention.oracle import make_case

pytestmark = ON_HOPPER


@pytest.mark.parametrize("name", ["causal", "window", "documents", "full", "layout"])
@pytest.mark.parametrize("head_dim", [64, 128, 96])
def test_a_deterministic_pass_gives_the_same_bits_250_times(device, name, head_dim):
    mask = layouts.butterfly(703) if name == "layout" else MASKS[name]
    case = make_case(device, BF16, mask, batch=2, heads=(8, 2), seq=(703, 703), head_dim=head_dim)

    def once() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in case.inputs()]
        out = attention(*leaves, case.plan, backend="hopper", deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, case.dout)]

    first = once()
    assert all(torch.equal(a, b) for _ in range(249) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_deterministic_pass_of_many_programs_is_right(device, mask, head_dim):
    """Many more programs than multiprocessors, each waiting for another."""
    case = make_case(device, BF16, mask, batch=8, heads=(16, 16), seq=(1024, 1024), head_dim=head_dim)
    leaves = [x.detach().requires_grad_() for x in case.inputs()]
    out = attention(*leaves, case.plan, backend="hopper", deterministic=True)
    first = torch.autograd.grad(out, leaves, case.dout, retain_graph=True)
    for _ in range(10):
        again = torch.autograd.grad(out, leaves, case.dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    free = torch.autograd.grad(attention(*leaves, case.plan, backend="hopper"), leaves, case.dout)
    for ordered, unordered in zip(first, free, strict=True):
        torch.testing.assert_close(ordered, unordered, rtol=2**-7, atol=1e-4)


def test_the_forward_pass_is_the_same_bits_every_time(device):
    case = make_case(device, BF16, Causal(), batch=2, heads=(8, 2), seq=(2048, 2048), head_dim=128)
    first = hopper(case)
    for _ in range(20):
        again = hopper(case)
        assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_without_determinism_gradients_differ_by_rounding_only(device, head_dim):
    """dq is summed in float32 in any order: its last bits may differ, and with them one rounding."""
    case = make_case(device, BF16, Causal(), heads=(4, 4), seq=(2048, 2048), head_dim=head_dim)
    first = hopper(case)
    for _ in range(20):
        again = hopper(case)
        assert torch.equal(first["dk"], again["dk"]) and torch.equal(first["dv"], again["dv"])
        torch.testing.assert_close(first["dq"], again["dq"], rtol=2**-7, atol=1e-5)
