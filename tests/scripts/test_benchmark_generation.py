"""Generation is timed beside transformers on the same weights, and not at all where the two differ."""

from __future__ import annotations

from functools import partial

import benchmark_generation
import pytest
import torch

from tests.scripts.conftest import check_facts

pytest.importorskip("transformers")


def test_a_dry_run_times_every_implementation_at_every_length(dry_run):
    code, result = dry_run(benchmark_generation.main, "--kv-heads", "4")
    assert code == 0
    check_facts(result | {"spread": "quartiles"})
    assert result["same_tokens_without_cache"] is True
    rows = {(row["context"], row["implementation"]): row for row in result["rows"]}
    assert set(rows) == {(n, name) for n in (32, 64) for name in benchmark_generation.IMPLEMENTATIONS}
    assert all(row["failed"] is None and row["tokens_per_second"] > 0 for row in rows.values())


def test_all_implementations_write_the_same_tokens(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    arguments = benchmark_generation.parse(["--dry-run", "--device", "cpu"])
    ours, theirs = benchmark_generation.build(arguments, torch.device("cpu"))
    ids = benchmark_generation.prompt(64, arguments.vocab)
    written = [
        list(benchmark_generation.tokens_of(name, ours, theirs, ids, 12, 24))
        for name in benchmark_generation.IMPLEMENTATIONS
    ]
    assert all(tokens == written[0] for tokens in written)
    assert len(written[0]) == 12


def test_models_that_differ_get_no_time(dry_run, monkeypatch):
    build = benchmark_generation.build

    def other(arguments, device):
        ours, theirs = build(arguments, device)
        with torch.no_grad():
            ours.blocks[1].mlp.down.weight.mul_(2)
        return ours, theirs

    monkeypatch.setattr(benchmark_generation, "build", other)
    code, result = dry_run(benchmark_generation.main)
    assert code == 1
    assert result["rows"] == []
    assert "hidden states differ" in result["hidden_difference"]
