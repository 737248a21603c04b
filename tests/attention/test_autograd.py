"""What users expect of anything differentiable: repeatable, partial, composable with autocast and checkpointing."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashtrain.attention import Causal, Documents, attention, lower
from flashtrain.attention.plan import Limits
from tests.attention.oracle import NAMES, assert_accurate, make_case, run

SMALL = {"heads": (2, 1), "seq": (70, 70), "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_same_bit_for_bit_every_time(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(device, dtype, Causal() & Documents(((50, 90),)), heads=(2, 1), seq=(140, 140), head_dim=16)
    first, second = run(case), run(case)
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)], ids=str)
def test_only_the_gradients_asked_for_come_back_and_are_those_of_the_full_run(
    device: torch.device, wanted: tuple[bool, bool, bool]
) -> None:
    case = make_case(device, mask=Causal(), **SMALL)
    case.dlse.zero_()
    leaves = [tensor.detach().requires_grad_(want) for tensor, want in zip(case.inputs(), wanted, strict=True)]
    attention(*leaves, case.plan, scale=case.scale, backend="portable").backward(case.dout)
    base = run(case)
    for leaf, want, name in zip(leaves, wanted, ("dq", "dk", "dv"), strict=True):
        assert (leaf.grad is not None) == want
        if want:
            assert torch.equal(leaf.grad, base[name])


@pytest.mark.parametrize("backend", ["portable", "standard"])
def test_gradients_match_finite_differences(device: torch.device, backend: str) -> None:
    case = make_case(device, mask=Causal(), heads=(2, 1), seq=(33, 33), head_dim=16)

    def loss(*inputs: Tensor) -> Tensor:
        out, lse = attention(*inputs, case.plan, scale=case.scale, backend=backend, return_lse=True)
        return (out.double() * case.dout).sum() + (lse.double() * case.dlse).sum()

    grads = run(case, backend)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        directions = [torch.randn(t.shape, generator=generator).to(device) for t in case.inputs()]
        up = loss(*(t + 1e-2 * d for t, d in zip(case.inputs(), directions, strict=True)))
        down = loss(*(t - 1e-2 * d for t, d in zip(case.inputs(), directions, strict=True)))
        slope = sum((grads[n].double() * d).sum() for n, d in zip(("dq", "dk", "dv"), directions, strict=True))
        assert abs((up - down) / 2e-2 - slope) <= 2e-2 * abs(slope) + 1e-2


def test_a_gradient_of_a_gradient_is_refused_and_not_wrong(device: torch.device) -> None:
    case = make_case(device, **SMALL)
    q = case.q.requires_grad_()
    (grad,) = torch.autograd.grad(attention(q, case.k, case.v, backend="portable").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.pow(2).sum().backward()


def test_an_input_changed_in_place_before_backward_is_an_error(device: torch.device) -> None:
    case = make_case(device, **SMALL)
    q = case.q.clone().requires_grad_()
    k = case.k.clone()
    out = attention(q, k, case.v, backend="portable")
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_grad_and_inference_mode_give_the_same_output(device: torch.device) -> None:
    case = make_case(device, mask=Causal(), **SMALL)
    base = run(case)["out"]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = attention(*case.inputs(), case.plan, scale=case.scale, backend="portable")
        assert not out.requires_grad
        assert torch.equal(out, base)


def test_an_unused_lse_changes_nothing(device: torch.device) -> None:
    case = make_case(device, mask=Causal(), **SMALL)
    grads = []
    for return_lse in (False, True):
        leaves = [tensor.detach().requires_grad_() for tensor in case.inputs()]
        result = attention(*leaves, case.plan, backend="portable", return_lse=return_lse)
        out = result[0] if return_lse else result
        grads.append(torch.autograd.grad(out, leaves, case.dout))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("backend", ["portable", "sdpa", "standard"])
@pytest.mark.parametrize("mixed", [False, True], ids=["all_float32", "v_bfloat16"])
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_that_of_the_leaf(
    device: torch.device, backend: str, mixed: bool
) -> None:
    case = make_case(device, mask=Causal(), **SMALL)
    leaves = [tensor.detach().requires_grad_() for tensor in case.inputs()]
    v = leaves[2].to(torch.bfloat16) if mixed else leaves[2]
    with torch.autocast(device.type, torch.bfloat16):
        out = attention(leaves[0], leaves[1], v, case.plan, scale=case.scale, backend=backend)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, leaves, case.dout.bfloat16())
    assert all(grad.dtype == torch.float32 for grad in grads)
    for name in ("q", "k", "v", "dout"):
        setattr(case, name, getattr(case, name).bfloat16())
    case.dlse.zero_()
    results = [out.detach(), *(grad.bfloat16() for grad in grads)]
    assert_accurate(case, "sdpa", dict(zip(("out", "dq", "dk", "dv"), results, strict=True)))


def test_mixed_dtypes_outside_autocast_name_the_three(device: torch.device) -> None:
    case = make_case(device, **SMALL)
    with pytest.raises(ValueError, match=r"q is torch.float32, k torch.float32 and v torch.bfloat16"):
        attention(case.q, case.k, case.v.bfloat16())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(device: torch.device, reentrant: bool) -> None:
    case = make_case(device, torch.bfloat16, Causal(), **SMALL)
    case.dlse.zero_()
    base = run(case)
    leaves = [tensor.detach().requires_grad_() for tensor in case.inputs()]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, case.plan, scale=case.scale, backend="portable")

    out = checkpoint(layer, *leaves, use_reentrant=reentrant)
    out.backward(case.dout)
    assert torch.equal(out.detach(), base["out"])
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        assert torch.equal(leaf.grad, base[name])


def test_a_ring_of_parts_gives_the_gradients_of_the_whole(device: torch.device) -> None:
    """Keys split in two, merged by lse: the backward of each part with the lse and delta of the whole adds up."""
    case = make_case(device, heads=(2, 2), seq=(60, 128), head_dim=16)
    case.dlse.zero_()
    whole = run(case)
    delta = torch.ops.flashtrain.attention_delta(whole["out"], case.dout, None, "portable")
    dq = torch.zeros_like(case.q)
    for part in (slice(0, 64), slice(64, 128)):
        k, v = case.k[:, :, part], case.v[:, :, part]
        part_dq, dk, dv = torch.ops.flashtrain.attention_backward(
            case.dout, case.q, k, v, whole["lse"], delta, *Limits(), case.scale, "portable", True
        )
        dq += part_dq
        torch.testing.assert_close(dk, whole["dk"][:, :, part], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dv, whole["dv"][:, :, part], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dq, whole["dq"], rtol=1e-5, atol=1e-6)


def test_one_plan_serves_many_layers(device: torch.device) -> None:
    plan = lower(Causal() & Documents(((30, 40),)), 1, 70, 70, device)
    case = make_case(device, **SMALL)
    first = attention(*case.inputs(), plan, backend="portable")
    assert torch.equal(attention(*case.inputs(), plan, backend="portable"), first)
