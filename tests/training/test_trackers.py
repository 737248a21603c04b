"""Where figures go when a disk is full, a server is out of reach, or nobody has an account."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashtrain.training.trackers import CsvTracker, wandb_mode

from .conftest import ROOT, changed, summary
from .wandb_file import read_offline_run


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("no_account")
def test_wandb_is_online_where_a_key_is_configured_or_it_is_asked_for(monkeypatch, tmp_path):
    assert (wandb_mode("auto"), wandb_mode("online")) == ("offline", "online")
    (tmp_path / ".netrc").write_text("machine example.org login user password secret\n")
    assert wandb_mode("auto") == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert (wandb_mode("auto"), wandb_mode("offline")) == ("online", "offline")
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("auto") == "offline"


def train_out_of_reach(overrides: list[str], *more: str) -> subprocess.CompletedProcess:
    """With a key, and a server that does not answer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    key = {"WANDB_API_KEY": "0123456789" * 4, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}
    return subprocess.run(
        [sys.executable, "train.py", *changed(overrides, "logger=wandb", "trainer.max_steps=3", *more)],
        cwd=ROOT, env={**kept, **key, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_run_whose_server_is_out_of_reach_goes_on_offline(overrides, tmp_path):
    done = train_out_of_reach(overrides, "run_id=alone")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wandb cannot be reached, going on offline" in done.stdout
    history = read_offline_run(tmp_path / "runs" / "alone").history
    assert [row["step"] for row in history if "train_loss" in row] == [1, 2, 3]


def test_online_that_cannot_be_is_an_error_in_a_line(overrides, tmp_path):
    done = train_out_of_reach(overrides, "run_id=alone", "logger.mode=online")
    assert done.returncode == 1
    assert "logger.mode=online: wandb did not start (" in done.stdout and "write logger.mode=offline" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert summary(tmp_path / "runs" / "alone")["status"] == "failed"


def test_metrics_on_a_full_disk_name_the_file():
    tracker = CsvTracker.__new__(CsvTracker)
    tracker.path, tracker.columns, tracker._last = Path("/dev/full"), ("step", "train_loss"), {}
    with pytest.raises(OSError, match=r"No space left on device: cannot write /dev/full; .*resume"):
        tracker.log({"step": 1, "train_loss": 2.0})


def test_a_row_that_a_full_disk_cut_short_goes_on_resume(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss\n1,2.5\n2,2.25\n3,2.5\n4,2.1")
    CsvTracker(path, 2, ("step", "train_loss")).log({"step": 3, "train_loss": 2.125})
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "train_loss"], ["1", "2.5"], ["2", "2.25"], ["3", "2.125"]]
