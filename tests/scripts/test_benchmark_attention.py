"""Speeds are printed for right kernels only, by the papers' FLOP count, with all that is needed to judge them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import benchmark_attention
import benchmark_memory
import pytest
import torch
from measuring import attention as compared
from measuring.attention import Case, Implementation, Shape
from measuring.correctness import Truth, WrongResult, check, exact
from measuring.report import Unavailable

from flashtrain.attention import Causal, attention
from tests.scripts.conftest import ROOT, check_facts


def test_flops_are_those_of_the_papers():
    """4 b h n^2 d, half when causal, 2.5 times that backward: 2.46 ms for the causal forward pass are 447 TFLOP/s."""
    full, causal = Shape(1, 32, 16384, 64, False), Shape(1, 32, 16384, 64, True)
    assert full.flops("forward") == 4 * 32 * 16384**2 * 64 == 2 * causal.flops("forward")
    assert causal.flops("forward") / 2.45952e-3 / 1e12 == pytest.approx(447.04, abs=0.01)
    assert full.flops("backward") / full.flops("forward") == 2.5
    assert full.flops("both") == full.flops("forward") + full.flops("backward")


def test_the_default_shapes_are_those_of_the_flash_attention_papers():
    shapes = benchmark_attention.shapes(benchmark_attention.parse(["--lengths", "1k,16k,64k"]))
    assert {s.num_heads * s.head_dim for s in shapes if s.seq_len <= 16384} == {2048}
    assert {s.batch * s.seq_len for s in shapes if s.seq_len <= 16384} == {16384}
    assert {s.num_heads * s.head_dim for s in shapes if s.seq_len == 65536} == {512}
    assert len(shapes) == 12


def test_every_right_implementation_gets_a_row_with_its_spread(dry_run):
    code, result = dry_run(benchmark_attention.main, "--implementations", "standard,standard_backend,sdpa")
    assert code == 0
    check_facts(result)
    assert [(row["implementation"], row["causal"]) for row in result["rows"]] == [
        (name, causal) for causal in (True, False) for name in ("standard", "standard_backend", "sdpa")
    ]
    for row in result["rows"]:
        assert row["failed"] is None
        for name in ("forward", "backward", "both"):
            times = row["ms"][name]
            assert 0 < times["min"] <= times["p25"] <= times["median"] <= times["p75"]
            assert row["tflops"][name] > 0
        assert len(row["rounds_both_ms"]) == 2
        assert row["host_us"]["forward"] > 0
        assert set(row["errors"]) == {"moderate_shape", "timed_shape_last_head"}
        assert set(row["errors"]["moderate_shape"]) == {"out", "dq", "dk", "dv"}


def test_what_cannot_run_here_is_told_in_its_row(dry_run):
    code, result = dry_run(benchmark_attention.main, "--implementations", "sdpa,sdpa_flash,flash_attn4,nonsense")
    assert code == 0
    failed = {row["implementation"]: row["failed"] for row in result["rows"]}
    assert failed["sdpa"] is None
    assert "GPUs" in failed["sdpa_flash"]
    assert failed["flash_attn4"] is not None
    assert "there are portable" in failed["nonsense"]


class _Off(torch.autograd.Function):
    """Passes out, or changes it; passes the gradient, or changes it."""

    @staticmethod
    def forward(ctx, x, scale, grad_scale):
        ctx.grad_scale = grad_scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.grad_scale, None, None


def _fake(shape, device, scale=1.0, grad_scale=1.0):
    def call(q, k, v):
        out = attention(q, k, v, Causal() if shape.causal else None, backend="sdpa")
        return _Off.apply(out, scale, grad_scale)

    return Implementation("fake", call)


@pytest.mark.parametrize("fault", [{"scale": 1.03}, {"grad_scale": 1.03}, {"grad_scale": float("nan")}])
def test_a_wrong_kernel_gets_no_speed_and_ends_the_script_with_1(dry_run, monkeypatch, capsys, fault):
    monkeypatch.setitem(compared.BUILDERS, "fake", functools.partial(_fake, **fault))
    code, result = dry_run(benchmark_attention.main, "--implementations", "sdpa,fake", "--masks", "causal")
    assert code == 1
    right, wrong = result["rows"]
    assert right["failed"] is None and right["tflops"]
    assert wrong["wrong"] and "tflops" not in wrong and "ms" not in wrong
    shown = capsys.readouterr().out
    assert "WRONG" in shown and ("out is" if "scale" in fault else "dq is") in shown


def test_the_same_fake_without_a_fault_passes(dry_run, monkeypatch):
    monkeypatch.setitem(compared.BUILDERS, "fake", _fake)
    code, _ = dry_run(benchmark_attention.main, "--implementations", "fake", "--masks", "full")
    assert code == 0


def test_a_kernel_that_fails_late_loses_its_row_only(dry_run, monkeypatch):
    calls = []

    def build(shape, device):
        def call(q, k, v):
            calls.append(1)
            if len(calls) > 6:
                raise torch.OutOfMemoryError("no room")
            return attention(q, k, v, Causal() if shape.causal else None, backend="sdpa")

        return Implementation("fake", call)

    monkeypatch.setitem(compared.BUILDERS, "fake", build)
    code, result = dry_run(benchmark_attention.main, "--implementations", "fake,sdpa", "--masks", "causal")
    assert code == 0
    assert [row["failed"] for row in result["rows"]] == ["out of memory", None]


@pytest.mark.parametrize("causal", [True, False])
def test_the_gate_compares_with_the_truth(causal):
    """The truth in pieces is that of float64 autograd, and what it allows is twice PyTorch's own error."""
    q, k, v, dout = (x.double() for x in Shape(2, 2, 40, 16, causal).inputs(torch.device("cpu"), torch.float32, seed=3))
    plain = Case(Implementation("plain", functools.partial(compared.standard, causal=causal)), q, k, v, dout)
    for name, wanted in plain.results().items():
        torch.testing.assert_close(exact(q, k, v, dout, causal)[name], wanted, rtol=1e-12, atol=1e-12)


def test_the_end_of_a_long_causal_sequence_can_be_compared_alone():
    inputs = Shape(2, 3, 50, 16, True).inputs(torch.device("cpu"), torch.bfloat16, seed=4)
    case = Case(Implementation("plain", functools.partial(compared.standard, causal=True)), *inputs)
    truth = Truth(*inputs, causal=True, last_head=True, tail=8)
    assert check(case, truth)["dk"]["rms"] > 0
    results = case.results()
    results["dk"][-1, -1, -8] += 0.5
    with pytest.raises(WrongResult, match="dk is off"):
        truth.require(results)
    with pytest.raises(ValueError, match="tail=8"):
        Truth(*inputs, causal=False, tail=8)


def test_memory_has_a_row_a_length_and_stops_after_the_first_failure(dry_run, monkeypatch):
    def build(shape, device):
        if shape.seq_len == 64:
            raise torch.OutOfMemoryError("no room")
        return Implementation("fake", functools.partial(compared.standard, causal=shape.causal))

    monkeypatch.setitem(compared.BUILDERS, "fake", build)
    code, result = dry_run(benchmark_memory.main, "--implementations", "fake,sdpa")
    assert code == 0
    check_facts(result)
    failed = [(row["implementation"], row["seq_len"], row["failed"]) for row in result["rows"]]
    assert failed == [
        ("fake", 32, None),
        ("fake", 64, "out of memory"),
        ("fake", 128, "not tried: out of memory at 64"),
        ("sdpa", 32, None),
        ("sdpa", 64, None),
        ("sdpa", 128, None),
    ]
    assert all(row["errors"]["dq"]["rms"] > 0 for row in result["rows"] if row["failed"] is None)


def test_memory_refuses_a_wrong_kernel(dry_run, monkeypatch):
    monkeypatch.setitem(compared.BUILDERS, "fake", functools.partial(_fake, grad_scale=1.05))
    code, result = dry_run(benchmark_memory.main, "--implementations", "fake")
    assert code == 1
    assert result["rows"][0]["wrong"] and "forward_ms" not in result["rows"][0]


def test_memory_of_local_attention_with_sinks_has_its_lists_and_its_own_truth(dry_run, monkeypatch):
    code, result = dry_run(benchmark_memory.main, "--implementations", "sdpa,standard,flex", "--window", "1")
    assert code == 0
    check_facts(result)
    rows = {(row["implementation"], row["seq_len"]): row for row in result["rows"]}
    assert "block layouts are for" in rows["flex", 256]["failed"]
    for seq_len in (256, 512, 1024):
        row, blocks = rows["standard", seq_len], seq_len // 128
        # The own block cut in half, the one before it, and the first one where that is another.
        pairs = blocks * 128 * 129 / 2 + (blocks - 1 + max(0, blocks - 2)) * 128 * 128
        assert row["failed"] is None and row["density"] == pytest.approx(pairs / seq_len**2, rel=1e-5)
        assert row["lists"]["build_ms"] > 0 and row["lists"]["bytes"] > 0 and row["ns_a_token"] > 0

    def dense(name, plan):
        return Implementation(name, functools.partial(compared.standard, causal=True))

    monkeypatch.setattr(benchmark_memory, "sparse", dense)
    code, result = dry_run(benchmark_memory.main, "--implementations", "sdpa", "--window", "1")
    assert code == 1
    assert [row["wrong"] for row in result["rows"]] == [False, True, False]  # at 256 nothing is hidden


def test_standard_attention_is_not_tried_where_its_matrices_do_not_fit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    build = functools.partial(compared.build, "standard", device=torch.device("cuda"))
    assert build(Shape(1, 32, 16384, 64, True)).name == "standard"
    with pytest.raises(Unavailable, match="needs 388 GiB"):
        build(Shape(1, 16, 65536, 64, True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU Triton does not interpret")
def test_the_portable_kernels_run_in_tritons_interpreter(tmp_path):
    out = tmp_path / "portable.json"
    script = [sys.executable, "scripts/benchmark_attention.py", "--dry-run", "--device", "cpu", "--out", str(out)]
    command = [*script, "--implementations", "portable", "--masks", "causal", "--rounds", "1"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    row = json.loads(out.read_text())["rows"][0]
    assert row["failed"] is None and row["tflops"]["both"] > 0
