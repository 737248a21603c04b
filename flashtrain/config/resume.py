"""Which configuration a resumed run has: the one it was started with, and the few keys that may change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml

from flashtrain.config.build import ConfigError, convert, leaf_types
from flashtrain.config.command_line import overrides_of
from flashtrain.config.schema import Config

_CONF = Path(__file__).resolve().parents[2] / "conf"

# Everything else shaped the weights or the order of the data, and a change would make the run something else.
_MAY_CHANGE = (
    "attention.backend",
    "images.num_workers",
    "logger.",
    "memory.",
    "optimizer.betas",
    "optimizer.clip_norm",
    "optimizer.ema_decay",
    "optimizer.eps",
    "optimizer.lr",
    "optimizer.matrix_lr",
    "optimizer.momentum",
    "optimizer.state",
    "optimizer.weight_decay",
    "plan.",
    "schedule.",
    "sequences.num_workers",
    "trainer.accelerator",
    "trainer.checkpoint_every_n_steps",
    "trainer.checkpoint_format",
    "trainer.compile",
    "trainer.context",
    "trainer.cuda_graph",
    "trainer.devices",
    "trainer.keep_checkpoints",
    "trainer.log_every_n_steps",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.micro_batch_tokens",
    "trainer.peak_tflops",
    "trainer.sample_tokens",
    "trainer.shard",
    "trainer.strategy",
    "trainer.timeout",
    "trainer.val_every_n_steps",
    "trainer.val_tokens",
)


def resumed(composed: Mapping[str, Any], arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The stored configuration of the run that `resume` names, with the command line's changes.

    Args:
        composed: what the command line composes to, had the run been new.
        arguments: the command line.

    Returns:
        The raw configuration, and one line for each key that changes.

    Raises:
        ConfigError: no such run, or a change that a resume cannot honour; both values are named.
    """
    stored = _stored(Path(str(composed["runs_dir"])), str(composed["resume"]))
    given = [argument.lstrip("+~").split("=", 1)[0] for argument in overrides_of(arguments)]
    changes, problems = [], []
    for key, wanted in leaf_types().items():
        if key in ("resume", "run_id", "runs_dir") or not any(_gives(g, key) for g in given):
            continue
        old, new = _get(stored, key), _get(composed, key)
        if _read(old, wanted) == _read(new, wanted):
            continue
        if key.startswith(_MAY_CHANGE):
            changes.append(f"{key}: {old} -> {new}")
            _set(stored, key, new)
        else:
            problems.append(
                f"{key}={new}: the run was started with {old}, and a resume keeps it; start a new run instead"
            )
    if problems:
        raise ConfigError(problems)
    return {**stored, "resume": composed["resume"], "run_id": None, "runs_dir": composed["runs_dir"]}, changes


def _stored(runs_dir: Path, run_id: str) -> dict[str, Any]:
    """What config.yaml of a run holds.

    Raises:
        ConfigError: there is none, or no configuration in it.
    """
    path, given = runs_dir / run_id / "config.yaml", Path(run_id)
    if (given / "config.yaml").is_file() and (given.is_absolute() or not path.is_file()):
        where = "" if given.parent == runs_dir else f" runs_dir={given.parent}"
        raise ConfigError([f"resume={run_id}: is a folder; write the run's id, resume={given.name}{where}"])
    if not path.is_file():
        known = sorted(str(p.parent.relative_to(path.parents[1])) for p in path.parents[1].glob("*/config.yaml"))
        there = f"runs there: {', '.join(known[-8:])}" if known else "there is no run in that folder"
        raise ConfigError([f"resume={run_id}: {path} does not exist; {there}"])
    try:
        stored = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError([f"resume={run_id}: {path} is damaged: {' '.join(str(error).split())}"]) from error
    needed = {field.name for field in dataclasses.fields(Config) if field.default is dataclasses.MISSING}
    missing = needed - set(stored if isinstance(stored, dict) else ())
    if missing:
        raise ConfigError([f"resume={run_id}: {path} is damaged: it lacks {', '.join(sorted(missing))}"])
    return dict(stored)


def _gives(given: str, key: str) -> bool:
    """Whether an override gives a key: it is that key, or the choice of a group whose choices differ in it. What all of
    them have in common stays as the run has it."""
    if not key.startswith(f"{given}."):
        return key == given
    name = key.removeprefix(f"{given}.")
    return any(own == name or own.startswith(f"{name}.") for own in _differing(given))


@functools.cache
def _differing(group: str) -> frozenset[str]:
    """The keys of a group that its choices do not all have, or not with the same value."""
    choices = [_leaves(path) for path in sorted((_CONF / group).glob("*.yaml"))]
    keys = {key for choice in choices for key in choice}
    return frozenset(key for key in keys if any(key not in c or c[key] != choices[0].get(key) for c in choices))


def _leaves(path: Path) -> dict[str, Any]:
    """Dotted key -> value of a choice's file, and of those in its group that it is based on."""
    tree = yaml.safe_load(path.read_text())
    found: dict[str, Any] = {}
    for base in tree.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            found |= _leaves(path.with_name(f"{base}.yaml"))
    pairs = list(tree.items())
    while pairs:
        key, value = pairs.pop()
        if isinstance(value, dict) and value:
            pairs += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            found[key] = value
    return found


def _read(value: Any, wanted: Any) -> Any:
    """4k and 4096 are the same, and so are no list and an empty one."""
    try:
        return convert([] if value is None and get_origin(wanted) is tuple else value, wanted)
    except ValueError:
        return value


def _get(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[last] = value
