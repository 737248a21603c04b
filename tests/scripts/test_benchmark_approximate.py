"""Approximations of attention are what their papers define, and are timed beside exact attention."""

from __future__ import annotations

import benchmark_approximate
import pytest
import torch
from measuring import approximate
from measuring.approximate import approximation
from measuring.attention import Case, Shape
from measuring.correctness import Truth, WrongResult, check

from flashtrain.attention import layouts
from tests.scripts.conftest import check_facts

CPU = torch.device("cpu")


def _inputs(shape: Shape, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [x.to(dtype) for x in shape.inputs(CPU, torch.float32, seed=3)]


@pytest.mark.parametrize("name", approximate.NAMES)
@pytest.mark.parametrize("seq_len", [16, 128, 1024])
def test_an_approximation_is_its_definition_forward_and_backward(name, seq_len):
    shape = Shape(2, 3, seq_len, 16, causal=False)
    made, inputs = approximation(name, shape, CPU, torch.float64), _inputs(shape)
    exact = Truth(*inputs, causal=False, definition=made.definition).exact
    for key, found in Case(made.implementation, *inputs).results().items():
        torch.testing.assert_close(found, exact[key], rtol=1e-9, atol=1e-11)


def test_linformers_projections_learn_in_the_backward_pass_that_is_timed():
    shape = Shape(2, 2, 64, 16, causal=False)
    made = approximation("linformer", shape, CPU, torch.float64)
    inputs = _inputs(shape)
    case = Case(made.implementation, *inputs)
    parameters = made.implementation.parameters
    assert [p.shape for p in parameters] == [(8, 64), (8, 64)] and all(p.requires_grad for p in parameters)
    asked, grad = [], torch.autograd.grad

    def counting(out, wanted, *rest):
        asked.extend(wanted)
        return grad(out, wanted, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counting)
        assert len(case.backward(case.forward())) == 3
    assert all(any(p is each for each in asked) for p in parameters)


def test_what_stands_for_the_keys_is_as_small_as_in_the_papers_tables():
    assert [approximate.compressed(n) for n in (128, 1024, 2048, 65536)] == [16, 128, 256, 256]
    assert approximation("local", Shape(1, 1, 4096, 16, False), CPU, torch.float32).keys_a_query == 257
    with pytest.raises(ValueError, match="seq_len=1001"):
        approximation("local", Shape(1, 1, 1001, 16, False), CPU, torch.float32)


def test_a_truth_of_an_approximation_refuses_exact_attention():
    shape = Shape(1, 2, 256, 16, causal=False)
    inputs = shape.inputs(CPU, torch.bfloat16, seed=0)
    truth = Truth(*inputs, causal=False, definition=approximation("linear", shape, CPU, torch.bfloat16).definition)
    with pytest.raises(WrongResult, match="out is off"):
        check(Case(benchmark_approximate.peer("sdpa", shape, CPU).implementation, *inputs), truth)


def test_the_default_shape_is_that_of_the_papers_tables():
    arguments = benchmark_approximate.parse([])
    assert (arguments.batch, arguments.num_heads, arguments.head_dim) == (16, 8, 64)
    assert arguments.lengths == [2**i for i in range(7, 17)]
    assert {"standard", "hopper", "portable", "sdpa_cudnn", "butterfly", *approximate.NAMES} <= set(
        arguments.implementations
    )


def test_every_peer_gets_a_row_at_each_length_and_what_cannot_run_is_told(dry_run):
    peers = ("standard", "butterfly", "butterfly_narrow", "local", "linear", "linformer", "nonsense", "sdpa_cudnn")
    code, result = dry_run(benchmark_approximate.main, "--implementations", ",".join(peers))
    assert code == 0
    check_facts(result)
    assert [(row["seq_len"], row["implementation"]) for row in result["rows"]] == [
        (seq_len, name) for seq_len in (256, 128) for name in peers
    ]
    for row in result["rows"]:
        if row["implementation"] in ("nonsense", "sdpa_cudnn"):
            assert ("no implementation" if row["implementation"] == "nonsense" else "GPUs") in row["failed"]
            continue
        assert row["failed"] is None and set(row["errors"]) == {"out", "dq", "dk", "dv"}
        assert row["ns_a_token"] == pytest.approx(1e6 * row["ms"]["both"]["median"] / (2 * row["seq_len"]), rel=1e-4)


def test_a_wrong_approximation_gets_no_time(dry_run, monkeypatch):
    monkeypatch.setattr(approximate, "linear", lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v)
    code, result = dry_run(benchmark_approximate.main, "--implementations", "linear,local")
    assert code == 1
    wrong, right = result["rows"][:2]
    assert wrong["wrong"] and "ms" not in wrong
    assert right["failed"] is None and right["ms"]


def test_the_butterfly_of_the_table_is_compared_with_its_own_blocks():
    peer = benchmark_approximate.peer("butterfly_narrow", Shape(1, 1, 1024, 16, False), CPU, whole=True)
    layout = layouts.butterfly(1024, 128, max_stride=2, global_blocks=0)
    assert peer.hidden is not None and peer.facts["keys_a_query"] == 384
    assert (~peer.hidden).sum() == len(layout.blocks) * 128 * 128
