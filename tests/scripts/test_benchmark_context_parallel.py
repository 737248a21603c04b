"""One rank's work is measured beside the whole, and a wrong result gets no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import benchmark_context_parallel
import pytest
import torch
import torch.nn.functional as F
from measuring import shared_sequence
from measuring.correctness import WrongResult

from flashtrain.parallel import partial
from tests.scripts.conftest import ROOT, check_facts


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
    assert shared_sequence.bytes_sent(3, 10, 20) == {"forward_bytes": 20, "backward_bytes": 20 + 40}
    assert shared_sequence.bytes_sent(1, 10, 20) == {"forward_bytes": 0, "backward_bytes": 0}


def test_nan_is_a_wrong_result():
    whole = [torch.ones(4)] * 4
    with pytest.raises(WrongResult, match="dk"):
        shared_sequence.differences([*whole[:2], torch.full((4,), float("nan")), whole[3]], whole)


def test_two_processes_share_a_sequence_and_a_peer_that_cannot_is_a_row_with_its_reason(tmp_path):
    """PyTorch 2.11 has no context parallel on a CPU; the rows beside it and behind it have their figures."""
    script, out = ROOT / "scripts" / "benchmark_context_parallel.py", tmp_path / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "--distributed"]
    arguments = ["--dry-run", "--device", "cpu", "--out", str(out), "--peer", "torch"]
    subprocess.run([*launch, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == 2 * ["ring", "ulysses", *shared_sequence.TORCH]
    for row in rows:
        if row["method"] in shared_sequence.TORCH:
            assert (row["failed"] is None) == ("whole" in row)
        else:
            assert row["failed"] is None and row["ranks"] == 2 and "communication" in row
            assert row["speed_up"] == pytest.approx(2 / row["of_a_share"], rel=1e-4)


def test_the_peer_needs_several_processes(capsys):
    with pytest.raises(SystemExit):
        benchmark_context_parallel.parse(["--peer", "torch"])
    assert "--distributed" in capsys.readouterr().err


def test_a_result_that_is_wrong_on_another_rank_alone_is_wrong_here_too(monkeypatch):
    """Whoever measured on would wait for the other one."""
    whole = [torch.ones(4)] * 4
    monkeypatch.setattr(shared_sequence, "most_of_all", lambda values, device: [1.0])
    with pytest.raises(WrongResult, match="another rank"):
        shared_sequence.check_together(whole, whole)
    with pytest.raises(WrongResult, match="dk"):
        shared_sequence.check_together([*whole[:2], torch.zeros(4), whole[3]], whole)


def test_a_peer_that_fails_leaves_pytorchs_attention_as_it_was(single_process):
    attention, shape = F.scaled_dot_product_attention, (1, 2, 16, 8)
    whole = [torch.ones(shape) for _ in range(4)]

    def fail(call):
        assert F.scaled_dot_product_attention is not attention
        raise RuntimeError("lost")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            shared_sequence.with_torch("torch_flash", whole, fail)
        assert F.scaled_dot_product_attention is attention
    assert all(x.shape == shape for x in whole)


@pytest.fixture
def single_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
