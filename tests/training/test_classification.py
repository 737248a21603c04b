"""Runs on images: the same promises as for text, and the losses by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flashtrain.config.build import ConfigError
from flashtrain.training.classification import dense_loss_sum
from flashtrain.training.run import run

from .conftest import figures, go_on, metrics, summary

pytest.importorskip("numba")


def test_a_run_reports_its_accuracy_its_protocol_and_its_dense_target(image_config, tmp_path):
    assert run(image_config("run_id=a"), []) == 0
    said = summary(tmp_path / "runs" / "a")
    assert (said["status"], said["protocol"], said["dense_target"]) == ("finished", "generator", True)
    assert 0 <= said["val_accuracy"] <= 1
    error = math.sqrt(said["val_accuracy"] * (1 - said["val_accuracy"]) / 24)
    assert said["val_accuracy_error"] == pytest.approx(error)
    last = metrics(tmp_path / "runs" / "a")[-1]
    assert float(last["val_accuracy"]) == said["val_accuracy"] and last["val_perplexity"] == ""
    assert said["corpus"]["spec"]["contour_length"] == 3


def test_the_first_losses_are_those_of_guessing(image_config, tmp_path):
    assert run(image_config("run_id=both", "trainer.max_steps=1"), []) == 0
    assert run(image_config("run_id=label", "trainer.max_steps=1", "classifier.dense_classes=0"), []) == 0
    both, label = (float(metrics(tmp_path / "runs" / name)[0]["train_loss"]) for name in ("both", "label"))
    assert label == pytest.approx(math.log(2), rel=0.02)
    assert both == pytest.approx(math.log(2) + math.log(3), rel=0.02)


@pytest.mark.parametrize("train_images", ["null", "24"])
def test_a_run_stopped_and_resumed_is_equal_bit_for_bit(image_config, tmp_path, train_images):
    changes = (f"images.train_images={train_images}", "model.dropout=0.1")
    assert run(image_config(*changes, "run_id=straight"), []) == 0
    assert run(image_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert summary(tmp_path / "runs" / "cut")["steps"] == 1
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = (figures(tmp_path / "runs" / name) for name in ("straight", "cut"))
    assert cut[1:] == straight[1:]


def test_readers_in_other_processes_bring_the_same_images(image_config, tmp_path):
    assert run(image_config("run_id=none", "trainer.max_steps=3"), []) == 0
    assert run(image_config("run_id=two", "trainer.max_steps=3", "images.num_workers=2"), []) == 0
    assert figures(tmp_path / "runs" / "none") == figures(tmp_path / "runs" / "two")


def test_micro_batches_do_not_change_the_step(image_config, tmp_path):
    assert run(image_config("run_id=two", "trainer.max_steps=2"), []) == 0
    assert run(image_config("run_id=one", "trainer.max_steps=2", "trainer.micro_batch_tokens=8k"), []) == 0
    two, one = (metrics(tmp_path / "runs" / name) for name in ("two", "one"))
    for a, b in zip(two, one, strict=True):
        assert float(a["train_loss"]) == pytest.approx(float(b["train_loss"]), rel=1e-5)
        assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=1e-4)


def test_a_seq_len_that_is_not_the_number_of_pixels_is_refused(image_config, tmp_path):
    assert run(image_config("run_id=wrong", "seq_len=2k"), []) == 1
    assert (
        "images of 32 x 32 have 1024 pixels, one token each; write seq_len=1k"
        in (tmp_path / "runs" / "wrong" / "train.log").read_text()
    )


def test_an_unknown_preset_is_refused_by_name(image_config):
    with pytest.raises(ConfigError, match=r"images\.preset='lra33': expected one of .*; did you mean lra32\?"):
        image_config("images.preset=lra33")


def test_other_images_are_refused_on_resume(image_config, tmp_path):
    assert run(image_config("run_id=a", "trainer.max_time=0s"), []) == 0
    with pytest.raises(ConfigError, match=r"images\.seed"):
        go_on(tmp_path, "a", "images.seed=5")


def test_the_dense_loss_is_the_mean_over_an_images_drawn_pixels():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 4, 3)
    targets = torch.randint(0, 4, (2, 4, 4), dtype=torch.uint8)
    targets[1] = 0
    targets[1, 0, 0] = 2
    expected = 0.0
    for image, classes in zip(logits, targets, strict=True):
        drawn = classes > 0
        expected += F.cross_entropy(image[drawn], classes[drawn].long() - 1)
    torch.testing.assert_close(dense_loss_sum(logits, targets), expected)


def test_an_image_with_nothing_drawn_adds_nothing():
    assert dense_loss_sum(torch.randn(1, 4, 4, 3), torch.zeros(1, 4, 4, dtype=torch.uint8)) == 0
