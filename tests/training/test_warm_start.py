"""Weights that go from run to run, and their running mean."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from flashtrain.models.positions import gridwise
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.averaging import AveragedWeights
from flashtrain.training.run import run
from flashtrain.training.warm_start import warm_start

from .conftest import figures, go_on, metrics, summary


def newest(folder):
    return ckpt.newest(folder / "checkpoints")[1]


class TestMean:
    def test_it_is_the_exponential_mean_with_a_quick_start(self):
        model = nn.Linear(1, 1, bias=False)
        average = AveragedWeights(model, 0.9)
        expected = None
        for step in range(1, 40):
            nn.init.constant_(model.weight, float(step))
            average.begin(step)
            average.take_in()
            decay = min(0.9, (1 + step) / (10 + step))
            expected = float(step) if expected is None else decay * expected + (1 - decay) * step
        assert average.state()["weight"].item() == pytest.approx(expected, rel=1e-5)

    def test_the_models_own_weights_come_back_even_after_an_error(self):
        model = nn.Linear(2, 2)
        average = AveragedWeights(model, 0.5)
        average.begin(1)
        average.take_in()
        mean, own = model.weight.detach().clone(), torch.full((2, 2), 7.0)
        with torch.no_grad():
            model.weight.copy_(own)
        with pytest.raises(RuntimeError), average.in_place():
            assert torch.equal(model.weight, mean)
            raise RuntimeError
        assert torch.equal(model.weight, own)

    def test_validation_takes_the_mean_and_a_resume_goes_on_with_it(self, make_config, tmp_path):
        changes = ("optimizer.ema_decay=0.8", "trainer.val_every_n_steps=12", "trainer.sample_tokens=0")
        assert run(make_config(*changes, "run_id=straight"), []) == 0
        assert run(make_config("trainer.val_every_n_steps=12", "trainer.sample_tokens=0", "run_id=plain"), []) == 0
        assert run(make_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
        assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
        straight, plain, cut = (tmp_path / "runs" / name for name in ("straight", "plain", "cut"))
        assert [row[2] for row in figures(straight)] == [row[2] for row in figures(plain)]  # training is the same
        assert summary(straight)["val_loss"] != summary(plain)["val_loss"]
        assert figures(cut)[1:] == figures(straight)[1:]
        assert all(torch.equal(t, newest(cut)["average"][n]) for n, t in newest(straight)["average"].items())


class TestWarmStart:
    def test_a_run_begins_where_the_other_ended(self, make_config, tmp_path):
        assert run(make_config("run_id=first"), []) == 0
        # The learning rate is too small to move anything, so the first validation is the other run's last.
        still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")
        for place in ("first", str(tmp_path / "runs" / "first")):
            name = "second" if place == "first" else "third"
            assert run(make_config(f"model.init_from={place}", f"run_id={name}", *still), []) == 0
            after = float(metrics(tmp_path / "runs" / name)[-1]["val_loss"])
            assert after == pytest.approx(summary(tmp_path / "runs" / "first")["val_loss"], rel=1e-6)

    def test_the_mean_is_taken_where_there_is_one(self, make_config, tmp_path):
        assert run(make_config("run_id=first", "optimizer.ema_decay=0.8"), []) == 0
        still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")
        assert run(make_config("model.init_from=first", "run_id=second", *still), []) == 0
        after = float(metrics(tmp_path / "runs" / "second")[-1]["val_loss"])
        assert after == pytest.approx(summary(tmp_path / "runs" / "first")["val_loss"], rel=1e-6)

    def test_other_sizes_are_refused_by_name(self, make_config, tmp_path):
        assert run(make_config("run_id=first", "trainer.max_steps=1"), []) == 0
        assert run(make_config("run_id=second", "model.init_from=first", "model.hidden_size=64"), []) == 1
        told = (tmp_path / "runs" / "second" / "train.log").read_text()
        assert "blocks.0.attention.output.weight is [32, 32] there and [64, 64] here" in told

    def test_a_run_that_does_not_exist_is_refused(self, make_config, tmp_path):
        assert run(make_config("run_id=second", "model.init_from=nobody"), []) == 1
        assert "model.init_from=nobody: no such" in (tmp_path / "runs" / "second" / "train.log").read_text()

    def test_that_is_told_before_images_are_made(self, image_config, tmp_path):
        assert run(image_config("run_id=second", "model.init_from=nobody", "images.train_images=20"), []) == 1
        assert "model.init_from=nobody: no such" in (tmp_path / "runs" / "second" / "train.log").read_text()
        assert not (tmp_path / "prepared").exists()

    def test_a_resumed_run_does_not_start_over(self, make_config, tmp_path):
        assert run(make_config("run_id=first"), []) == 0
        assert run(make_config("run_id=straight", "model.init_from=first"), []) == 0
        assert run(make_config("run_id=cut", "model.init_from=first", "trainer.max_time=0s"), []) == 0
        assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
        straight, cut = (figures(tmp_path / "runs" / name) for name in ("straight", "cut"))
        assert [row[2] for row in cut] == [row[2] for row in straight]

    def test_weights_of_the_generator_protocol_bring_it_along(self, image_config, tmp_path):
        assert run(image_config("run_id=fresh", "trainer.max_steps=1"), []) == 0
        fixed = ("images.train_images=20", "classifier.dense_classes=0", "trainer.max_steps=1")
        newest = f"{tmp_path}/runs/fresh/checkpoints/step-00000001.ckpt"
        for name, init_from in (("alone", None), ("from", "fresh"), ("further", "from"), ("file", newest)):
            given = () if init_from is None else (f"model.init_from={init_from}",)
            assert run(image_config(*fixed, *given, f"run_id={name}"), []) == 0
            said = summary(tmp_path / "runs" / name)
            expected = ("fixed set", False) if name == "alone" else ("generator", True)
            assert (said["protocol"], said["dense_target"]) == expected
            told = f"from the weights of {init_from} the result has protocol generator and dense_target True"
            assert (told in (tmp_path / "runs" / name / "train.log").read_text()) == (name != "alone")
        shutil.rmtree(tmp_path / "runs" / "fresh")
        assert go_on(tmp_path, "from", "trainer.max_steps=2") == 0
        assert summary(tmp_path / "runs" / "from")["protocol"] == "generator"

    def test_learned_positions_of_a_smaller_image_are_repeated_and_a_new_dense_head_stays_new(
        self,
        image_config,
        tmp_path,
    ):
        learned = ("classifier.positions=learned", "classifier.proximity=[]", "trainer.max_steps=1")
        assert run(image_config(*learned, "run_id=small", "classifier.dense_classes=0"), []) == 0
        from flashtrain.training.classification import ClassificationTask

        config = image_config(*learned, "images.side=64", "seq_len=4k")
        model = ClassificationTask(config, config.classifier).model
        fresh = model.dense_head.weight.detach().clone()
        warm_start(model, "small", str(tmp_path / "runs"))
        table = newest(tmp_path / "runs" / "small")["state_dict"]["model.position_embedding.weight"]
        assert torch.equal(model.position_embedding.weight, gridwise(table, 32, 64))
        assert torch.equal(model.dense_head.weight, fresh)
