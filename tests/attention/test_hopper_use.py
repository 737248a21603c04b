"""The Hopper kernels in use: compiled, recorded, on streams and threads, chosen by themselves, and what they say."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, attention, choose_backend, layouts, lower
from tests.attention.hopper_cases import BF16, FP16, ON_HOPPER, hopper
from tests.attention.oracle import Case, assert_accurate, assert_close, make_case, run_standard

pytestmark = ON_HOPPER


def test_a_compiled_model_holds_the_operator_and_gives_the_same(device):
    case = make_case(device, BF16, Causal(), batch=2, heads=(4, 2), seq=(703, 703), head_dim=128)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, case.plan, backend="hopper").float() * 2

    leaves = [x.detach().requires_grad_() for x in case.inputs()]
    eager, compiled = call(*leaves), torch.compile(call, fullgraph=True)(*leaves)
    assert torch.equal(eager, compiled)
    grads = torch.autograd.grad(compiled, leaves, case.dout.float() / 2)
    truth, plain = run_standard(case, torch.float64, with_lse=False), run_standard(case, BF16, with_lse=False)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_close(name, grad, plain[name], truth[name])


def test_a_cuda_graph_replays_with_new_inputs(device):
    case = make_case(device, BF16, Causal(), heads=(4, 4), seq=(512, 512))
    expected = hopper(case)
    static = Case(*(torch.zeros_like(x).requires_grad_() for x in case.inputs()), torch.zeros_like(case.dout), *[
        case.dlse, case.scale, case.plan])  # fmt: skip
    hopper(static)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = hopper(static)
    for to, source in zip((*static.inputs(), static.dout), (*case.inputs(), case.dout), strict=True):
        to.data.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured["out"], expected["out"])
    torch.testing.assert_close(captured["dq"], expected["dq"], rtol=2**-7, atol=1e-3)


def test_another_stream_waits_for_nothing_and_is_right(device):
    case = make_case(device, BF16, Causal(), heads=(4, 4), seq=(2048, 2048))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = hopper(case)
    torch.cuda.current_stream().wait_stream(stream)
    assert_accurate(case, "hopper", results)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (BF16, 64, "hopper"),
        (FP16, 128, "hopper"),
        (BF16, 96, "hopper"),
        (torch.float32, 64, "portable"),
        (BF16, 84, "portable"),
        (BF16, 32, "portable"),
    ],
    ids=str,
)
def test_auto_takes_the_kernels_where_they_apply_and_says_so(device, dtype, head_dim, expected, caplog):
    q = torch.randn(1, 2, 64, head_dim, device=device, dtype=dtype)
    assert choose_backend("auto", q) == expected
    from flashtrain import attention as package

    package._said.clear()
    with caplog.at_level(logging.INFO, logger="flashtrain.attention"):
        for _ in range(3):
            attention(q, q, q, Causal())
    said = [record.message for record in caplog.records if expected in record.message]
    assert len(said) == 1
    assert expected == "hopper" or "the Hopper kernels take" in said[0]


def messages_of(caplog, call) -> list[str]:
    """What attention says in three calls."""
    from flashtrain import attention as package
    from flashtrain.attention.hopper import launch as launching

    package._said.clear()
    launching._say_copy.cache_clear()
    with caplog.at_level(logging.INFO, logger="flashtrain.attention"):
        for _ in range(3):
            call()
    return [record.message for record in caplog.records]


def test_a_backward_pass_that_goes_to_the_portable_kernels_is_said_once(device, caplog):
    wide = torch.randn(1, 2, 64, 256, device=device, dtype=BF16)
    said = messages_of(caplog, lambda: attention(wide, wide, wide, backend="hopper"))
    assert said == []
    said = messages_of(caplog, lambda: attention(wide, wide, wide, deterministic=True))
    assert [line for line in said if "portable kernels for the backward pass" in line and "256" in line] == said[:1]
    caplog.clear()
    q = torch.randn(1, 2, 512, 64, device=device, dtype=BF16)
    plan = lower(layouts.butterfly(512), 1, 512, 512, device)
    said = messages_of(caplog, lambda: attention(q, q, q, plan, backend="hopper", deterministic=True))
    assert len(said) == 1 and "block layout is not deterministic" in said[0]


def test_copying_tensors_that_tma_cannot_address_is_said_once(device, caplog):
    q = torch.randn(1, 2, 64, 65, device=device, dtype=BF16)[..., 1:]
    said = messages_of(caplog, lambda: attention(q, q, q, backend="hopper"))
    assert len(said) == 1 and "attention copies a tensor" in said[0]


def test_many_tensors_and_threads_do_not_take_each_others_addresses(device, monkeypatch):
    """A launch keeps room for its parameters and for some descriptors, which all launches of its kind share."""
    from flashtrain.attention.hopper import driver

    monkeypatch.setattr(driver, "_MAPS_KEPT", 2)
    cases = [make_case(device, BF16, Causal(), heads=(2, 2), seq=(200, 200), seed=seed) for seed in range(8)]
    expected = [hopper(case) for case in cases]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for results, alone in zip(pool.map(hopper, cases), expected, strict=True):
                torch.cuda.synchronize()
                assert torch.equal(results["out"], alone["out"]) and torch.equal(results["dk"], alone["dk"])
