"""From what Hydra has composed to the configuration of a run: new, from a folder's weights, or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from flashtrain.config.build import build
from flashtrain.config.from_folder import with_folder
from flashtrain.config.interpolations import resolved
from flashtrain.config.resume import resumed
from flashtrain.config.schema import Config


def configured(
    composed: DictConfig, arguments: list[str], started: int | None, again: bool = False
) -> tuple[Config, list[str]]:
    """The checked configuration, and one line for each key that a resume changes.

    Args:
        composed: Hydra's.
        arguments: the command line.
        started: processes that torchrun or srun started, which are the run's devices; None if neither did.
        again: the command line may have been run before by the same job: if the run that `run_id` names is there, it
            goes on as it was.

    Raises:
        ConfigError: keys or values that cannot be, an interpolation that leads nowhere, or a resume that cannot honour
            a change.
    """
    devices = [] if started is None else [f"trainer.devices={started}"]  # a resumed run takes its changes from there
    if started is not None:
        composed.trainer.devices = started
    raw = resolved(composed)
    if again and _has_begun(raw):
        raw["resume"], arguments = raw["run_id"], []
    arguments = [*arguments, *devices]
    raw, changes = resumed(raw, arguments) if raw.get("resume") else (with_folder(raw, arguments), [])
    return build(raw), changes


def _has_begun(raw: dict[str, Any]) -> bool:
    """Whether the run that is to be new has a folder already."""
    run_id = raw.get("run_id")
    if raw.get("resume") or not run_id:
        return False
    return (Path(str(raw["runs_dir"])) / str(run_id) / "config.yaml").is_file()
