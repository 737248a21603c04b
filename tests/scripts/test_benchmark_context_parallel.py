"""One rank's work is measured beside the whole, and a wrong result gets no figures."""

from __future__ import annotations

import benchmark_context_parallel
import pytest
import torch
from measuring import shared_sequence
from measuring.correctness import WrongResult

from flashtrain.parallel import partial
from tests.scripts.conftest import check_facts


def test_every_size_of_a_ring_is_measured_and_compared(dry_run):
    code, result = dry_run(benchmark_context_parallel.main)
    check_facts(result)
    assert code == 0
    assert [(row["seq_len"], row["ranks"]) for row in result["rows"]] == [(n, r) for n in (64, 128) for r in (2, 4, 8)]
    for row in result["rows"]:
        assert len(row["rank_ms"]) == row["ranks"]
        slowest, whole = row["slowest"]["both_ms"]["median"], row["whole"]["both_ms"]["median"]
        assert row["of_a_share"] == pytest.approx(slowest * row["ranks"] / whole, rel=1e-4)
        assert max(found["share"] for found in row["differences"].values()) < 1e-5


def test_a_wrong_ring_gets_no_figures(dry_run, monkeypatch):
    monkeypatch.setattr(partial, "merge", lambda out, lse, part, part_lse: (out.copy_(part), lse.copy_(part_lse)))
    code, result = dry_run(benchmark_context_parallel.main, "--ranks", "2")
    assert code == 1
    assert all(row["wrong"] and "out by" in row["failed"] and "whole" not in row for row in result["rows"])


def test_bytes_are_those_of_the_tensors_that_go_round():
    # Keys and values take two trips of three in each pass; the sums of their gradients, wider, come home as well.
    assert shared_sequence.bytes_sent(3, 10, 20) == {"forward_bytes": 20, "backward_bytes": 20 + 60}
    assert shared_sequence.bytes_sent(1, 10, 20) == {"forward_bytes": 0, "backward_bytes": 0}


def test_nan_is_a_wrong_result():
    whole = [torch.ones(4)] * 4
    with pytest.raises(WrongResult, match="dk"):
        shared_sequence.differences([*whole[:2], torch.full((4,), float("nan")), whole[3]], whole)
