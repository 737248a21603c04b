"""An exported classifier is its run: the same weights and accuracy, or an error that says what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import export
import pytest
import torch
from measuring.classified import minutes_of
from measuring.trained import load_run
from safetensors.torch import load_file, save_file

from flashtrain.interchange.classifier_folder import read_classifier

from .conftest import train_run

pytest.importorskip("numba")

SMALL = (
    "experiment=pathfinder32", "model.num_layers=1", "model.hidden_size=32", "classifier.proximity=[2.0]",
    "images.contour_length=3", "images.distractor_count=1", "images.seeding_flaw=false", "images.num_workers=0",
    "images.val_images=40", "trainer.batch_tokens=8k", "trainer.micro_batch_tokens=8k", "trainer.max_steps=3",
    "trainer.val_every_n_steps=3", "trainer.accelerator=cpu", "schedule.warmup_steps=1", "optimizer.ema_decay=0.5",
    "logger=csv",
)  # fmt: skip
ON_VALIDATION = ("--split", "val", "--seed", "0", "--count", "40", "--device", "cpu", "--workers", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def fit(place) -> Callable[..., Path]:
    def call(run_id: str, *changes: str) -> Path:
        return train_run(place / "runs", run_id, *SMALL, f"images.prepared_dir={place / 'prepared'}", *changes)

    return call


@pytest.fixture(scope="module")
def trained(fit) -> Path:
    return fit("first")


@pytest.fixture(scope="module")
def judged(place, trained) -> Path:
    """The run's evaluation on the images of its validation."""
    return judge(trained, place)


@pytest.fixture(scope="module")
def exported(place, trained, judged) -> Path:
    assert export.main([str(trained), "--out", str(place / "weights"), "--result", str(judged)]) == 0
    return place / "weights"


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(exported, tmp_path / "copy")


def judge(folder: Path, place: Path) -> Path:
    out = place / f"{folder.name}.json"
    prepared = ("--prepared-dir", str(place / "prepared"))
    assert evaluate.main([str(folder), *ON_VALIDATION, *prepared, "--out", str(out)]) == 0
    return out


def refused(call: Callable[[list[str]], int], capsys: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        call([str(argument) for argument in arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_it_evaluates_as_its_run_does_and_beside_what_was_published(exported, judged, place, tmp_path, capsys):
    result = json.loads(judge(exported, tmp_path).read_text())
    run = json.loads(judged.read_text())
    for key in ("accuracy", "accuracy_error", "classes", "shortcut", "evaluated"):
        assert result[key] == run[key]
    assert (result["run"]["step"], result["run"]["weights"]) == (3, "running mean")
    assert result["run"]["corpus"] == run["run"]["corpus"] and result["run"]["protocol"] == "generator"
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("as published (lra32)"))
    assert row.split()[3:5] == ["40", f"{100 * run['accuracy']:.2f}"]


def test_the_weights_are_those_of_the_run_number_for_number(exported, trained):
    run, read = load_run(trained), load_run(exported)
    assert run.averaged and read.averaged
    assert read.weights.keys() == run.weights.keys()
    assert all(torch.equal(read.weights[name], tensor) for name, tensor in run.weights.items())
    assert read.corpus == run.corpus


def test_the_result_says_what_was_reached_and_what_it_took(exported, judged, trained):
    result, evaluation = (json.loads(path.read_text()) for path in (exported / "result.json", judged))
    for key in ("accuracy", "accuracy_error", "evaluated"):
        assert result[key] == evaluation[key]
    summary = json.loads((trained / "summary.json").read_text())
    assert (result["seed"], result["steps"], result["tokens"]) == (1, 3, summary["tokens"])
    assert (result["protocol"], result["dense_target"], result["gpu_minutes"]) == ("generator", True, None)
    own = summary["val_accuracy"]
    assert [(each["seed"], each["val_accuracy"]) for each in result["seeds"]] == [(1, own)]
    assert result["failed_seeds"] == int(own < 0.6)


def test_nothing_in_it_names_the_machines_folders(exported, place):
    assert sorted(path.name for path in exported.iterdir()) == ["config.yaml", "model.safetensors", "result.json"]
    for path in exported.iterdir():
        assert str(place).encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o777 == 0o644


def test_a_run_starts_from_it(exported, fit):
    still = ("optimizer.lr=1e-30", "optimizer.matrix_lr=1e-30", "optimizer.weight_decay=0", "optimizer.ema_decay=null")
    run = fit("second", f"model.init_from={exported}", "trainer.max_steps=1", *still)
    before, after = (
        json.loads((folder / "summary.json").read_text()) for folder in (exported.parent / "runs" / "first", run)
    )
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6)
    assert f"weights from {exported}" in (run / "train.log").read_text()


def test_gpu_minutes_count_the_weights_that_it_started_from(exported, trained, fit, tmp_path):
    begun = fit("begun", f"model.init_from={exported}", "trainer.max_steps=1", "optimizer.ema_decay=null")
    first = shutil.copytree(exported, tmp_path / "first")
    for file, change in (
        (begun / "summary.json", {"device": "NVIDIA H200"}),
        (first / "result.json", {"gpu_minutes_in_all": 5.0}),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (begun / "train.log").write_text(
        "2026-01-01 10:00:00,000 run a in b\n2026-01-01 10:03:00,000 finished after 1 steps: b\n"
    )
    config = begun / "config.yaml"
    config.write_text(config.read_text().replace(str(exported), str(first)))
    assert export.main([str(begun), "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["gpu_minutes"], result["gpu_minutes_in_all"]) == (3.0, 8.0)
    assert result["init_from"] == "first" and str(tmp_path) not in json.dumps(result)


def test_half_the_numbers_take_half_the_room_and_read_as_float32(trained, tmp_path):
    for dtype in ("float32", "bfloat16"):
        assert export.main([str(trained), "--out", str(tmp_path / dtype), "--dtype", dtype]) == 0
    whole, half = ((tmp_path / dtype / "model.safetensors").stat().st_size for dtype in ("float32", "bfloat16"))
    assert half < 0.6 * whole
    read, run = load_run(tmp_path / "bfloat16"), load_run(trained)
    for name, tensor in run.weights.items():
        assert torch.equal(read.weights[name], tensor.bfloat16().float())


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors import safe_open

    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata=metadata)


def spoil_tensor(folder: Path) -> None:
    edit(folder, lambda weights: weights.pop("head.bias"))


def add_tensor(folder: Path) -> None:
    edit(folder, lambda weights: weights.update(adapter=torch.zeros(3)))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_config(folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("pooling: max", "pooling: mean"))


def other_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_tensor, "not those of its config.yaml: head.bias is missing. Copy config.yaml and all weights"),
        (add_tensor, "adapter is not part of such a model"),
        (cut_weights, "model.safetensors: not a whole safetensors file"),
        (change_config, "config.yaml: not the one that the weights beside it were written with"),
        (other_weights, "no image classifier of this version of flashtrain"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "config.yaml").unlink(), "No such file or directory: config.yaml; copy all"),
        (lambda folder: (folder / "result.json").write_text("{"), "result.json: not JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_told(copy, capsys, spoil, told):
    spoil(copy)
    assert told in refused(evaluate.main, capsys, copy, "--device", "cpu").replace("\n", " ")


def test_a_run_does_not_start_from_a_spoilt_one(copy, place):
    cut_weights(copy)
    with pytest.raises(AssertionError):  # the run ends with exit code 1
        train_run(place / "runs", "spoilt", *SMALL, f"images.prepared_dir={place / 'prepared'}",
                  f"model.init_from={copy}")  # fmt: skip
    assert "not a whole safetensors file" in (place / "runs" / "spoilt" / "train.log").read_text()


def test_other_seeds_stand_beside_it_and_those_at_chance_are_counted(trained, place, tmp_path, capsys):
    other = shutil.copytree(trained, tmp_path / "second")
    for name, key, value in (("summary.json", "val_accuracy", 0.51), ("config.yaml", "seed", 2)):
        text = (other / name).read_text()
        old = next(line for line in text.splitlines() if line.strip().strip('"').startswith(key))
        new = f'  "{key}": {value},' if name.endswith("json") else f"{key}: {value}"
        (other / name).write_text(text.replace(old, new))
    assert export.main([str(trained), "--out", str(tmp_path / "out"), "--seeds", str(other)]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [(each["seed"], each["failed"]) for each in result["seeds"]][1] == (2, True)
    assert result["failed_seeds"] == 1 + result["seeds"][0]["failed"]
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("weight_decay: 0.01", "weight_decay: 0.2"))
    told = refused(export.main, capsys, trained, "--out", tmp_path / "no", "--seeds", other)
    assert "has optimizer.weight_decay=0.2, not only another seed" in told and not (tmp_path / "no").exists()


def test_an_evaluation_of_another_run_is_refused(trained, judged, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(judged.read_text().replace('"id": "first"', '"id": "nobody"'))
    told = refused(export.main, capsys, trained, "--out", tmp_path / "out", "--result", other)
    assert "is about nobody after step 3, not about first after 3" in told and not (tmp_path / "out").exists()


def test_arguments_of_the_other_task_and_full_folders_are_refused(trained, exported, tmp_path, capsys):
    assert "--shard-gib: is for language models" in refused(
        export.main, capsys, trained, "--out", tmp_path / "out", "--shard-gib", 1
    )
    assert "is not an empty folder" in refused(export.main, capsys, trained, "--out", exported)
    assert "has no summary.json" in refused(export.main, capsys, exported, "--out", tmp_path / "out")


def test_gpu_minutes_are_those_of_all_allocations_without_the_waiting_between():
    log = [
        "2026-01-01 10:00:00,000 run a in runs/a",
        "2026-01-01 10:05:00,000 step 10/99  loss 1",
        "2026-01-01 10:06:00,000 stopped after 10 steps: runs/a",
        "2026-01-01 10:06:00,000 go on with: python train.py resume=a",
        "2026-01-02 09:00:00,000 changed on resume: trainer.max_time: 5 -> 6",
        "2026-01-02 09:00:30,000 run a in runs/a",
        "no line of a log",
        "2026-01-02 09:02:00,000 step 20/99  loss 1",  # and killed
        "2026-01-03 08:00:00,000 run a in runs/a",
        "2026-01-03 08:10:00,000 finished after 99 steps: runs/a",
    ]
    assert minutes_of(log) == pytest.approx(6 + 2 + 10)
    assert minutes_of(log[:8]) == pytest.approx(6 + 2)
    assert minutes_of([]) is None


WEIGHTS = Path(__file__).parents[2] / "weights"


@pytest.mark.parametrize("name", sorted(folder.name for folder in WEIGHTS.iterdir()))
def test_published_weights_say_what_they_reach_and_took(name):
    result = json.loads((WEIGHTS / name / "result.json").read_text())
    stored = read_classifier(WEIGHTS / name)  # raises where the weights do not fit the configuration
    assert stored.step == result["steps"]
    assert result["images"] == 20_000 and result["accuracy_error"] < 0.002
    assert result["accuracy"] > 0.95 and result["gpu_minutes"] > 0
    assert result["protocol"] == "generator" and result["dense_target"] and result["git_commit"]


@pytest.mark.parametrize("name", ["pathfinder32"])  # an image of path_x takes a CPU 20 seconds
def test_published_weights_are_as_right_as_they_say(name, tmp_path):
    out = tmp_path / "judged.json"
    folder = WEIGHTS / name
    assert evaluate.main([str(folder), "--count", "32", "--device", "cpu", "--workers", "1", "--out", str(out)]) == 0
    published = json.loads((folder / "result.json").read_text())["accuracy"]
    noise = 4 * (published * (1 - published) / 32) ** 0.5
    assert abs(json.loads(out.read_text())["accuracy"] - published) < noise + 1 / 32
