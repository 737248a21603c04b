"""Runs small enough to train in a second, in this process."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import Config, build
from flashtrain.config.resume import resumed
from flashtrain.training.run import run
from flashtrain.training.task import Task

ROOT = Path(__file__).resolve().parents[2]

SMALL = [
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
    "seq_len=32",
    "data=text",
    "logger=csv",
    "schedule.warmup_steps=2",
    "trainer.accelerator=cpu",
    "trainer.batch_tokens=256",
    "trainer.micro_batch_tokens=64",
    "trainer.max_steps=12",
    "trainer.log_every_n_steps=1",
    "trainer.val_every_n_steps=5",
    "trainer.val_tokens=256",
    "trainer.checkpoint_every_n_steps=4",
    "trainer.sample_tokens=4",
]


# Runs on images that are small enough to train in a second.
SMALL_IMAGES = [
    "experiment=pathfinder32",
    "model.num_layers=1",
    "model.hidden_size=32",
    "classifier.proximity=[2.0]",
    "images.contour_length=3",
    "images.distractor_count=1",
    "images.seeding_flaw=false",
    "images.num_workers=0",
    "images.val_images=24",
    "seq_len=1k",
    "trainer.batch_tokens=8k",
    "trainer.micro_batch_tokens=4k",
    "trainer.max_steps=5",
    "trainer.val_every_n_steps=5",
    "trainer.checkpoint_every_n_steps=2",
    "logger=csv",
    "schedule.warmup_steps=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
]


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A few documents of words, none like another."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        draw = random.Random(number)
        (folder / f"{number:02d}.txt").write_text(" ".join(draw.choice(words) for _ in range(60)))
    return folder


@pytest.fixture
def overrides(tmp_path: Path, text_folder: Path) -> list[str]:
    """The command line of a small run in `tmp_path`."""
    return [
        *SMALL,
        f"data.path={text_folder}",
        f"data.prepared_dir={tmp_path / 'prepared'}",
        f"runs_dir={tmp_path / 'runs'}",
        "data.val_fraction=0.2",
    ]


@pytest.fixture
def make_config(overrides: list[str]) -> Callable[..., Config]:
    def make(*changes: str) -> Config:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            composed = compose("config", changed(overrides, *changes))
        return build(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]

    return make


@pytest.fixture
def image_config(tmp_path: Path) -> Callable[..., Config]:
    """The configuration of a small run on images, with changes."""
    base = [*SMALL_IMAGES, f"runs_dir={tmp_path / 'runs'}", f"images.prepared_dir={tmp_path / 'prepared'}"]

    def make(*changes: str) -> Config:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            composed = compose("config", changed(base, *changes))
        return build(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]

    return make


def changed(overrides: list[str], *changes: str) -> list[str]:
    """The command line with other values for some keys: a key may be given once only."""
    keys = {change.split("=")[0] for change in changes}
    return [*(text for text in overrides if text.split("=")[0] not in keys), *changes]


def go_on(tmp_path: Path, run_id: str, *changes: str) -> int:
    """Resume in this process, with changes such as trainer.max_steps=9."""
    composed = {"runs_dir": str(tmp_path / "runs"), "resume": run_id}
    for change in changes:
        key, value = change.split("=")
        section, name = key.split(".")
        composed.setdefault(section, {})[name] = int(value) if value.isdigit() else value
    raw, told = resumed(composed, changes)
    return run(build(raw), told)


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def figures(folder: Path) -> list[tuple[str, ...]]:
    """What must be equal bit for bit between two runs: everything but times and memory."""
    names = ("step", "tokens", "train_loss", "val_loss", "lr", "grad_norm")
    return [tuple(row[name] for name in names) for row in metrics(folder)]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@contextlib.contextmanager
def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in here get SIGTERM at the end of a step."""
    training_step = Task.training_step

    def stopping(self: Task, batches: Any, index: int) -> None:
        training_step(self, batches, index)
        if self.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "training_step", stopping)
        yield
