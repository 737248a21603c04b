"""The weights in the repository, judged by the command that their readers use."""

from __future__ import annotations

import json
from pathlib import Path

import evaluate
import pytest

from flashtrain.interchange.classifier_folder import read_classifier

WEIGHTS = Path(__file__).parents[2] / "weights"


@pytest.mark.parametrize("name", sorted(folder.name for folder in WEIGHTS.iterdir()))
def test_published_weights_say_what_they_reach_and_took(name):
    result = json.loads((WEIGHTS / name / "result.json").read_text())
    stored = read_classifier(WEIGHTS / name)  # raises where the weights do not fit the configuration
    assert stored.step == result["steps"]
    assert result["images"] == 20_000 and result["accuracy_error"] < 0.002
    assert result["accuracy"] > 0.95 and result["gpu_minutes"] > 0
    assert result["protocol"] == "generator" and result["dense_target"] and result["git_commit"]


def test_the_weights_of_pathfinder32_are_as_right_as_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the images that it makes are kept
    assert evaluate.main([str(WEIGHTS / "pathfinder32"), "--count", "96", "--out", "result.json"]) == 0
    assert json.loads(Path("result.json").read_text())["accuracy"] > 0.85
