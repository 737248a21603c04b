"""Attempts that stay at chance are given up, counted, and followed by the next seed."""

from __future__ import annotations

import pytest
import torch

from flashtrain.config.build import ConfigError
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.classification import ClassificationWork
from flashtrain.training.curriculum import Progress, what_follows
from flashtrain.training.loop import Loop
from flashtrain.training.run import run
from flashtrain.training.task import Task

from .conftest import figures, go_on, metrics, stopped_at, summary

pytest.importorskip("numba")

RULE = "restart:{after:2,below:0.6,attempts:3}"
CHANGES = (
    "curriculum=restart", f"curriculum.stages=[{{{RULE},max_steps:9}}]", "images.train_images=24",
    "optimizer.ema_decay=0.8", "model.dropout=0.1", "trainer.max_steps=4", "trainer.val_every_n_steps=2",
    "images.val_images=8", "schedule.decay_fraction=0.5",
)  # fmt: skip
LATER = f"curriculum.stages=[{{max_steps:2}},{{{RULE},max_steps:9}}]"


@pytest.fixture
def chance_below(monkeypatch):
    """Make every seed below a number stay at chance, and every other one leave it."""
    validate = ClassificationWork.validate

    def below(seed: int):
        def judged(self, last):
            found = validate(self, last)
            return found and {**found, "val_accuracy": 0.5 if self.config.seed < seed else 0.9}

        monkeypatch.setattr(ClassificationWork, "validate", judged)

    return below


@pytest.fixture
def begun(monkeypatch):
    """What the fits of a run begin with: step, weights, the optimiser's state, and the running mean."""
    found = []
    original = Loop.on_train_start

    def watched(self, trainer, module):
        state = {"model": module.model.state_dict(), "mean": module.average.state()}
        moments = trainer.optimizers[0].state_dict()["state"]
        state |= {f"{n}": {k: v for k, v in each.items() if torch.is_tensor(v)} for n, each in moments.items()}
        flat = {f"{part} {name}": tensor.clone() for part, of in state.items() for name, tensor in of.items()}
        found.append((trainer.global_step, flat))
        original(self, trainer, module)

    monkeypatch.setattr(Loop, "on_train_start", watched)
    return found


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(folder) -> list[tuple[str, ...]]:
    return [(row["train_loss"], row["val_loss"], row["lr"], row["grad_norm"]) for row in metrics(folder)]


def newest(folder) -> dict:
    return ckpt.newest(folder / "checkpoints")[1]


def test_a_stage_that_never_leaves_chance_begins_again_with_the_next_seed_and_is_counted(
    image_config, tmp_path, chance_below
):
    chance_below(3)
    assert run(image_config(*CHANGES, "run_id=a"), []) == 0
    folder = tmp_path / "runs" / "a"
    said = summary(folder)
    assert (said["status"], said["steps"]) == ("finished", 2 + 2 + 4)
    assert (said["seed"], said["failed_seeds"], said["failed_steps"]) == (3, 2, 4)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
    assert said["tokens"] == int(rows[-1]["tokens"]) == 8 * 8192
    log = (folder / "train.log").read_text()
    assert "stage 1: seed 1 has 50.0% right at step 2, 2 steps after it began, and is given up" in log
    assert "stage 1 of 1 from step 4: images, attempt 3 of 3 (seed 3), given up if below 60% after 2 steps" in log
    assert "step 8/8" in log


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_attempt_is_the_run_that_begins_with_its_seed(image_config, tmp_path, chance_below, optimizer):
    chance_below(3)
    changes = (*CHANGES, f"optimizer={optimizer}")
    assert run(image_config(*changes, "run_id=third"), []) == 0
    assert run(image_config(*changes, "seed=3", "run_id=alone"), []) == 0
    third, alone = tmp_path / "runs" / "third", tmp_path / "runs" / "alone"
    assert losses(third)[4:] == losses(alone)
    assert losses(third)[:2] != losses(alone)[:2]
    for part in ("state_dict", "average"):
        assert same(newest(third)[part], newest(alone)[part])


def test_a_stage_that_leaves_chance_is_not_begun_again(image_config, tmp_path, chance_below):
    chance_below(1)
    assert run(image_config(*CHANGES, "run_id=a"), []) == 0
    said = summary(tmp_path / "runs" / "a")
    assert (said["steps"], said["seed"], said["failed_seeds"], said["failed_steps"]) == (4, 1, 0, 0)
    assert "given up," not in (tmp_path / "runs" / "a" / "train.log").read_text()


def test_only_the_validation_after_so_many_steps_gives_up(image_config):
    config = image_config(*CHANGES, "curriculum.stages=[{restart:{after:4,below:0.6},max_steps:9}]")
    low, high = {"val_accuracy": 0.599}, {"val_accuracy": 0.6}
    here = Progress(first_step=10)
    assert what_follows(config, here, 12, low) is None and what_follows(config, here, 16, low) is None
    assert what_follows(config, here, 14, high) is None and what_follows(config, here, 14, None) is None
    assert what_follows(config, here, 14, low) == Progress(
        first_step=14, tokens_before=4 * 8192, failed_here=1, failed=1, failed_steps=4
    )


@pytest.mark.parametrize(
    ("stages", "stop"), [*((CHANGES[1], stop) for stop in (1, 2, 3, 6)), *((LATER, stop) for stop in (2, 4, 5))]
)
def test_stopped_anywhere_and_resumed_it_is_equal_bit_for_bit(
    image_config, tmp_path, monkeypatch, chance_below, stages, stop
):
    chance_below(2)
    changes = (*CHANGES, stages)
    assert run(image_config(*changes, "run_id=straight"), []) == 0
    with stopped_at(stop, monkeypatch):
        assert run(image_config(*changes, "run_id=cut"), []) == 143
    assert go_on(tmp_path, "cut") == 0
    straight, cut = (tmp_path / "runs" / name for name in ("straight", "cut"))
    assert figures(cut) == figures(straight)
    for key in ("steps", "tokens", "seed", "failed_seeds", "failed_steps"):
        assert summary(cut)[key] == summary(straight)[key]
    assert summary(cut)["failed_seeds"] == 1


@pytest.mark.parametrize(("stages", "border"), [(CHANGES[1], 2), (LATER, 2), (LATER, 4)])
def test_killed_without_warning_in_an_attempt_it_goes_on_from_that_attempts_beginning(
    image_config, tmp_path, monkeypatch, chance_below, stages, border
):
    chance_below(2)
    changes = (*CHANGES, stages, "trainer.checkpoint_every_n_steps=50")
    assert run(image_config(*changes, "run_id=straight"), []) == 0
    step = Task.training_step

    def dying(self, batches, index):
        if self.global_step == border + 1:
            raise RuntimeError("killed")
        step(self, batches, index)

    monkeypatch.setattr(Task, "training_step", dying)
    assert run(image_config(*changes, "run_id=cut"), []) == 1
    monkeypatch.setattr(Task, "training_step", step)
    assert newest(tmp_path / "runs" / "cut")["flashtrain"]["step"] == border
    assert go_on(tmp_path, "cut") == 0
    assert figures(tmp_path / "runs" / "cut") == figures(tmp_path / "runs" / "straight")


def test_out_of_time_at_the_border_the_failed_seed_is_counted_and_the_next_one_goes_on(
    image_config, tmp_path, chance_below
):
    chance_below(2)
    changes = (*CHANGES, "curriculum.stages=[{restart:{after:1,attempts:3},max_steps:9}]")
    assert run(image_config(*changes, "run_id=straight"), []) == 0
    assert run(image_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    said = summary(tmp_path / "runs" / "cut")
    assert (said["steps"], said["seed"], said["failed_seeds"]) == (1, 2, 1)
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    assert figures(tmp_path / "runs" / "cut") == figures(tmp_path / "runs" / "straight")


def test_when_all_seeds_stay_at_chance_the_run_fails_and_says_so_again_on_resume(image_config, tmp_path, chance_below):
    chance_below(9)
    assert run(image_config(*CHANGES, "run_id=a"), []) == 1
    said = summary(tmp_path / "runs" / "a")
    assert (said["status"], said["steps"], said["seed"]) == ("failed", 6, 3)
    assert (said["failed_seeds"], said["failed_steps"]) == (3, 6)
    log = tmp_path / "runs" / "a" / "train.log"
    complaint = "stage 1: none of the seeds 1, 2, 3 had 60% right after 2 steps"
    assert complaint in log.read_text()
    length = len(log.read_text())
    assert go_on(tmp_path, "a") == 1
    assert complaint in log.read_text()[length:]
    again = summary(tmp_path / "runs" / "a")
    for key in ("status", "steps", "tokens", "seed", "failed_seeds", "failed_steps"):
        assert again[key] == said[key]


def test_a_later_stage_begins_again_with_what_it_began_with_and_other_draws(
    image_config, tmp_path, chance_below, begun
):
    chance_below(3)
    changes = (*CHANGES, LATER, "images.train_images=null", "trainer.checkpoint_every_n_steps=1")
    assert run(image_config(*changes, "run_id=a"), []) == 0
    (_, _), (first, at_first), (second, at_second), (third, at_third) = begun
    assert (first, second, third) == (2, 4, 6)
    assert same(at_first, at_second) and same(at_first, at_third)
    assert len(at_first) > 20 and any(name.startswith("mean") for name in at_first)
    rows = metrics(tmp_path / "runs" / "a")
    assert len({rows[n]["train_loss"] for n in (2, 4, 6)}) == 3
    assert len({rows[n]["lr"] for n in (2, 4, 6)}) == 1
    said = summary(tmp_path / "runs" / "a")
    assert (said["steps"], said["failed_seeds"], said["failed_steps"]) == (8, 2, 4)


def test_labels_are_tried_again_from_the_same_pretrained_weights(image_config, tmp_path, chance_below, begun):
    chance_below(2)
    stages = f"curriculum.stages=[{{pretrain:true,max_steps:2}},{{{RULE},max_steps:9}}]"
    dense = "classifier.dense_classes=0"
    assert run(image_config(*CHANGES, "curriculum=masked_pixels", stages, dense, "run_id=a"), []) == 0
    (_, _), (first, at_first), (second, at_second) = begun
    assert (first, second) == (2, 4) and same(at_first, at_second)
    learned = ckpt.weights_of(ckpt.load(next((tmp_path / "runs" / "a" / "checkpoints").glob("stage-2.*"))))[0]
    assert all(torch.equal(learned[n.removeprefix("model ")], t) for n, t in at_first.items() if n.startswith("model "))
    rows = metrics(tmp_path / "runs" / "a")
    assert rows[4]["lr"] == rows[2]["lr"] == rows[0]["lr"]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("restart:{after:0}", "stages[0].restart.after=0"),
        ("restart:{after:10}", "which has 5 at most"),
        ("restart:{after:2,below:0}", "restart.below=0.0: an accuracy above 0"),
        ("gate:0.7,restart:{after:2,below:0.8}", "a stage is over at its gate=0.7"),
        ("restart:{after:2,attempts:1}", "restart.attempts=1"),
        ("restart:{below:0.6}", "missing key 'restart.after'"),
        ("restart:{after:2,atempts:3}", "unknown key 'restart.atempts': did you mean 'restart.attempts'?"),
        ("pretrain:true,restart:{after:2}", "stages[0].restart: pretraining has no accuracy"),
    ],
)
def test_rules_that_cannot_be_are_refused(image_config, stage, told):
    with pytest.raises(ConfigError) as error:
        image_config("curriculum=restart", f"curriculum.stages=[{{{stage},max_steps:9}}]")
    assert told in str(error.value)


def test_a_later_stage_in_which_no_seed_would_change_anything_is_refused(image_config):
    with pytest.raises(ConfigError) as error:
        image_config("curriculum=restart", LATER, "images.flips=false", "images.brightness=[1.0,1.0]")
    assert "another seed changes nothing else" in str(error.value)
