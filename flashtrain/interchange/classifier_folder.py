"""A trained image classifier as a small folder, which says what it is and how right it is.

    weights/<name>/model.safetensors   the weights, the running mean of them where the run kept one
    weights/<name>/config.yaml         the run's configuration, without the places of its machine
    weights/<name>/result.json         accuracy with its standard error, and what it took

`scripts/export.py` writes it, `scripts/evaluate.py` judges it, and `model.init_from` starts from it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from flashtrain.attention import attention
from flashtrain.config import Config, build, to_dict
from flashtrain.interchange.saving import DTYPES
from flashtrain.interchange.tensors import SINGLE, Tensors, write
from flashtrain.interchange.whole_folder import whole_folder
from flashtrain.models.classifier import Classifier

KIND = "flashtrain classifier 1"
CONFIG, RESULT = "config.yaml", "result.json"
_MAX_BYTES = 2**40  # one file: the metadata binds it to its configuration


@dataclass(frozen=True)
class ClassifierFolder:
    """What such a folder holds.

    weights: of the model, by name, float32 on the CPU.
    step: optimiser steps they were trained for. averaged: whether they are a running mean.
    corpus: fingerprint of what they were trained on.
    """

    config: Config
    weights: dict[str, Tensor]
    step: int
    averaged: bool
    corpus: str
    result: dict[str, Any]


def is_classifier_folder(path: Path) -> bool:
    """Whether `path` is such a folder, or what is left of one; a run's folder has checkpoints instead."""
    return (path / SINGLE).is_file() or ((path / RESULT).is_file() and not (path / "checkpoints").exists())


def save_classifier(folder: Path, stored: ClassifierFolder, dtype: str = "float32") -> None:
    """Write the folder, whole or not at all.

    Args:
        folder: must not exist, or be empty.
        dtype: of the weights: float32, bfloat16 or float16.

    Raises:
        ValueError: the folder holds something, an unknown dtype, or weights that are not those of an image classifier.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    _check_kind(stored.config, str(folder))
    wrong = {*stored.weights} ^ {*_shapes(stored.config)}
    if wrong:
        raise ValueError(f"{', '.join(sorted(wrong)[:5])}: not the weights of a finished classifier; train it on")
    text = yaml.safe_dump(to_dict(_anywhere(stored.config)), sort_keys=False)
    metadata = {
        "kind": KIND,
        "config_sha256": _digest(text),
        "step": str(stored.step),
        "averaged": str(stored.averaged),
        "corpus": stored.corpus,
    }
    weights = {name: tensor.detach().cpu().to(DTYPES[dtype]).contiguous() for name, tensor in stored.weights.items()}
    with whole_folder(folder) as partial:
        (partial / CONFIG).write_text(text)
        (partial / RESULT).write_text(json.dumps(stored.result, indent=1) + "\n")
        write(weights, partial, _MAX_BYTES, metadata)


def read_classifier(folder: Path) -> ClassifierFolder:
    """What the folder holds; nothing is half loaded.

    Raises:
        ValueError: a file is missing, cut short or of another folder; tensors are missing, left over or of another
            shape; or config.yaml is not the one that the weights were written with.
    """
    tensors = Tensors(folder, "")
    about = tensors.metadata
    if about.get("kind") != KIND:
        raise ValueError(f"{folder / SINGLE}: no image classifier of this version of flashtrain; export its run again")
    try:
        text, result = (folder / CONFIG).read_text(), json.loads((folder / RESULT).read_text())
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}: {Path(error.filename).name}; copy all of its files") from error
    except ValueError as error:
        raise ValueError(f"{folder / RESULT}: not JSON ({error}); copy the file again") from error
    if about["config_sha256"] != _digest(text):
        raise ValueError(
            f"{folder / CONFIG}: not the one that the weights beside it were written with; copy both of one folder. A "
            "change belongs into a run that starts from it by model.init_from"
        )
    config = build(yaml.safe_load(text))
    _check_kind(config, str(folder))
    wanted = _shapes(config)
    tensors.hold_against(wanted, CONFIG)
    # A copy of each: what safetensors hands out may be the file itself, mapped into memory.
    weights = {name: tensors.read(name).to(torch.float32, copy=True) for name in wanted}
    return ClassifierFolder(config, weights, int(about["step"]), about["averaged"] == "True", about["corpus"], result)


def _check_kind(config: Config, where: str) -> None:
    if config.classifier is None or config.images is None:
        raise ValueError(f"{where}: task={config.task}, on no images; such a folder holds a classifier of images")


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's weights; none is made."""
    assert config.classifier is not None
    with torch.device("meta"):
        model = Classifier(config.model, config.classifier, attention, seq_len=config.seq_len)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _anywhere(config: Config) -> Config:
    """The configuration without names of folders on the machine that it ran on."""
    assert config.images is not None
    images, model, data = config.images, config.model, config.data
    return replace(
        config,
        run_id=None,
        resume=None,
        runs_dir="runs",
        model=replace(model, init_from=_last(model.init_from)),
        images=replace(images, path=_last(images.path), prepared_dir="data/prepared"),
        data=replace(data, path=_last(data.path), prepared_dir="data/prepared"),
    )


def _last(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
