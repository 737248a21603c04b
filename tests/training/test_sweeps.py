"""A sweep is one process, one folder and one tracked run a job, whatever becomes of the others."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from flashtrain.sweep import prepare

from .conftest import ROOT, changed, metrics, summary
from .wandb_file import read_offline_run


def sweep(overrides: list[str], *more: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, "train.py", "-m", *changed(overrides, *more)],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_sweep_gives_each_job_its_own_folder_and_its_own_tracked_run_in_one_group(overrides, tmp_path):
    done = sweep(
        overrides,
        "logger=wandb",
        "attention=flash,block_sparse",
        "seq_len=256",
        "trainer.batch_tokens=512",
        "trainer.max_steps=4",
        "run_id=both",
        HOME=str(tmp_path),  # no key is configured there: wandb must go offline by itself and never ask
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "both"
    runs = [folder / "0", folder / "1"]
    assert all(summary(run)["status"] == "finished" for run in runs)
    dense, sparse = map(summary, runs)
    assert "attention_layers" not in dense
    assert sparse["attention_layers"][0]["layout"] == "local_global"
    tracked = [read_offline_run(run) for run in runs]
    assert len({record.run_id for record in tracked}) == 2
    for run, record in zip(runs, tracked, strict=True):
        assert record.group == "both"
        assert record.config == yaml.safe_load((run / "config.yaml").read_text())
        losses = [(row["step"], row["train_loss"]) for row in record.history if "train_loss" in row]
        assert losses == [(int(row["step"]), float(row["train_loss"])) for row in metrics(run)]
    with (folder / "sweep.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["finished", "finished"]


def test_a_job_that_fails_stops_no_other_and_the_exit_code_tells(overrides, tmp_path):
    lengths = "seq_len=16k,0.03125k"  # more than there is to hold out, and 32
    done = sweep(overrides, lengths, "trainer.batch_tokens=16k", "trainer.max_steps=2", "run_id=mixed")
    assert done.returncode == 1, done.stdout
    folder = tmp_path / "runs" / "mixed"
    assert [summary(folder / n)["status"] for n in "01"] == ["failed", "finished"]
    assert [yaml.safe_load((folder / n / "config.yaml").read_text())["seq_len"] for n in "01"] == [16384, 32]
    assert "seq_len=16384" in done.stdout
    assert json.loads((folder / "0" / "overrides.json").read_text())[0].startswith("model.num_layers")


def test_a_mistake_in_a_sweep_stops_it_before_the_first_job(overrides, tmp_path):
    done = sweep(overrides, "seqlen=16,32", "run_id=typo")
    assert done.returncode == 1
    assert "did you mean 'seq_len'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_keeps_its_tracked_run(overrides, tmp_path):
    def train(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    train(*changed(overrides, "logger=wandb", "logger.mode=offline", "trainer.max_steps=3", "run_id=kept"))
    folder = tmp_path / "runs" / "kept"
    first = read_offline_run(folder)
    train("resume=kept", f"runs_dir={tmp_path / 'runs'}", "trainer.max_steps=5")
    parts = read_offline_run(folder, all_parts=True)
    assert parts.run_id == first.run_id
    assert [row["step"] for row in parts.history if "train_loss" in row] == [1, 2, 3, 4, 5]
    assert parts.config["trainer"]["max_steps"] == 5


def test_two_runs_of_one_name_never_share_a_folder(make_config, tmp_path):
    from flashtrain.training.run import run

    assert run(make_config("run_id=mine", "trainer.max_steps=2"), []) == 0
    before = (tmp_path / "runs" / "mine" / "metrics.csv").read_text()
    assert run(make_config("run_id=mine", "trainer.max_steps=3"), []) == 1
    assert (tmp_path / "runs" / "mine" / "metrics.csv").read_text() == before


def test_a_sweeps_folder_may_have_any_name_and_its_id_is_one_word(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHTRAIN_SWEEP", "")
    runs = tmp_path / "läufe (1), a=b"
    arguments = [str(ROOT / "train.py"), "-m", f"runs_dir='{runs}'", "run_id='sweep'", "seed=1,2"]
    assert prepare(arguments) == runs / "sweep"
    assert OverridesParser.create().parse_override(arguments[-1]).value() == str(runs / "sweep")
    with pytest.raises(SystemExit, match="runs_dir: holds the whole sweep"):
        prepare([arguments[0], "-m", f"runs_dir={tmp_path}/a,{tmp_path}/b"])
    for name in ("a/b", "a,b", "'../up'"):
        with pytest.raises(SystemExit, match="names the whole sweep"):
            prepare([str(ROOT / "train.py"), "-m", f"runs_dir='{runs}'", f"run_id={name}"])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"runs_dir=.*file: "):
        prepare([str(ROOT / "train.py"), "-m", f"runs_dir={tmp_path / 'file'}", "seed=1,2"])
