"""Learning from images without their labels, then from the labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flashtrain.config.build import ConfigError
from flashtrain.data import images as images_module
from flashtrain.data.images import ImageBatch, LabelledImages
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.loop import Loop
from flashtrain.training.pretraining import PretrainingTask
from flashtrain.training.run import run

from .conftest import figures, go_on, metrics, stopped_at, summary

pytest.importorskip("numba")

ALONE = ("pretrain=masked_pixels", "pretrain.levels=16", "images.train_images=24")
STAGES = "curriculum.stages=[{pretrain:true,max_steps:3},{max_steps:9}]"
BOTH = (
    "curriculum=masked_pixels", STAGES, "pretrain.levels=16", "images.train_images=24", "classifier.dense_classes=0",
    "optimizer.ema_decay=0.8", "model.dropout=0.1", "trainer.max_steps=6", "trainer.val_every_n_steps=2",
    "images.val_images=8",
)  # fmt: skip


@pytest.fixture
def begun(monkeypatch):
    """What the fits of a run begin with: step, weights, and how much state the optimiser has."""
    found = []
    original = Loop.on_train_start

    def watched(self, trainer, module):
        weights = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
        found.append((trainer.global_step, weights, len(trainer.optimizers[0].state)))
        original(self, trainer, module)

    monkeypatch.setattr(Loop, "on_train_start", watched)
    return found


@pytest.mark.parametrize("loss", ["cross_entropy", "l1"])
def test_the_loss_falls_and_validation_reports_it_instead_of_an_accuracy(image_config, tmp_path, loss):
    changes = ("trainer.max_steps=20", "trainer.val_every_n_steps=10", "images.val_images=8", "optimizer.lr=1e-3")
    assert run(image_config(*ALONE, *changes, f"pretrain.loss={loss}", "run_id=a"), []) == 0
    rows = metrics(tmp_path / "runs" / "a")
    first, last = float(rows[0]["train_loss"]), float(rows[-1]["train_loss"])
    if loss == "cross_entropy":
        assert first == pytest.approx(math.log(16), rel=0.02)
    assert last < 0.75 * first
    assert float(rows[-1]["val_loss"]) < float(rows[9]["val_loss"]) and rows[-1]["val_accuracy"] == ""
    said = summary(tmp_path / "runs" / "a")
    assert said["pretraining"] == {
        "name": "masked_pixels", "share": 0.5, "unit": "pixel", "square": 8, "loss": loss, "levels": 16,
    }  # fmt: skip
    assert "val_accuracy" not in said
    log = (tmp_path / "runs" / "a" / "train.log").read_text()
    assert "24 images to train on without labels, 50% of pixels hidden and predicted" in log


@pytest.mark.parametrize("loss", ["cross_entropy", "l1"])
def test_the_loss_is_the_mean_over_the_hidden_pixels_alone(image_config, loss):
    config = image_config(*ALONE, f"pretrain.loss={loss}")
    task = PretrainingTask(config, config.classifier, config.pretrain)
    torch.manual_seed(0)
    task.model.pixel_head.weight.data.normal_()
    images = torch.randint(0, 256, (2, 32, 32), dtype=torch.uint8)
    hidden = torch.stack([torch.randperm(1024)[:5] for _ in range(2)])
    total = task.loss_sum(ImageBatch(images, torch.zeros(2), None, 2, hidden))
    answers = task.model.pixel_head(task.model(images, task.plan(images), hidden))
    expected = 0.0
    for image, places, answer in zip(images, hidden, answers, strict=True):
        levels = image.flatten()[places]
        if loss == "cross_entropy":
            expected += F.cross_entropy(answer, levels.long() // 16)
        else:
            expected += F.l1_loss(answer[:, 0], levels / 255)
    torch.testing.assert_close(total, expected)


def test_labels_do_not_matter(image_config, tmp_path, monkeypatch):
    changes = ("images.train_images=null", "trainer.max_steps=3")
    assert run(image_config(*ALONE, *changes, "run_id=one"), []) == 0
    read = images_module.FreshPathfinder.read

    def mislabelled(self, indices):
        found = read(self, indices)
        return LabelledImages(found.images, 1 - found.labels, found.targets)

    monkeypatch.setattr(images_module.FreshPathfinder, "read", mislabelled)
    assert run(image_config(*ALONE, *changes, "run_id=other"), []) == 0
    assert figures(tmp_path / "runs" / "one") == figures(tmp_path / "runs" / "other")


@pytest.mark.parametrize("positions", ["rope2d", "learned"])
def test_labels_are_learned_from_the_pretrained_weights_without_the_head_of_the_pixels(
    image_config, tmp_path, begun, positions
):
    proximity = "[2.0]" if positions == "rope2d" else "[]"
    where = (f"classifier.positions={positions}", f"classifier.proximity={proximity}")
    assert run(image_config(*BOTH, *where, "trainer.checkpoint_every_n_steps=9", "run_id=a"), []) == 0
    (first, new, _), (second, weights, states) = begun
    assert (first, second) == (0, 3)
    checkpoint = ckpt.load(tmp_path / "runs" / "a" / "checkpoints" / "step-00000003.ckpt")
    learned = ckpt.weights_of(checkpoint)[0]
    assert {*learned} - {*weights} == {"hidden_pixel", "pixel_head.weight"}
    assert all(torch.equal(tensor, learned[name]) for name, tensor in weights.items())
    assert any(not torch.equal(weights[name], new[name]) for name in weights)
    assert states == 0
    rows = metrics(tmp_path / "runs" / "a")
    assert rows[3]["lr"] == rows[0]["lr"] != rows[2]["lr"]  # the warm-up comes again
    assert [row["val_accuracy"] != "" for row in rows] == [False, False, False, True, False, True]
    said = summary(tmp_path / "runs" / "a")
    assert said["pretraining"]["share"] == 0.5 and said["protocol"] == "fixed set" and "val_accuracy" in said
    assert "stage 1 of 2 from step 0: images, pretraining" in (tmp_path / "runs" / "a" / "train.log").read_text()


def test_the_learning_rate_ends_where_the_run_does(image_config, tmp_path):
    assert run(image_config(*BOTH, "schedule.decay_fraction=1.0", "schedule.warmup_steps=1", "run_id=a"), []) == 0
    assert float(metrics(tmp_path / "runs" / "a")[-1]["lr"]) == 0.0


def test_another_run_can_start_from_a_pretraining(image_config, tmp_path, begun):
    assert run(image_config(*ALONE, "trainer.max_steps=2", "run_id=before"), []) == 0
    assert run(image_config("model.init_from=before", "trainer.max_steps=1", "run_id=after"), []) == 0
    learned = ckpt.weights_of(ckpt.newest(tmp_path / "runs" / "before" / "checkpoints")[1])[0]
    assert all(torch.equal(tensor, learned[name]) for name, tensor in begun[1][1].items())
    said = summary(tmp_path / "runs" / "after")
    assert said["init_from"] == "before" and said["pretraining"]["levels"] == 16  # which its weights have in them


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_stopped_anywhere_and_resumed_it_is_equal_bit_for_bit(image_config, tmp_path, monkeypatch, stop):
    assert run(image_config(*BOTH, "run_id=straight"), []) == 0
    with stopped_at(stop, monkeypatch):
        assert run(image_config(*BOTH, "run_id=cut"), []) == 143
    assert go_on(tmp_path, "cut") == 0
    straight, cut = (tmp_path / "runs" / name for name in ("straight", "cut"))
    assert figures(cut) == figures(straight)
    assert summary(cut)["val_accuracy"] == summary(straight)["val_accuracy"]


def test_images_of_a_file_are_pretrained_on_too(image_config, tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", images=draw.integers(0, 256, (40, 32, 32), np.uint8), labels=np.arange(40) % 2)
    generated = ("contour_length", "distractor_count", "seeding_flaw", "train_images")
    changes = ("images=npz", f"images.path={tmp_path / 'a.npz'}", *(f"images.{key}=null" for key in generated))
    assert run(image_config(*BOTH, *changes, "trainer.max_steps=4", "run_id=a"), []) == 0
    assert summary(tmp_path / "runs" / "a")["corpus"]["source"] == "npz"


def test_squares_that_do_not_fit_a_later_stage_are_refused_before_the_first_step(image_config, tmp_path):
    stages = "curriculum.stages=[{pretrain:true,max_steps:1},{pretrain:true,side:44,max_steps:1},{max_steps:9}]"
    changes = ("curriculum=masked_pixels", stages, "pretrain.unit=square", "images.start_border=null")
    assert run(image_config(*changes, "run_id=a"), []) == 1
    assert (
        "pretrain.square=8: must divide the images' side of 44" in (tmp_path / "runs" / "a" / "train.log").read_text()
    )
    assert not (tmp_path / "runs" / "a" / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("pretrain=masked_pixels", "pretrain.share=1"), "pretrain.share=1.0: must lie between 0 and 1"),
        (("pretrain=masked_pixels", "pretrain.levels=257"), "pretrain.levels=257"),
        (("pretrain=masked_pixels", "pretrain.square=0"), "pretrain.square=0"),
        (("pretrain=masked_pixels", "pretrain.loss=l2"), "expected one of cross_entropy, l1"),
        (("pretrain=masked_pixels", "curriculum=path_x"), "no stage of the curriculum pretrains"),
        (("curriculum=path_x", "curriculum.stages=[{pretrain:true,max_steps:1}]"), "write pretrain=masked_pixels"),
        (("curriculum=masked_pixels", "curriculum.stages=[{pretrain:true,gate:0.9,max_steps:1}]"), "has no accuracy"),
    ],
)
def test_pretraining_that_cannot_be_is_refused(image_config, changes, told):
    with pytest.raises(ConfigError) as error:
        image_config(*changes)
    assert told in str(error.value)
