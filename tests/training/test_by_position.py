"""Losses by position: bins that double, each token once."""

import math

import pytest
import torch
import torch.nn.functional as F

from flashtrain.models.token_losses import token_losses
from flashtrain.training.by_position import LossByPosition, log_bins
from flashtrain.training.run import run

from .conftest import figures, go_on, metrics


def test_bins_double_and_cover_every_position_once():
    assert log_bins(16) == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16)]
    assert log_bins(1) == [(0, 1)]
    for seq_len in (1, 2, 3, 100, 1024, 1025):
        assert [p for start, end in log_bins(seq_len) for p in range(start, end)] == list(range(seq_len))


def test_each_bin_has_the_mean_of_its_targets():
    losses, targets = torch.rand(3, 20), torch.randint(9, (3, 20))
    targets[0, :7] = -100
    positions = torch.arange(20).repeat(3, 1)
    positions[1, 10:] -= 10  # a document that begins in the middle
    bins = LossByPosition(20, torch.device("cpu"))
    bins.add(losses[:2], targets[:2], positions[:2])
    bins.add(losses[2:], targets[2:])
    for row in bins.rows():
        counted = (positions >= row["first"]) & (positions <= row["last"]) & (targets != -100)
        assert row["targets"] == int(counted.sum())
        assert row["loss"] == pytest.approx(float(losses[counted].mean()), rel=1e-6)
    assert bins.mean() == pytest.approx(float(losses[targets != -100].mean()), rel=1e-6)
    assert list(bins.figures()) == [f"val_loss_at_{start}" for start in (0, 1, 2, 4, 8, 16)]
    assert LossByPosition(4, torch.device("cpu")).figures() == {}
    assert math.isnan(LossByPosition(4, torch.device("cpu")).mean())


def test_losses_of_tokens_are_cross_entropies_in_any_pieces():
    hidden, head, targets = torch.randn(2, 15, 8), torch.randn(11, 8), torch.randint(11, (2, 15))
    targets[1, 3:9] = -100
    logits = hidden @ head.T
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 15)
    for chunk in (1, 4, 100):
        losses, right = token_losses(hidden, head, targets, chunk_tokens=chunk)
        torch.testing.assert_close(losses, expected)
        assert torch.equal(right, (logits.argmax(-1) == targets) & (targets != -100))
    nothing, right = token_losses(hidden, head, torch.full((2, 15), -100))
    assert not nothing.any()
    assert not right.any()


def test_a_run_writes_its_held_out_loss_by_position_beside_the_whole(make_config, tmp_path):
    assert run(make_config("run_id=bins", "trainer.val_by_position=true"), []) == 0
    assert run(make_config("run_id=plain"), []) == 0
    names = [f"val_loss_at_{start}" for start in (0, 1, 2, 4, 8, 16)]
    rows = [row for row in metrics(tmp_path / "runs" / "bins") if row["val_loss"]]
    plain = [row for row in metrics(tmp_path / "runs" / "plain") if row["val_loss"]]
    for row, other in zip(rows, plain, strict=True):
        bins = [float(row[name]) for name in names]
        weights = [1, 1, 2, 4, 8, 16]  # of 32 positions
        mean = sum(loss * weight for loss, weight in zip(bins, weights, strict=True)) / 32
        assert mean == pytest.approx(float(row["val_loss"]), rel=1e-5)
        assert float(row["val_loss"]) == pytest.approx(float(other["val_loss"]), rel=1e-5)
    assert names[0] not in plain[0]
    assert figures(tmp_path / "runs" / "bins")[0][:3] == figures(tmp_path / "runs" / "plain")[0][:3]


def test_a_run_with_recall_tasks_mixed_in_trains_and_resumes_the_same(make_config, tmp_path):
    mixed = ("data.recall_share=0.5", "trainer.sample_tokens=0")
    assert run(make_config("run_id=straight", *mixed), []) == 0
    assert run(make_config("run_id=cut", *mixed, "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    assert run(make_config("run_id=plain", "trainer.sample_tokens=0"), []) == 0
    straight, cut, plain = ([row[2] for row in figures(tmp_path / "runs" / n)] for n in ("straight", "cut", "plain"))
    assert straight == cut
    assert straight != plain
