"""The judge of trained runs: its accuracy is the run's own on the same images, and never one of training images."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import measuring.images
import numpy as np
import pytest
import torch
from measuring.discs import find_discs
from measuring.trained import load_run

from flashtrain.data.image_set import split_places
from flashtrain.data.pathfinder import generate, spec_of
from flashtrain.data.pathfinder.statistics import marker_distances, shortcut_accuracy
from flashtrain.training.checkpoints import newest
from flashtrain.training.classification import ClassificationTask

from .conftest import train_run

pytest.importorskip("numba")
Image = pytest.importorskip("PIL.Image")

SPEC = {"contour_length": 3, "distractor_count": 1, "seeding_flaw": False}
SMALL = (
    "experiment=pathfinder32", "model.num_layers=1", "model.hidden_size=32", "classifier.proximity=[2.0]",
    "images.num_workers=0", "images.val_images=60", "seq_len=1k", "trainer.batch_tokens=8k", "logger=csv",
    "trainer.micro_batch_tokens=8k", "trainer.max_steps=3", "trainer.val_every_n_steps=3", "trainer.accelerator=cpu",
    "schedule.warmup_steps=1", "optimizer.ema_decay=null",
)  # fmt: skip


def fit(folder: Path, run_id: str, *changes: str) -> Path:
    """A small run's folder, trained in this process."""
    places = (f"images.prepared_dir={folder / 'prepared'}",)
    return train_run(folder / "runs", run_id, *SMALL, *places, *changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def made() -> Any:
    """The 60 images of a run's validation."""
    return generate(spec_of("lra32", **SPEC), 0, "val", 0, 60)


@pytest.fixture(scope="module")
def undecided(folder, made) -> Path:
    """A checkpoint that gives each class to half of those images: one of a few steps gives all of them the same."""
    run = load_run(fit(folder, "first", "trainer.max_steps=1"))
    model = ClassificationTask(run.config, run.config.classifier).model
    model.load_state_dict(run.weights)
    with torch.no_grad():
        logits, _ = model(torch.from_numpy(made.images))
    _, checkpoint = newest(folder / "runs" / "first" / "checkpoints")
    checkpoint["state_dict"] = dict(checkpoint["state_dict"])
    middle = (logits[:, 1] - logits[:, 0]).median()
    bias = checkpoint["state_dict"]["model.head.bias"] + torch.tensor([1.0, 0.0]) * middle
    checkpoint["state_dict"]["model.head.bias"] = bias
    torch.save(checkpoint, folder / "undecided.ckpt")
    return folder / "undecided.ckpt"


@pytest.fixture(scope="module")
def trained(folder, undecided) -> Path:
    """A run on generated images, with a running mean of its weights."""
    spec = [f"images.{key}={json.dumps(value)}" for key, value in SPEC.items()]
    return fit(folder, "generated", *spec, *gently(undecided), "optimizer.ema_decay=0.5")


def gently(undecided: Path) -> tuple[str, ...]:
    """Train from that checkpoint in steps so small that it stays what it is."""
    return f"model.init_from={undecided}", "optimizer.lr=1e-6", "optimizer.matrix_lr=1e-6"


@pytest.fixture(scope="module")
def npz(folder, made) -> Path:
    np.savez(folder / "val.npz", images=made.images, labels=made.labels.astype(np.int32))
    return folder / "val.npz"


@pytest.fixture(scope="module")
def release(folder, made) -> Path:
    """The same images as the files of a release, in two batches."""
    top = folder / "lra_release" / "pathfinder32" / "curv_contour_length_14"
    (top / "metadata").mkdir(parents=True)
    for batch in (0, 1):
        (top / "imgs" / str(batch)).mkdir(parents=True)
        rows = range(30 * batch, 30 * batch + 30)
        for row in rows:
            Image.fromarray(made.images[row]).save(top / "imgs" / str(batch) / f"sample_{row}.png")
        text = "".join(f"imgs/{batch} sample_{row}.png {row} {made.labels[row]} 1.0 14\n" for row in rows)
        (top / "metadata" / f"{batch}.npy").write_text(text)
    return folder / "lra_release"


@pytest.fixture
def judge(folder, tmp_path) -> Callable[..., dict[str, Any]]:
    """Evaluates as from the command line; the JSON."""

    def call(run: Path, *arguments: Any) -> dict[str, Any]:
        out = tmp_path / "out" / "result.json"
        common = ["--device", "cpu", "--workers", "1", "--out", str(out)]
        assert evaluate.main([str(run), *map(str, arguments), *common]) == 0
        return json.loads(out.read_text())

    return call


@pytest.fixture
def refused(folder, capsys) -> Callable[..., str]:
    """The message of an evaluation that is refused."""

    def call(run: Path, *arguments: Any) -> str:
        with pytest.raises(SystemExit) as stop:
            evaluate.main([str(run), *map(str, arguments), "--device", "cpu", "--workers", "1"])
        assert stop.value.code == 2
        return capsys.readouterr().err

    return call


def own_accuracy(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["val_accuracy"]


def test_on_the_images_of_its_validation_a_run_has_its_own_accuracy(trained, judge, npz):
    generated = judge(trained, "--split", "val", "--seed", 0, "--count", 60)
    assert generated["accuracy"] == pytest.approx(own_accuracy(trained))
    assert all(0.1 < each["accuracy"] < 0.9 for each in generated["classes"])  # or the order would not matter
    from_file = judge(trained, "--npz", npz)
    assert from_file["accuracy"] == generated["accuracy"]
    assert from_file["evaluated"] == {
        "source": "npz", "name": "val.npz", "split": None, "side": 32, "count": 60,
        "fingerprint": from_file["evaluated"]["fingerprint"],
    }  # fmt: skip


def test_the_result_says_what_was_evaluated_where_and_by_whom(trained, judge, capsys):
    result = judge(trained, "--count", 48)
    assert result["commit"] is None or len(result["commit"].removesuffix("+changes")) == 40
    assert result["gpu"] == "none: cpu" and {"torch", "triton", "python"} <= set(result["versions"])
    about = result["evaluated"]
    assert (about["source"], about["name"], about["split"], about["seed"]) == ("generated", "lra32", "test", 12345)
    assert about["spec"]["contour_length"] == 3 and (about["side"], about["count"]) == (32, 48)
    assert result["run"]["id"] == "generated" and result["run"]["step"] == 3
    assert result["run"]["weights"] == "running mean" and result["run"]["protocol"] == "generator"
    assert result["precision"] == "32-true" and result["images_per_second"] > 0
    assert str(trained.parent.parent) not in json.dumps(result)
    printed = capsys.readouterr().out
    assert f"{100 * result['accuracy']:.2f}" in printed and "images/s" in printed and "distance alone" in printed


def test_accuracies_and_their_errors_are_those_of_the_predictions(trained, judge):
    result = judge(trained, "--count", 48)
    made = generate(spec_of("lra32", **SPEC), 12345, "test", 0, 48)
    p = result["accuracy"]
    assert result["accuracy_error"] == pytest.approx(math.sqrt(p * (1 - p) / 48))
    counts = [int((made.labels == c).sum()) for c in (0, 1)]
    assert [(c["class"], c["images"]) for c in result["classes"]] == list(enumerate(counts))
    right = sum(c["images"] * c["accuracy"] for c in result["classes"])
    assert right / 48 == pytest.approx(p)
    expected = shortcut_accuracy(marker_distances(made.markers), made.labels)
    assert result["shortcut"] == {
        "accuracy": pytest.approx(expected), "accuracy_error": pytest.approx(0.5 / math.sqrt(48)), "discs": "known",
    }  # fmt: skip


def test_the_running_mean_is_taken_where_there_is_one_and_else_the_newest_weights(folder, trained, judge):
    for run, name in ((trained, "average"), (folder / "runs" / "first", "state_dict")):
        found = newest(run / "checkpoints")
        wanted = {key.removeprefix("model."): tensor for key, tensor in found[1][name].items()}
        weights = load_run(run).weights
        assert weights.keys() == wanted.keys() and all(torch.equal(weights[key], wanted[key]) for key in wanted)
    own = newest(trained / "checkpoints")[1]["state_dict"]["model.head.weight"]
    assert not torch.equal(load_run(trained).weights["head.weight"], own)
    assert judge(folder / "runs" / "first", "--count", 8)["run"]["weights"] == "newest"


def test_a_slow_evaluation_does_not_say_that_it_does_nothing(trained, judge, monkeypatch, capsys):
    monkeypatch.setattr(measuring.images, "predict", lambda task, source, *_: (np.zeros(source.length, np.int64), 0.05))
    judge(trained, "--count", 8)
    assert "0.05 images/s" in capsys.readouterr().out


def test_batches_do_not_change_the_result(trained, judge, npz):
    whole, parts = judge(trained, "--npz", npz, "--batch", 60), judge(trained, "--npz", npz, "--batch", 7)
    assert whole["accuracy"] == parts["accuracy"] and whole["classes"] == parts["classes"]


def test_another_preset_and_another_size_can_be_evaluated(trained, judge):
    about = judge(trained, "--images", "lra64", "--count", 2)["evaluated"]
    assert (about["name"], about["side"], about["spec"]["contour_length"]) == ("lra64", 64, 14)


def test_the_release_is_judged_on_its_test_part(trained, judge, release, made, npz):
    result = judge(trained, "--release", release, "--side", 32)
    about = result["evaluated"]
    assert (about["source"], about["split"], about["count"]) == ("release", "test", 6)
    assert about["name"] == "pathfinder32/curv_contour_length_14"
    same = judge(trained, "--npz", npz, "--split", "test")
    assert result["accuracy"] == same["accuracy"] and result["classes"] == same["classes"]
    wanted = made.labels[split_places(60)["test"]]
    assert [c["images"] for c in result["classes"]] == [int((wanted == c).sum()) for c in (0, 1)]


def test_discs_are_found_where_nobody_wrote_them_down(trained, judge, npz):
    result = judge(trained, "--npz", npz)
    assert result["shortcut"]["discs"] == "found in the images"


@pytest.mark.parametrize("preset", ["lra32", "lra64", "lra128"])
def test_the_discs_that_are_found_are_the_discs(preset):
    made = generate(spec_of(preset), 1, "test", 0, 60)
    found = find_discs(made.images, torch.device("cpu"))
    straight, crossed = (np.abs(order - made.markers).max((1, 2)) for order in (found, found[:, ::-1]))
    assert (np.minimum(straight, crossed) <= 1).mean() >= 0.95


def test_images_without_discs_have_no_shortcut(trained, judge, folder):
    images = np.zeros((4, 32, 32), np.uint8)
    images[:, 5, :] = 255
    np.savez(folder / "lines.npz", images=images, labels=np.array([0, 0, 1, 1]))
    result = judge(trained, "--npz", folder / "lines.npz")
    assert result["shortcut"] == {"accuracy": None, "why": "no two discs to be found in the images"}


@pytest.mark.parametrize("source", ["release", "npz"])
def test_a_run_on_images_from_disk_is_judged_on_their_test_part_only(folder, judge, refused, request, source):
    path = request.getfixturevalue(source)
    disk = f"images={source}", f"images.path={path}", "classifier.dense_classes=0"
    run = fit(folder, f"on-{source}", *disk, *gently(request.getfixturevalue("undecided")))
    said = json.loads((run / "summary.json").read_text())
    assert (said["protocol"], said["dense_target"]) == ("fixed set", False)
    assert said["corpus"]["source"] == source and said["corpus"]["train_images"] == 48
    assert said["val_accuracy_error"] == pytest.approx(math.sqrt(own_accuracy(run) * (1 - own_accuracy(run)) / 6))
    assert str(folder) not in json.dumps(said["corpus"])
    val, test = judge(run, "--split", "val"), judge(run)
    assert val["accuracy"] == pytest.approx(own_accuracy(run))
    assert val["evaluated"]["fingerprint"] == test["evaluated"]["fingerprint"] == said["corpus"]["fingerprint"]
    assert test["evaluated"]["split"] == "test" and test["evaluated"]["count"] == 6
    assert "was trained on the training part of" in refused(run, "--split", "train")


def test_an_npz_that_the_run_was_trained_on_is_refused_under_any_name(folder, npz, refused, judge):
    run = fit(folder, "own", "images=npz", f"images.path={npz}", "classifier.dense_classes=0")
    other = folder / "renamed.npz"
    shutil.copy(npz, other)
    assert "take --split test" in refused(run, "--npz", other)
    assert judge(run, "--npz", other, "--split", "test")["evaluated"]["count"] == 6


def test_the_training_split_of_generated_images_is_refused(trained, refused, judge):
    told = refused(trained, "--split", "train", "--seed", 0)
    assert "trained on images of this split and seed" in told and "take --split test" in told
    assert judge(trained, "--split", "train", "--seed", 1, "--count", 2)["evaluated"]["split"] == "train"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--npz", "none.npz"], "there is no such file"),
        (["--release", "nowhere"], "there is no such folder"),
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--images", "lra33"], "invalid choice"),
        (["--images", "lra32", "--npz", "a.npz"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_told(trained, refused, arguments, told):
    assert told in refused(trained, *arguments)


def test_more_images_than_there_are_is_told(trained, refused, npz):
    assert "--count 61: there are 60 images" in refused(trained, "--npz", npz, "--count", 61)


def test_a_folder_that_is_no_run_is_told(tmp_path, trained, refused):
    assert "not the folder of a run" in refused(tmp_path)
    shutil.copy(trained / "config.yaml", tmp_path)
    assert "stopped before its first checkpoint" in refused(tmp_path)


def test_a_pretraining_is_told_that_it_knows_no_labels(folder, refused):
    run = fit(folder, "pretraining", "pretrain=masked_pixels", "trainer.max_steps=1")
    assert "stopped in its pretraining, which knows no labels" in refused(run)


def test_dense_targets_are_refused_for_images_from_disk(folder, npz):
    with pytest.raises(ValueError, match=r"classifier\.dense_classes=3: .* write classifier\.dense_classes=0"):
        fit(folder, "dense", "images=npz", f"images.path={npz}")
