"""A transformers model trains with our attention as with its own, and a difference is told and ends with 1."""

from __future__ import annotations

import benchmark_transformers
import pytest
import torch

from tests.scripts.conftest import check_facts

pytest.importorskip("transformers")


def test_a_dry_run_trains_with_each_attention_to_the_same_losses(dry_run):
    code, result = dry_run(benchmark_transformers.main)
    assert code == 0
    check_facts(result)
    rows = {row["implementation"]: row for row in result["rows"]}
    assert set(rows) == set(benchmark_transformers.IMPLEMENTATIONS)
    for row in rows.values():
        assert row["failed"] is None and row["tokens_per_second"] > 0
        assert len(row["losses"]) == 5
    assert rows["flashtrain"]["from_sdpa"] <= result["allowed_from_sdpa"]


def test_losses_that_part_end_with_1(dry_run, monkeypatch):
    build = benchmark_transformers.build

    def other(name, arguments, device):
        model = build(name, arguments, device)
        if name == "flashtrain":
            with torch.no_grad():
                model.model.layers[0].self_attn.v_proj.weight.mul_(3)
        return model

    monkeypatch.setattr(benchmark_transformers, "build", other)
    code, result = dry_run(benchmark_transformers.main)
    assert code == 1
    rows = {row["implementation"]: row for row in result["rows"]}
    assert rows["flashtrain"]["from_sdpa"] > result["allowed_from_sdpa"]
