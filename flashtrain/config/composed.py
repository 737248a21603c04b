"""From what Hydra has composed to the configuration of a run: new, from a folder's weights, or resumed."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtrain.config.build import ConfigError, build
from flashtrain.config.from_folder import with_folder
from flashtrain.config.resume import resumed
from flashtrain.config.schema import Config


def configured(composed: DictConfig, arguments: list[str], started: int | None) -> tuple[Config, list[str]]:
    """The checked configuration, and one line for each key that a resume changes.

    Args:
        composed: Hydra's.
        arguments: the command line.
        started: processes that torchrun or srun started, which are the run's devices; None if neither did.

    Raises:
        ConfigError: keys or values that cannot be, an interpolation that leads nowhere, or a resume that cannot honour
            a change.
    """
    if started is not None:
        composed.trainer.devices = started
        arguments = [*arguments, f"trainer.devices={started}"]  # a resumed run takes its changes from there
    try:
        raw: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError([str(error)]) from error
    raw, changes = resumed(raw, arguments) if raw.get("resume") else (with_folder(raw, arguments), [])
    return build(raw), changes
