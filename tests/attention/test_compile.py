"""Attention is one registered operator: torch.compile sees a node, with the shapes and strides that it really has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow, attention, lower
from flashtrain.attention.plan import Limits
from tests.attention.oracle import Case, make_case

# The interpreter stands in for the compiler of kernels, so the compiler of models is tested up to the graph it makes.
ON_CPU = "aot_eager"
MASKS = [Causal(), SlidingWindow(9, 2), Causal() & Documents(((30, 40),))]


def compiled(
    function: Callable[..., Tensor], device: torch.device, dynamic: bool | None = None
) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else ON_CPU
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def train_step(function: Callable[..., Tensor], case: Case) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in case.inputs()]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, case.dout)]


@pytest.mark.parametrize("mask", MASKS, ids=["causal", "window", "documents"])
def test_a_compiled_model_has_no_graph_break_and_the_same_numbers(device: torch.device, mask: Mask) -> None:
    case = make_case(device, mask=mask, heads=(2, 1), seq=(70, 70), head_dim=16)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, case.plan, backend="portable").sin()

    for got, wanted in zip(train_step(compiled(model, device), case), train_step(model, case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["sdpa", "standard"])
def test_the_other_backends_compile_too(device: torch.device, backend: str) -> None:
    case = make_case(device, mask=MASKS[2], heads=(2, 1), seq=(70, 70), head_dim=16)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, case.plan, backend=backend).sin()

    for got, wanted in zip(train_step(compiled(model, device), case), train_step(model, case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_many_lengths_need_at_most_two_compilations(device: torch.device) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, Causal(), backend="portable")

    function = compiled(model, device, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for seq in (64, 65, 128, 100):
        case = make_case(device, heads=(1, 1), seq=(seq, seq), head_dim=16)
        for got, wanted in zip(train_step(function, case), train_step(model, case), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_compiling_a_checkpointed_layer_changes_nothing(device: torch.device) -> None:
    case = make_case(device, mask=Causal(), heads=(2, 1), seq=(40, 40), head_dim=16)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, case.plan, backend="portable")

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(layer, q, k, v, use_reentrant=False)

    for got, wanted in zip(train_step(compiled(model, device), case), train_step(layer, case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [Causal(), MASKS[2]], ids=["causal", "documents"])
def test_the_operators_pass_pytorchs_own_check(device: torch.device, mask: Mask) -> None:
    case = make_case(device, mask=mask, heads=(2, 1), seq=(70, 70), head_dim=16)
    limits = (*case.plan.limits, case.scale, "portable", False)
    leaves = [tensor.requires_grad_() for tensor in case.inputs()]
    # AOT dispatch is covered by the tests above; here it would run the interpreter four more times.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flashtrain.attention_forward, (*leaves, *limits), test_utils=checks)
    out, lse = torch.ops.flashtrain.attention_forward(*case.inputs(), *limits)
    delta_args = (out.detach(), case.dout, case.dlse, "portable")
    torch.library.opcheck(torch.ops.flashtrain.attention_delta, delta_args, test_utils=checks)
    delta = torch.ops.flashtrain.attention_delta(*delta_args)
    backward_args = (case.dout, *(t.detach() for t in leaves), lse.detach(), delta, *limits)
    torch.library.opcheck(torch.ops.flashtrain.attention_backward, backward_args, test_utils=checks)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "fused", "expanded"])
def test_fake_strides_are_the_real_strides(device: torch.device, layout: str) -> None:
    def make(heads: int, seq: int) -> Tensor:
        if layout == "transposed":
            return torch.randn(2, seq, heads, 16, device=device).transpose(1, 2)
        if layout == "fused":
            return torch.randn(2, seq, 3, heads, 16, device=device)[:, :, 1].transpose(1, 2)
        if layout == "expanded":
            return torch.randn(2, 1, seq, 16, device=device).expand(2, heads, seq, 16)
        return torch.randn(2, heads, seq, 16, device=device)

    def strides(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[int, ...]]:
        limits = (*Limits(right=0), 0.25, "portable", False)
        out, lse = torch.ops.flashtrain.attention_forward(q, k, v, *limits)
        delta = torch.ops.flashtrain.attention_delta(out, out, None, "portable")
        grads = torch.ops.flashtrain.attention_backward(out, q, k, v, lse, delta, *limits)
        return [t.stride() for t in (out, lse, delta, *grads)]

    inputs = make(4, 5), make(2, 7), make(2, 7)
    mode = FakeTensorMode()
    with mode:
        fake = strides(*(mode.from_tensor(t) for t in inputs))
    assert fake == strides(*inputs)


def test_the_flop_counter_counts_visible_pairs(device: torch.device) -> None:
    case = make_case(device, mask=Causal(), heads=(2, 1), seq=(10, 30), head_dim=16)
    plan = lower(Causal(), 1, 10, 30, device)
    with FlopCounterMode(display=False) as counter:
        q = case.q.requires_grad_()
        attention(q, case.k, case.v, plan, backend="portable").sum().backward()
    forward = 4 * 2 * 16 * sum(range(21, 31))
    assert counter.get_total_flops() == forward + forward * 5 // 2
