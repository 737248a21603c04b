"""Values that stand for other keys, such as `${model.lr}`, put in place; those that lead nowhere are told by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtrain.config.build import ConfigError


def resolved(composed: DictConfig) -> Any:
    """What Hydra has composed as plain dicts, lists and scalars, every interpolation in it resolved.

    Raises:
        ConfigError: interpolations of keys or environment variables that there are not, or that go round in a circle.
    """
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        # It tells of the first one only, and of a circle no more than one key.
        problems = list(_unresolvable(composed)) or [str(error).splitlines()[0]]
        raise ConfigError(problems) from error


def _unresolvable(composed: DictConfig) -> Iterator[str]:
    for key, value in _leaves(OmegaConf.to_container(composed, resolve=False), ""):
        try:
            OmegaConf.select(composed, key)
        except OmegaConfBaseException as error:
            said = str(error).splitlines()[0]
            if "Recursive interpolation" in said:
                said = "leads round in a circle; give one of the keys in it a value of its own"
            yield f"{key}={value}: {said}"


def _leaves(tree: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every key that holds a value, items of lists as `key[0]`."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{key}[{number}]")
    else:
        yield key, tree
