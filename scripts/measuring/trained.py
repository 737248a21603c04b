"""A trained run as it lies on disk, without its optimiser and without the data it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from flashtrain.config import Config, build
from flashtrain.interchange.classifier_folder import is_classifier_folder, read_classifier
from flashtrain.training.checkpoints import is_checkpoint, load, newest, weights_of


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk, or what was exported of it.

    weights: of its model, by name. averaged: whether they are a running mean. corpus: fingerprint of what it was
    trained on. about: its checkpoint's `flashtrain`, empty of an exported classifier. summary: its summary.json, or an
    exported classifier's result.json.
    """

    id: str
    config: Config
    step: int
    weights: dict[str, Tensor]
    averaged: bool
    corpus: str
    about: dict[str, Any]
    summary: dict[str, Any]


def load_run(folder: Path) -> Run:
    """Configuration and newest checkpoint of a run's folder, or those of a checkpoint file or an exported classifier.

    Raises:
        ValueError: it is none of these, or has no checkpoint that can be read.
    """
    if is_classifier_folder(folder):
        read = read_classifier(folder)
        name = folder.resolve().name
        return Run(name, read.config, read.step, read.weights, read.averaged, read.corpus, {}, read.result)
    if is_checkpoint(folder):
        checkpoint = load(folder)
        return _run(folder.stem, build(checkpoint["flashtrain"]["config"]), checkpoint, {})
    file = folder / "config.yaml"
    if not file.is_file():
        raise ValueError(
            f"{folder}: not the folder of a run, config.yaml is not in it; give runs/<run_id>, a checkpoint, or an "
            "exported classifier's folder"
        )
    found = newest(folder / "checkpoints")
    if found is None:
        raise ValueError(f"{folder}: stopped before its first checkpoint; train it on with resume={folder.name}")
    summary = folder / "summary.json"
    known = json.loads(summary.read_text()) if summary.is_file() else {}
    return _run(folder.resolve().name, build(yaml.safe_load(file.read_text())), found[1], known)


def _run(name: str, config: Config, checkpoint: dict[str, Any], summary: dict[str, Any]) -> Run:
    (weights, averaged), about = weights_of(checkpoint), checkpoint["flashtrain"]
    return Run(
        id=name,
        config=config,
        step=int(about["step"]),
        weights=weights,
        averaged=averaged,
        corpus=about["identity"]["corpus_fingerprint"],
        about=about,
        summary=summary,
    )
