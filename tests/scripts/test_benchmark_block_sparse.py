"""The block-sparse benchmark compares like with like, refuses wrong results and says what cannot run."""

from __future__ import annotations

import benchmark_block_sparse
import pytest
import torch
from measuring.attention import Implementation, Shape
from measuring.blocks import hidden_keys
from measuring.correctness import Truth
from measuring.list_cost import list_cost

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
        assert row["block"] == 64 and row["blocks_a_row"] == pytest.approx(4 * row["density"])
    lists = sparse[0]["lists"]
    assert lists["alone_ms"] > 0 and lists["with_lists_ms"] > 0 and lists["step_ms"] > 0 and "lists" not in sparse[1]
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


def test_a_layouts_last_rows_hide_what_its_plan_hides():
    layout = layouts.window_sinks(1000, 64, window=2)
    hidden = ~lower(layout, 1, 1000, 1000, "cpu").dense()[0, 0]
    for tail in (1, 40, 64, 129, 1000):
        assert torch.equal(hidden_keys(layout, tail), hidden[-tail:])


def test_lists_are_built_in_every_other_step_and_what_that_takes_is_told():
    built, steps = [], []

    class Clock:
        """A second for each list that is built and two for each step."""

        def mark(self):
            return float(len(set(built)) + 2 * len(steps))

        def wait(self):
            pass

        def ms(self, start, end):
            return end - start

    found = list_cost(list(range(9)), lambda layout: built.append(layout) or layout, steps.append, Clock())
    assert found["step_ms"] == 2 and found["with_lists_ms"] == 3 and found["share"] == 0.5
    assert steps == [layout for layout in range(4, 9) for _ in range(2)]


def test_what_matters_most_is_measured_first():
    asked = list(benchmark_block_sparse.order(benchmark_block_sparse.parse([])))
    first = asked[:12]
    assert [(seq_len, head_dim) for _, seq_len, head_dim, _ in first] == [(65536, 64)] * 6 + [(65536, 128)] * 6
    assert [density for *_, density in first[:6]] == [None, 0.5, 0.25, 0.125, 0.0625, 0.03]
    blocks = [block for block, *_ in asked]
    assert blocks == sorted(blocks, reverse=True) and set(blocks) == {128, 64}
    assert sum(density is None for *_, density in asked) == 4  # dense once a shape, not once a block size


def test_the_figure_is_that_of_the_paper():
    figure = benchmark_block_sparse.parse(["--figure"])
    assert (figure.lengths, figure.head_dims, figure.batch, figure.num_heads) == ([4096], [64], 64, 16)
    assert figure.densities[0] == 1.0 and min(figure.densities) <= 0.1 and not figure.lists
    assert benchmark_block_sparse.parse(["--figure", "--densities", "0.5"]).densities == [0.5]


def test_lengths_and_densities_are_checked():
    with pytest.raises(SystemExit):
        benchmark_block_sparse.parse(["--lengths", "much"])
    assert benchmark_block_sparse.parse(["--densities", "0.5,0.1"]).densities == [0.5, 0.1]
