"""Runs on images side by side: seeds of a choice are one row, and those that failed are counted and not left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_classifiers
import pytest
import yaml
from measuring.classified import Classified, error_of_mean

CONFIG: dict[str, Any] = {
    "task": "classification", "seed": 1, "seq_len": 4096, "run_id": None,
    "classifier": {"pooling": "max", "positions": "rope2d", "proximity": [2.0]},
    "attention": {"backend": "auto", "layout": None}, "optimizer": {"name": "muon", "matrix_lr": 0.01},
    "images": {"val_images": 400, "seed": 0, "contour_length": 7, "preset": "lra128", "prepared_dir": "data"},
    "trainer": {"max_steps": 2, "devices": 1},
}  # fmt: skip
LOG = "2026-01-01 10:00:00,000 run {0} in runs\n2026-01-01 10:0{1}:00,000 finished after 2 steps: runs\n"


def make(folder: Path, accuracy: float | None, seed: int = 1, minutes: int = 3, **changes: Any) -> Path:
    """A run of two steps; None for one that failed before its first validation."""
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(CONFIG)) | {"seed": seed}
    for key, value in changes.items():
        config[key] |= value
    summary = {
        "run_id": f"sweep/{folder.name}", "status": "failed" if accuracy is None else "finished", "steps": 2,
        "device": "NVIDIA H200", "git_commit": "1f", "protocol": "generator", "attention_density": 1.0,
    }  # fmt: skip
    lines = ["step,tokens,train_loss,val_loss,tokens_per_second,val_accuracy"]
    if accuracy is not None:
        summary |= {"val_accuracy": accuracy, "val_accuracy_error": (accuracy * (1 - accuracy) / 400) ** 0.5}
        lines += ["1,1000,0.7,,100,", "2,2000,0.6,0.5,100,", f"2,2000,,,,{accuracy}"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "train.log").write_text(LOG.format(folder.name, minutes))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "ablation"
    make(folder / "0", 0.95), make(folder / "1", 0.93, seed=2, minutes=5)
    make(folder / "2", 0.90, classifier={"pooling": "mean"})
    make(folder / "3", 0.51, seed=2, classifier={"pooling": "mean"})
    make(folder / "4", None, classifier={"positions": "learned", "proximity": []})
    make(folder / "5", 0.9, attention={"layout": {"name": "tiles_2d", "reach": 1}})
    make(folder / "6", 0.8, optimizer={"name": "adamw", "matrix_lr": None})
    (folder / "conf").mkdir()
    return folder


def compared(sweep: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    assert compare_classifiers.main([str(sweep), "--out", str(out), *arguments]) == 0
    return json.loads(out.read_text())


def test_a_sweep_becomes_a_table_a_json_and_a_picture(sweep, tmp_path, capsys):
    plot = tmp_path / "new" / "ablation.png"
    result = compared(sweep, tmp_path, "--plot", str(plot))
    assert [row["label"] for row in result["rows"]] == [
        "base", "pooling mean", "positions learned", "layout tiles_2d", "optimizer adamw",
    ]  # fmt: skip
    assert (result["gpu"], result["commit"], result["settings"]["images"]) == ("NVIDIA H200", "1f", 400)
    assert str(tmp_path) not in json.dumps(result)
    assert plot.stat().st_size > 1000
    said = capsys.readouterr().out
    assert "GPU minutes" in said and "94.00" in said


def test_seeds_are_one_row_and_failed_ones_are_counted(sweep, tmp_path):
    base, mean, learned, *_ = compared(sweep, tmp_path)["rows"]
    assert base["accuracy"] == pytest.approx(0.94) and base["gpu_minutes"] == pytest.approx(4)
    assert [run["seed"] for run in base["runs"]] == [1, 2] and base["failed_seeds"] == 0
    assert mean["accuracy"] == pytest.approx(0.705) and mean["accuracy_of_learned"] == pytest.approx(0.9)
    assert mean["failed_seeds"] == 1
    assert (learned["accuracy"], learned["failed_seeds"]) == (None, 1)
    assert learned["differs"] == {"classifier.positions": "learned", "classifier.proximity": []}


def test_the_error_is_that_of_the_seeds_and_not_less_than_that_of_the_images(sweep):
    runs = [Classified.read(sweep / str(number)) for number in range(4)]
    images = (runs[0].accuracy_error + runs[1].accuracy_error) / 2
    assert error_of_mean(runs[:2]) == pytest.approx(max(images, 0.01))  # 0.95 and 0.93: 0.02 / 2
    assert error_of_mean(runs[2:]) == pytest.approx(0.195)
    assert error_of_mean(runs[:1]) == runs[0].accuracy_error


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "sweep/8: is sweep/0 again, with the same seed"),
        ({"images": {"contour_length": 14}}, "images.contour_length is 7 in sweep/0 and 14 in sweep/8"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(sweep, tmp_path, capsys, changes, told):
    make(sweep / "8", 0.9, **changes)
    with pytest.raises(SystemExit):
        compared(sweep, tmp_path)
    assert told in capsys.readouterr().err


def test_a_run_that_goes_on_is_refused(sweep, tmp_path, capsys):
    file = sweep / "0" / "summary.json"
    file.write_text(file.read_text().replace("finished", "stopped"))
    with pytest.raises(SystemExit):
        compared(sweep, tmp_path)
    assert "the run is 'stopped', not finished" in capsys.readouterr().err


def test_the_curve_of_a_curriculum_is_that_of_its_last_stage(tmp_path):
    run, plot = make(tmp_path / "staged", 0.9), tmp_path / "staged.png"
    (run / "metrics.csv").write_text(
        "step,tokens,train_loss,val_loss,tokens_per_second,val_accuracy\n"
        "1,1000,0.7,,100,\n1,1000,,,,0.97\n2,2000,0.6,0.5,100,\n2,2000,,,,0.9\n"
    )
    log = run / "train.log"
    stages = "".join(f"2026-01-01 10:01:00,000 stage {n} of 2 from step {n - 1}: images\n" for n in (1, 2))
    log.write_text(stages + log.read_text())
    row = compared(run, tmp_path, "--plot", str(plot))["rows"][0]
    assert row["runs"][0]["curve"] == [{"seconds": 20.0, "accuracy": 0.9}]
    assert plot.stat().st_size > 1000
