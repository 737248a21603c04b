"""Stages from easy to hard in one run."""

from __future__ import annotations

import os
import signal

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import build
from flashtrain.config.build import ConfigError
from flashtrain.data import images as images_module
from flashtrain.training import memory
from flashtrain.training.averaging import AveragedWeights
from flashtrain.training.classification import ClassificationTask
from flashtrain.training.curriculum import Progress, coming, is_due, stage_config, what_follows
from flashtrain.training.run import run
from flashtrain.training.schedules import learning_rate

from .conftest import ROOT, figures, go_on, metrics, summary

STAGES = "curriculum.stages=[{contour_length:2,max_steps:2},{gate:0.01,max_steps:9},{side:48,max_steps:9}]"
CHANGES = (
    "curriculum=path_x",
    STAGES,
    "images.start_border=null",
    "trainer.max_steps=7",
    "trainer.val_every_n_steps=2",
    "model.dropout=0.1",
    "seq_len=1k",
    "images.val_images=8",
)


@pytest.fixture
def staged(image_config):
    return lambda *changes: image_config(*CHANGES, *changes)


def test_a_stage_has_its_own_images_and_as_many_tokens_as_pixels(staged):
    config = staged()
    first, second, third = (stage_config(config, Progress(stage)) for stage in range(3))
    assert (first.images.contour_length, first.seq_len) == (2, 1024)
    assert second == config
    assert (third.images.side, third.images.contour_length, third.seq_len) == (48, 3, 48 * 48)
    assert first.sequences_per_step == 8 and third.sequences_per_step == 3


def test_a_preset_of_a_stage_brings_its_own_side(image_config):
    config = image_config("curriculum=path_x", "images.side=48", "seq_len=2304")
    assert stage_config(config, Progress(0)).seq_len == 1024
    assert stage_config(config, Progress(1)).images.side == 64


def test_plan_only_says_what_each_stage_costs_and_how_long_all_take(staged, capsys):
    config = staged("plan.only=true", "plan.gpu=h200", "trainer.max_steps=40")
    assert [(stage.seq_len, stage.trainer.max_steps) for stage in coming(config, Progress())] == [
        (1024, 2), (1024, 9), (48 * 48, 29),
    ]  # fmt: skip
    assert [stage.trainer.max_steps for stage in coming(staged("trainer.max_steps=5"), Progress())] == [2, 3, 0]
    assert run(config, []) == 0
    said = capsys.readouterr().out
    assert "a step: 3 x 2304 tokens" in said and "29 steps take" in said  # the last stage in full
    for line in ("1  8 x 1k tokens", "2  8 x 1k tokens", "3  3 x 2304 tokens", "if all open at once"):
        assert line in said


def test_a_stage_that_will_not_fit_ends_the_run_before_the_first_step(staged, tmp_path, monkeypatch):
    forecast_of = memory.forecast_of

    def small(config, *rest):
        if config.seq_len == 48 * 48:
            raise ValueError("this run does not fit")
        return forecast_of(config, *rest)

    monkeypatch.setattr(memory, "forecast_of", small)
    assert run(staged("run_id=a"), []) == 1
    assert "stage 3 of the curriculum: this run does not fit" in (tmp_path / "runs" / "a" / "train.log").read_text()
    assert summary(tmp_path / "runs" / "a")["steps"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        ("experiment=path_x",),
        ("experiment=path_x_dense", "curriculum=path_x", "model.init_from=null", "trainer.max_steps=29000"),
        ("experiment=pathfinder64",),
    ],
)
def test_the_rate_falls_in_the_last_stage_whenever_the_gates_open(changes):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(OmegaConf.to_container(compose("config", list(changes)), resolve=True))
    before = sum(stage.max_steps for stage in config.curriculum.stages[:-1])
    steps = config.trainer.max_steps
    assert learning_rate(before, 1.0, steps, config.schedule) == 1.0
    assert learning_rate(steps - 1, 1.0, steps, config.schedule) == 0.0
    assert steps - before > 0.5 * steps  # and most of the training is on the images that count


def test_a_stage_ends_at_its_gate_or_its_steps_and_the_last_does_not(staged):
    config = staged()
    first, second, last = Progress(0), Progress(1, first_step=2), Progress(2, first_step=4)
    assert what_follows(config, first, 1, None) is None and what_follows(config, first, 2, None).stage == 1
    assert is_due(config, first, 2) and not is_due(config, first, 1)
    assert what_follows(config, second, 4, {"val_accuracy": 0.01}).stage == 2
    assert (
        what_follows(config, second, 4, {"val_accuracy": 0.0}) is None and what_follows(config, second, 4, None) is None
    )
    assert what_follows(config, second, 11, None).stage == 2
    assert what_follows(config, last, 1000, {"val_accuracy": 1.0}) is None and not is_due(config, last, 1000)


def test_a_run_goes_through_its_stages_and_counts_all_tokens(staged, tmp_path, monkeypatch):
    sides = []
    read = images_module.FreshPathfinder.read

    def watched(self, indices):
        sides.append((self.spec.side, self.spec.contour_length))
        return read(self, indices)

    monkeypatch.setattr(images_module.FreshPathfinder, "read", watched)
    assert run(staged("run_id=a"), []) == 0
    rows = metrics(tmp_path / "runs" / "a")
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 8)]
    tokens = [8 * 1024 * step for step in range(1, 5)] + [8 * 1024 * 4 + 3 * 48 * 48 * n for n in range(1, 4)]
    assert [int(row["tokens"]) for row in rows] == tokens
    assert summary(tmp_path / "runs" / "a")["tokens"] == tokens[-1]
    assert [row["stage"] for row in rows] == ["1", "1", "2", "2", "3", "3", "3"]
    assert [s for i, s in enumerate(sides) if i == 0 or s != sides[i - 1]] == [(32, 2), (32, 3), (48, 3)]
    log = (tmp_path / "runs" / "a" / "train.log").read_text()
    assert "step: 8 sequences, 8,192 tokens" in log  # of the stage it begins with
    assert f"right {float(rows[1]['val_accuracy']):.2%}" in log  # what gates look at
    assert summary(tmp_path / "runs" / "a")["corpus"]["spec"]["side"] == 48  # and of the one it ends with
    assert "stage 2 of 3 from step 2" in log and "stage 3 of 3 from step 4: side 48" in log


def test_the_running_mean_soon_forgets_the_stage_before(staged, tmp_path, monkeypatch):
    counted = []
    begin = AveragedWeights.begin
    monkeypatch.setattr(AveragedWeights, "begin", lambda self, step: (counted.append(step), begin(self, step)))
    assert run(staged("run_id=a", "optimizer.ema_decay=0.999"), []) == 0
    assert counted == [1, 2, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 7])
def test_stopped_anywhere_and_resumed_it_is_equal_bit_for_bit(staged, tmp_path, monkeypatch, stop):
    assert run(staged("run_id=straight"), []) == 0
    step = ClassificationTask.training_step

    def stopping(self, batches, index):
        step(self, batches, index)
        if self.global_step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ClassificationTask, "training_step", stopping)
    assert run(staged("run_id=cut"), []) == 143
    monkeypatch.setattr(ClassificationTask, "training_step", step)
    assert summary(tmp_path / "runs" / "cut")["steps"] == stop
    assert go_on(tmp_path, "cut") == 0
    straight, cut = (figures(tmp_path / "runs" / name) for name in ("straight", "cut"))
    assert cut == straight
    assert summary(tmp_path / "runs" / "cut")["corpus"] == summary(tmp_path / "runs" / "straight")["corpus"]
    for name in ("tokens", "stage"):
        assert [row[name] for row in metrics(tmp_path / "runs" / "cut")] == [
            row[name] for row in metrics(tmp_path / "runs" / "straight")
        ]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("preset:lra128,side:64", "start_border=40 (twice seed_distance where None) leaves no room in side=64"),
        ("contour_length:60", "contour_length=60: two contours of 60 dashes of 2 px do not fit into side=32"),
        ("side:36", "classifier.tile=[8, 16]: height and width must divide the side of 36 pixels"),
    ],
)
def test_a_later_stage_that_cannot_be_ends_the_run_before_anything_is_made(image_config, tmp_path, capsys, stage, told):
    changes = ("curriculum=path_x", f"curriculum.stages=[{{max_steps:2}},{{{stage},max_steps:2}},{{max_steps:9}}]")
    assert run(image_config(*changes, "classifier.token_order=tiles", "run_id=a"), []) == 1
    assert f"curriculum.stages[1]: {told}" in (tmp_path / "runs" / "a" / "train.log").read_text()
    assert summary(tmp_path / "runs" / "a")["steps"] == 0
    assert not (tmp_path / "prepared").exists()
    assert run(image_config(*changes, "classifier.token_order=tiles", "plan.only=true", "plan.gpu=h200"), []) == 1
    assert f"curriculum.stages[1]: {told}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("curriculum.stages=[]", "curriculum.stages=[]"),
        ("curriculum.stages=[{max_steps:0}]", r"stages[0].max_steps=0"),
        ("curriculum.stages=[{max_steps:5,gate:1.5}]", r"stages[0].gate=1.5"),
        ("curriculum.stages=[{max_steps:5,sidee:3}]", "unknown key"),
        ("curriculum.stages=[{max_steps:5,preset:lra46}]", "stages=[{'max_steps': 5, 'preset': 'lra46'}]"),
        ("classifier.positions=learned", "stages one by one with model.init_from"),
    ],
)
def test_stages_that_cannot_be_are_refused(image_config, change, told):
    with pytest.raises(ConfigError) as error:
        image_config("curriculum=path_x", change)
    assert told in str(error.value)
