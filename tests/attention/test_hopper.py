"""The Hopper kernels on a Hopper GPU: the promises of the portable ones, which no interpreter can show here."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flashtrain.attention import (
    Causal,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    attention,
    choose_backend,
    layouts,
    lower,
)
from tests.attention.oracle import NAMES, Case, assert_accurate, assert_close, make_case, run, run_standard
from tests.attention.test_on_gpu import by_chunks, needs_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(200),
    "both sides": SlidingWindow(100, 50),
    "narrow": Causal() & SlidingWindow(0),
    "documents": Causal() & Documents(((1, 300, 0, 214, 188),)),
    "documents, full": Documents(((64, 128, 511),)),
    "documents, window": Documents(((1, 300, 0, 214, 188), (703, 0))) & SlidingWindow(40, 9),
}


def hopper(case: Case) -> dict[str, Tensor]:
    return run(case, "hopper")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (BF16, 128), (FP16, 64), (FP16, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_right(device, dtype, head_dim, name, heads):
    case = make_case(device, dtype, MASKS[name], batch=2, heads=heads, seq=(703, 703), head_dim=head_dim)
    assert_accurate(case, "hopper")


@pytest.mark.parametrize("name", ["full", "causal", "documents"])
@pytest.mark.parametrize("head_dim", [40, 48, 56, 72, 80, 96, 112, 120, 136, 192, 256])
def test_every_head_dim_in_steps_of_8_is_right(device, head_dim, name):
    """Tiles are wider than most of these; what lies beyond must be neither read nor written."""
    case = make_case(device, BF16, MASKS[name], batch=2, heads=(4, 2), seq=(703, 703), head_dim=head_dim)
    assert_accurate(case, "hopper")


@pytest.mark.parametrize("head_dim", [80, 96, 192])
@pytest.mark.parametrize("seq", [(1, 1), (65, 129), (300, 2048), (2048, 300)], ids=str)
def test_every_length_is_right_at_head_dims_between_tiles(device, seq, head_dim):
    assert_accurate(make_case(device, BF16, Causal(), heads=(4, 1), seq=seq, head_dim=head_dim), "hopper")


LENGTHS = [
    (1, 1),
    (1, 4097),
    (63, 64),
    (65, 129),
    (191, 193),
    (192, 192),
    (799, 3),
    (2048, 300),
    (300, 2048),
    (3, 5000),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("seq", LENGTHS, ids=str)
def test_every_length_is_right_and_rows_that_see_nothing_give_zero(device, seq, mask, head_dim):
    assert_accurate(make_case(device, BF16, mask, heads=(4, 1), seq=seq, head_dim=head_dim), "hopper")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys_give_zero(device, seq, head_dim):
    results = hopper(make_case(device, BF16, Causal(), seq=seq, head_dim=head_dim))
    assert all((results[name] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert torch.isneginf(results["lse"]).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [4096, 5000, 16384])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_stay_within_twice_the_error_of_plain_pytorch(device, seq, head_dim, causal):
    case = make_case(device, BF16, Causal() if causal else None, heads=(1, 1), seq=(seq, seq), head_dim=head_dim)
    case.dlse.zero_()
    ours = hopper(case)
    truth, plain = by_chunks(case, torch.float64, causal=causal), by_chunks(case, BF16, causal=causal)
    for name in ("out", "dq", "dk", "dv"):
        assert_close(name, ours[name], plain[name], truth[name])


@pytest.mark.parametrize("scale", [0.0, -0.5, 30.0])
def test_any_scale_is_right(device, scale):
    case = make_case(device, BF16, Causal(), heads=(2, 2), seq=(300, 300), scale=scale)
    assert_accurate(case, "hopper")


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


@pytest.mark.parametrize("head_dim", [64, 128, 96])
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


LAYOUTS = {
    "butterfly": lambda seq: layouts.butterfly(seq),
    "sinks": lambda seq: layouts.window_sinks(seq, window=1),
    "uneven, with empty rows": lambda seq: layouts.random_blocks(seq, density=0.3, seed=5, no_empty_rows=False),
    "all blocks": lambda seq: layouts.random_blocks(seq, density=1.0),
    "no block": lambda seq: layouts.random_blocks(seq, density=0.0, no_empty_rows=False),
}
RESTS = {
    "alone": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(333),
    "documents": Documents(((1, 300, 0, 602, 200), (703, 400))),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_block_layout_is_right(device, layout, rest, head_dim):
    mask = LAYOUTS[layout](1103) & RESTS[rest]
    case = make_case(device, BF16, mask, batch=2, heads=(4, 4), seq=(1103, 1103), head_dim=head_dim)
    assert_accurate(case, "hopper")


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiles_of_long_lists_are_right_with_every_block_layout(device, layout, rest):
    """Lists here are short ones: these tiles are named."""
    from flashtrain.attention.hopper import calls
    from flashtrain.attention.hopper.configs import LISTED, LONG_LISTED

    assert LISTED[64] != LONG_LISTED[64]
    mask = LAYOUTS[layout](1103) & RESTS[rest]
    case = make_case(device, BF16, mask, batch=2, heads=(4, 4), seq=(1103, 1103))
    with torch.no_grad():
        out, lse = calls.forward(*case.inputs(), case.plan.limits, case.scale, LONG_LISTED[64])
    assert_accurate(case, "hopper", {**hopper(case), "out": out, "lse": lse})


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [(900, 1500), (1500, 900), (1, 300), (128, 128)], ids=str)
def test_block_layouts_of_grouped_heads_and_of_other_lengths_are_right(device, seq, head_dim):
    mask = layouts.random_blocks(seq, density=0.4, seed=2, no_empty_rows=False) & Causal()
    assert_accurate(make_case(device, BF16, mask, batch=2, heads=(6, 2), seq=seq, head_dim=head_dim), "hopper")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_layout_of_each_head_is_right(device, head_dim):
    mask = layouts.random_blocks(1103, density=0.3, seed=2, heads=4, no_empty_rows=False)
    assert_accurate(make_case(device, FP16, mask, batch=2, heads=(4, 4), seq=(1103, 1103), head_dim=head_dim), "hopper")


def test_block_layouts_that_the_kernels_do_not_walk_go_to_the_portable_ones(device):
    q = torch.randn(1, 4, 512, 64, device=device, dtype=BF16)
    small = lower(layouts.window_sinks(512, 64), 1, 512, 512, device)
    own = lower(layouts.random_blocks(512, density=0.5, heads=4), 1, 512, 512, device)
    assert choose_backend("auto", q, blocks=small.blocks) == "portable"
    assert choose_backend("auto", q, blocks=own.blocks, group=2) == "portable"
    assert choose_backend("auto", q, blocks=own.blocks) == "hopper"
    with pytest.raises(ValueError, match="layouts of"):
        attention(q, q, q, small, backend="hopper")


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


def test_without_determinism_gradients_differ_by_rounding_only(device):
    """dq is summed in float32 in any order: its last bits may differ, and with them one rounding."""
    case = make_case(device, BF16, Causal(), heads=(4, 4), seq=(2048, 2048))
    first, again = hopper(case), hopper(case)
    assert torch.equal(first["dk"], again["dk"]) and torch.equal(first["dv"], again["dv"])
    torch.testing.assert_close(first["dq"], again["dq"], rtol=2**-7, atol=1e-5)


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
    said = messages_of(caplog, lambda: attention(wide, wide, wide))
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


def test_a_plan_of_another_batch_row_is_not_read(device):
    """Two packings in one batch: each row reads its own part of the table."""
    lengths = ((100, 603), (400, 303))
    case = make_case(device, BF16, Causal() & Documents(lengths), batch=2, heads=(2, 2), seq=(703, 703))
    together = hopper(case)
    for row in range(2):
        plan = lower(Causal() & Documents((lengths[row],)), 1, 703, 703, device)
        one = Case(*(x[row : row + 1] for x in (*case.inputs(), case.dout, case.dlse)), case.scale, plan)
        alone = hopper(one)
        assert torch.equal(together["out"][row : row + 1], alone["out"])
        for name in set(NAMES) - {"out", "dq"}:
            assert torch.equal(together[name][row : row + 1], alone[name]), name
