"""Micro-batches are only pieces of a step: rates, dropout and means are those of steps and of targets."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rich.console import Console

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.training.language import LanguageTask
from flashtrain.training.progress import Display
from flashtrain.training.run import run
from flashtrain.training.run_folder import RunFolder
from flashtrain.training.schedules import learning_rate
from flashtrain.training.task import Task
from flashtrain.training.text import TextData

from .conftest import metrics


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_rate_moves_once_a_step_however_many_micro_batches_it_has(make_config, tmp_path, schedule):
    config = make_config("run_id=m", f"schedule={schedule}", "schedule.warmup_steps=4", "optimizer.lr=1")
    assert config.sequences_per_step == 4 * config.sequences_per_micro_batch
    assert run(config, []) == 0
    rates = [float(row["lr"]) for row in metrics(tmp_path / "runs" / "m")]
    assert rates == [learning_rate(step, 1.0, 12, config.schedule) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]


def test_dropout_differs_between_steps_and_micro_batches_and_with_the_seed(make_config, monkeypatch):
    draws: list[torch.Tensor] = []

    def drawing(self, batch):
        draws.append(torch.rand(8))
        return honest(self, batch)

    honest = LanguageTask.loss_sum
    monkeypatch.setattr(LanguageTask, "loss_sum", drawing)
    changes = ("trainer.max_steps=2", "trainer.val_every_n_steps=100", "trainer.sample_tokens=0")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        monkeypatch.setattr(Task, "validate", lambda self, batches: {"val_loss": 0.0})
        assert run(make_config(*changes, f"run_id={name}", f"seed={seed}"), []) == 0
    first, again, other = draws[:8], draws[8:16], draws[16:]
    assert len({tuple(draw.tolist()) for draw in (*first, *other)}) == 16
    assert torch.equal(torch.stack(first), torch.stack(again))


def test_the_held_out_loss_is_the_mean_over_targets_also_where_a_batch_has_none(make_config, tmp_path, monkeypatch):
    """Not the mean of the batches' means, in which a batch without targets would be 0 / 0."""
    seen: list[tuple[float, int]] = []
    honest = LanguageTask.measure

    def uneven(self, last):
        for number, batch in enumerate(batches(self, last)):
            targets = batch.targets.clone()
            targets[:, max(0, 30 - 10 * number) :] = IGNORE
            yield Batch(batch.tokens, targets, None, None, int((targets != IGNORE).sum()))

    def measured(self, batch):
        total = honest(self, batch)
        seen.append((total.item(), batch.num_targets))
        return total

    batches = TextData.validation
    monkeypatch.setattr(TextData, "validation", uneven)
    monkeypatch.setattr(LanguageTask, "measure", measured)
    assert run(make_config("run_id=m", "trainer.max_steps=1"), []) == 0
    assert seen[-1] == (0.0, 0) and len({targets for _, targets in seen}) > 2
    told = float(metrics(tmp_path / "runs" / "m")[-1]["val_loss"])
    assert told == pytest.approx(sum(total for total, _ in seen) / sum(targets for _, targets in seen))


@pytest.mark.parametrize("fraction", ["0", "0.0001"])
def test_too_little_held_out_text_names_the_key(make_config, tmp_path, text_folder, fraction):
    for file in sorted(text_folder.iterdir())[1:]:
        file.unlink()
    assert run(make_config("run_id=m", f"data.val_fraction={fraction}"), []) == 1
    log = (tmp_path / "runs" / "m" / "train.log").read_text()
    assert f"data.val_fraction={float(fraction)}: " in log and "write a larger fraction" in log


def test_each_validation_shows_a_sample(make_config, tmp_path):
    assert run(make_config("run_id=m", "trainer.sample_tokens=7"), []) == 0
    log = (tmp_path / "runs" / "m" / "train.log").read_text()
    assert [step for step in (5, 10, 12) if f"sample at step {step}:\n" in log] == [5, 10, 12]


def test_a_terminal_has_a_bar_over_all_steps_with_the_time_left(tmp_path):
    display = Display(tmp_path / "train.log", 40)
    display.console = Console(force_terminal=True, width=140, record=True)
    try:
        display.start(10)
        display.step(20)
        display.row({"step": 20, "train_loss": 1.5})
        display.stop()
    finally:
        display.close()
    shown = display.console.export_text()
    assert "20/40" in shown and "loss 1.5000" in shown
    assert re.search(r"left (-:--:--|\d+:\d\d:\d\d)", shown)
    assert "step 20/40  loss 1.5000" in (tmp_path / "train.log").read_text()


def test_of_runs_that_start_at_once_under_one_name_one_gets_the_folder(make_config):
    config = make_config("run_id=mine")

    def create(_: int) -> bool:
        try:
            RunFolder.create(config)
        except ValueError as error:
            assert "continue it with resume=mine" in str(error)
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(32))) == 1
