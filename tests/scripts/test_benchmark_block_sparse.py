"""The block-sparse benchmark compares like with like, refuses wrong results and says what cannot run."""

from __future__ import annotations

import benchmark_block_sparse
import pytest
import torch
from measuring.attention import Implementation, Shape
from measuring.correctness import Truth

from flashtrain.attention import layouts, lower, standard_attention
from tests.scripts.test_benchmark_attention import check_facts


def test_a_right_implementation_gets_a_row_at_each_density(dry_run):
    code, result = dry_run(benchmark_block_sparse.main, "--implementations", "sdpa,standard,nonsense")
    assert code == 0
    check_facts(result)
    sparse = [row for row in result["rows"] if row["density_asked"] == 0.5]
    assert [row["implementation"] for row in sparse] == ["sdpa", "standard", "nonsense"]
    for row in sparse[:2]:
        assert row["failed"] is None and row["tflops"]["both"] > 0
        # Sixteen blocks, and one more for each row that got none.
        assert 0.5 <= row["density"] <= 0.625
        assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
    assert sparse[0]["list_ms"]["median"] > 0
    assert "nonsense" in sparse[2]["failed"]


def test_a_wrong_implementation_gets_no_speed(dry_run, monkeypatch):
    def dense(self, name, layout, plan):
        return Implementation(name, lambda q, k, v: torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v)

    monkeypatch.setattr(benchmark_block_sparse.Length, "implementation", dense)
    code, result = dry_run(benchmark_block_sparse.main, "--implementations", "sdpa")
    assert code == 1
    row = next(row for row in result["rows"] if row["density_asked"] == 0.5)
    assert row["wrong"] and "tflops" not in row


def test_the_truth_hides_what_the_layout_hides():
    shape = Shape(1, 2, 256, 16, causal=False)
    inputs = shape.inputs(torch.device("cpu"), torch.float32, seed=0)
    plan = lower(layouts.random_blocks(256, 64, density=0.4, seed=2), 1, 256, 256, "cpu")
    truth = Truth(*inputs, causal=False, hidden=~plan.dense()[0, 0])
    out, _ = standard_attention(*(x.double() for x in inputs[:3]), plan, 16**-0.5)
    torch.testing.assert_close(truth.exact["out"], out)
    assert (
        truth.exact["out"] - standard_attention(*inputs[:3], lower(None, 1, 256, 256, "cpu"), 0.25)[0]
    ).abs().max() > 0.1


def test_lengths_and_densities_are_checked():
    with pytest.raises(SystemExit):
        benchmark_block_sparse.parse(["--lengths", "much"])
    assert benchmark_block_sparse.parse(["--densities", "0.5,0.1"]).densities == [0.5, 0.1]
