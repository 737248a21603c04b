"""What the first step of a stage, or of another attempt at one, begins with.

A border of stages is a checkpoint like any other, so what lies behind it is made of that checkpoint when it is loaded:
a run that was killed at the border does the same as one that was not.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from flashtrain.config import Config
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.curriculum import Progress, stage_of
from flashtrain.training.task import Task

logger = logging.getLogger(__name__)


def is_anew(progress: Progress, step: int) -> bool:
    """Whether, after `step` steps, another attempt at the first stage begins, with the new weights of its seed."""
    return progress.stage == 0 and progress.failed_here > 0 and step == progress.first_step


def prepare_beginning(task: Task, config: Config, start: ckpt.Start, folder: Path, keeps: bool = True) -> None:
    """Let `task` begin as its stage does, if no step of it has been done yet; `config` is the run's.

    A further attempt takes the weights that the first one had: the task's own, new ones in the first stage, and those
    of the stage before in a later one. The first attempt at a stage with a restart rule keeps them in `folder`, of
    several processes the one that `keeps`. After pretraining the optimiser begins anew, with the running mean of the
    weights where the run keeps one.
    """
    progress = start.progress
    if start.step != progress.first_step:
        return
    if is_anew(progress, start.step):
        task.at_load = lambda checkpoint: _take(checkpoint, _own(task))
        return
    stage, before = stage_of(config, progress.stage), stage_of(config, progress.stage - 1)
    if stage is None or before is None or progress.stage == 0:
        return
    kept = folder / f"stage-{progress.stage + 1}.beginning"
    if progress.failed_here:
        origin = ckpt.load(kept)
    else:
        origin = start.content
        if stage.restart is not None and keeps:
            _keep(start.path, kept)
    if stage.pretrain != before.pretrain:
        task.at_load = lambda checkpoint: _take(checkpoint, _shared(task, origin))
    elif progress.failed_here:
        task.at_load = lambda checkpoint: checkpoint.update(
            {name: origin[name] for name in ("state_dict", "optimizer_states", "average") if name in origin}
        )


def _take(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    """These weights, and nothing of the optimiser and of the running mean."""
    checkpoint |= {"state_dict": state, "optimizer_states": [], "average": {}}


def _own(task: Task) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


def _shared(task: Task, origin: dict[str, Any]) -> dict[str, Any]:
    """The task's state with all weights that `origin` has too: the parts of one kind of stage alone are left out."""
    weights = {f"model.{name}": tensor for name, tensor in ckpt.weights_of(origin)[0].items()}
    own = _own(task)
    left_out = ", ".join(sorted({*weights} - {*own}))
    without = f", without {left_out}" if left_out else ""
    logger.info("weights of the stage before%s; the optimiser begins anew", without)
    return {name: weights.get(name, tensor) for name, tensor in own.items()}


def _keep(path: Path, kept: Path) -> None:
    temporary = kept.with_suffix(".partial")
    shutil.copyfile(path, temporary)
    temporary.replace(kept)
