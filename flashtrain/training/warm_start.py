"""Starting from another run's weights, of the same sizes or of a smaller image, or from a folder of weights."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from torch import Tensor, nn

from flashtrain.config import build
from flashtrain.config.hugging_face import is_hugging_face_folder, model_config, read_architecture
from flashtrain.interchange.classifier_folder import is_classifier_folder, read_classifier
from flashtrain.interchange.loading import check_vocabulary_of_run, read_weights
from flashtrain.models.classifier import Classifier
from flashtrain.models.gpt import GPT
from flashtrain.models.positions import gridwise
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.extension import Trained, fit_positions

logger = logging.getLogger("flashtrain")

# Parts that one of the two may lack: they start as in a new model.
_MAY_BE_NEW = ("dense_head.", "pixel_head.", "hidden_pixel")


def warm_start(model: nn.Module, init_from: str, runs_dir: str, identity: ckpt.Identity | None = None) -> None:
    """Copy the newest weights of a run into `model`; the running mean of its weights where the run kept one.

    A learned position table of a smaller image is repeated gridwise (see `models.positions.gridwise`); the positions of
    a shorter context are extended as the model's config says (see `extension.fit_positions`).

    Args:
        init_from: a run's id under `runs_dir`, a run's folder, a checkpoint file, an exported classifier's folder, or a
            Hugging Face folder.
        identity: of the run that starts, whose tokenizer is held against the other run's; None holds nothing.

    Raises:
        ValueError: no such run or checkpoint, another vocabulary, or other names or shapes, which are listed.
    """
    if is_hugging_face_folder(Path(init_from)):
        path, weights, trained = Path(init_from), *_folder_weights(model, init_from)
    else:
        path, weights, trained = _weights(init_from, runs_dir, identity if isinstance(model, GPT) else None)
    if isinstance(model, GPT):
        fit_positions(model, weights, trained)
    wanted = model.state_dict()
    table = "position_embedding.weight"
    if isinstance(model, Classifier) and table in weights and table in wanted:
        weights[table] = _fit_table(weights[table], len(wanted[table]))
    optional = {name for name in {*weights, *wanted} if name.startswith(_MAY_BE_NEW)}
    problems = [
        f"{name} is {_shape(weights.get(name))} there and {_shape(wanted.get(name))} here"
        for name in sorted({*weights, *wanted})
        if _shape(weights.get(name)) != _shape(wanted.get(name))
        and not (name in optional and (name in weights) != (name in wanted))
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"model.init_from={init_from}: {'; '.join(problems[:5])}{more}. Give this run the same sizes")
    new = sorted(name for name in optional if name not in weights)
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name in wanted}, strict=not new)
    logger.info("weights from %s%s", path, f", except {', '.join(new)}" if new else "")


def find_weights(init_from: str, runs_dir: str) -> Path:
    """The checkpoint file or the folder that `init_from` names; ValueError where there is none."""
    for path in (Path(init_from), Path(runs_dir) / init_from):
        if path.is_dir() or ckpt.is_checkpoint(path):
            return path
    raise ValueError(f"model.init_from={init_from}: no such checkpoint, folder, or run in {runs_dir}; give a run's id")


def _weights(init_from: str, runs_dir: str, identity: ckpt.Identity | None) -> tuple[Path, dict[str, Tensor], Trained]:
    """Path of the checkpoint, its model's weights by name, and what they were trained for."""
    path = find_weights(init_from, runs_dir)
    if ckpt.is_checkpoint(path):
        checkpoint = ckpt.load(path)
    elif is_classifier_folder(path):
        exported = read_classifier(path)
        return path, exported.weights, Trained(exported.config.model, exported.config.seq_len)
    else:
        found = ckpt.newest(path / "checkpoints")
        if found is None:
            raise ValueError(f"model.init_from={init_from}: {path} has no checkpoint")
        path, checkpoint = found
    about = checkpoint["flashtrain"]
    if identity is not None:
        where = f"model.init_from={init_from}"
        check_vocabulary_of_run(identity.tokenizer, identity.tokenizer_fingerprint, about, where)
    config = build(about["config"])
    return path, ckpt.weights_of(checkpoint)[0], Trained(config.model, config.seq_len)


def _folder_weights(model: nn.Module, init_from: str) -> tuple[dict[str, Tensor], Trained]:
    """The weights in a Hugging Face folder; of a longer position table the rows that the model has."""
    if not isinstance(model, GPT):
        raise ValueError(f"model.init_from={init_from}: holds a language model, and this run is none; give a run's id")
    found = read_architecture(Path(init_from))
    config = model_config(found, model.config.name, model.config.tokenizer)
    weights = read_weights(Path(init_from), found.model_type, config, found.max_positions)
    table = "position_embedding.weight"
    if table in weights:
        weights[table] = weights[table][: model.seq_len]
    return weights, Trained(config, found.max_positions)


def _fit_table(table: Tensor, positions: int) -> Tensor:
    side_from, side_to = math.isqrt(len(table)), math.isqrt(positions)
    fits = side_from**2 == len(table) and side_to**2 == positions and side_to % max(1, side_from) == 0
    return gridwise(table, side_from, side_to) if fits else table


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))
