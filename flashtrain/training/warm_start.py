"""Starting from another run's weights: of the same sizes, or of a smaller image."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from torch import Tensor, nn

from flashtrain.models.classifier import Classifier
from flashtrain.models.positions import gridwise
from flashtrain.training import checkpoints as ckpt

logger = logging.getLogger("flashtrain")

# Parts that one of the two may lack: they start as in a new model.
_MAY_BE_NEW = ("dense_head.", "pixel_head.", "hidden_pixel")


def warm_start(model: nn.Module, init_from: str, runs_dir: str) -> None:
    """Copy the newest weights of a run into `model`; the running mean of its weights where the run kept one.

    A learned position table of a smaller image is repeated gridwise (see `models.positions.gridwise`).

    Args:
        init_from: a run's id under `runs_dir`, a run's folder, or a checkpoint file.

    Raises:
        ValueError: no such run or checkpoint, or weights of other names or shapes, which are listed.
    """
    path, weights = _weights(init_from, runs_dir)
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


def _weights(init_from: str, runs_dir: str) -> tuple[Path, dict[str, Tensor]]:
    """Path of the checkpoint, and its model's weights by name."""
    for path in (Path(init_from), Path(runs_dir) / init_from):
        if path.is_file():
            checkpoint = ckpt.load(path)
            break
        if path.is_dir():
            found = ckpt.newest(path / "checkpoints")
            if found is None:
                raise ValueError(f"model.init_from={init_from}: {path} has no checkpoint")
            path, checkpoint = found
            break
    else:
        raise ValueError(
            f"model.init_from={init_from}: no such checkpoint, folder, or run in {runs_dir}; give a run's id"
        )
    return path, ckpt.weights_of(checkpoint)[0]


def _fit_table(table: Tensor, positions: int) -> Tensor:
    side_from, side_to = math.isqrt(len(table)), math.isqrt(positions)
    fits = side_from**2 == len(table) and side_to**2 == positions and side_to % max(1, side_from) == 0
    return gridwise(table, side_from, side_to) if fits else table


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))
