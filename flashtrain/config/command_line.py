"""The command line, read before Hydra composes anything.

Hydra's own answer to a mistyped key advises `+key=value`, which then changes nothing, and it stops at the first
problem. Here every override is held against the schema and the groups under conf/, sweeps included, and all problems
come in one message.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtrain.config.build import ConfigError, build, convert, leaf_types, optional_keys, unknown_key
from flashtrain.config.interpolations import resolved


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """The key=value arguments, without Hydra's own flags."""
    return [
        argument
        for argument in arguments
        if not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
    ]


def check_overrides(arguments: Sequence[str], conf: Path) -> None:
    """Hold the overrides of a command line against the schema and the groups in the folder `conf`.

    Raises:
        ConfigError: all problems, each with the key, the value and what to write instead.
    """
    problems = [f"{word!r}: not an override; write key=value" for word in _words(arguments)]
    seen: set[str] = set()
    right: list[Override] = []
    for text in overrides_of(arguments):
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            problems.append(_not_an_override(text, error))
            continue
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra":
            continue  # Hydra checks its own keys
        own = list(_problems_of(override, key, conf))
        if key in seen:
            own.append(f"{key} is given twice; keep one")
        seen.add(key)
        problems.extend(own)
        if not own:
            right.append(override)
    absent = _absent_keys(right, conf)
    problems.extend(absent.values())
    rest = [str(o.input_line) for o in right if o.key_or_group not in absent and not o.is_sweep_override()]
    if problems:
        raise ConfigError([*problems, *_problems_of_the_rest(rest, conf)])


def _words(arguments: Sequence[str]) -> Iterator[str]:
    """Arguments that are neither flags, nor what may be the value of one, nor overrides."""
    for before, argument in itertools.pairwise(["", *arguments]):
        if not before.startswith("-") and not argument.startswith(("-", "~")) and "=" not in argument:
            yield argument


def _not_an_override(text: str, error: HydraException) -> str:
    """The complaint about what Hydra cannot read; in quotes it takes any text, such as a path."""
    key, _, value = text.partition("=")
    quoted = QuotedString(value, Quote.single).with_quotes()
    said = str(error).splitlines()[0]
    return f'{text}: not an override ({said}); write key=value, and a text with special characters as "{key}={quoted}"'


def _absent_keys(overrides: Sequence[Override], conf: Path) -> dict[str, str]:
    """Keys that are right, yet not in this run, for what it chooses of a group; each with the complaint about it."""
    optional = tuple(optional_keys())
    complaints: dict[str, str] = {}
    for override in overrides:
        key = override.key_or_group
        if "." not in key or not any(key == name or key.startswith(f"{name}.") for name in optional):
            continue
        group = key.split(".")[0]
        for who, composed in _composed(overrides, group, conf):
            missing = _missing(composed, key)
            if missing is not None:
                what = f"key {missing}" if missing == key else f"section {missing}"
                choices = ", ".join(_choices_with(missing, conf))
                complaints[key] = (
                    f"{override.input_line}: {who} has no {what}; choose one ({choices}) or an experiment with one"
                )
    return complaints


def _composed(overrides: Sequence[Override], group: str, conf: Path) -> list[tuple[str, Any]]:
    """The runs that a command line makes of its choice, or choices, of a group: what to call each, and its keys."""
    groups = [override for override in overrides if (conf / override.key_or_group).is_dir()]
    fixed = [str(override.input_line) for override in groups if not override.is_sweep_override()]
    swept = [override for override in groups if override.is_sweep_override() and override.key_or_group == group]
    choices = [[f"{group}={value}"] for override in swept for value in _choices_of(override, conf)] or [[]]
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            return [
                (f"the run with {choice[0]}" if choice else "this run",
                 OmegaConf.to_container(compose("config", [*fixed, *choice])))
                for choice in choices
            ]  # fmt: skip
    except (HydraException, OmegaConfBaseException):
        return []  # Hydra tells it when it composes the run


def _missing(tree: Any, key: str) -> str | None:
    """The first part of a dotted key that a tree does not have, or of which it has no more than null."""
    names = key.split(".")
    for end, name in enumerate(names, 1):
        if not isinstance(tree, dict) or name not in tree or (tree[name] is None and end < len(names)):
            return ".".join(names[:end])
        tree = tree[name]
    return None


def _choices_with(key: str, conf: Path) -> Iterator[str]:
    """Choices of the key's group that have it."""
    group, *rest = key.split(".")
    for path in sorted((conf / group).glob("*.yaml")):
        if not rest or _missing(yaml.safe_load(path.read_text()), ".".join(rest)) is None:
            yield f"{group}={path.stem}"


def _problems_of_the_rest(overrides: list[str], conf: Path) -> Sequence[str]:
    """What is wrong with the combination of those overrides that are right one by one: all comes in one message."""
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            build(resolved(compose("config", overrides)))
    except ConfigError as error:
        return error.problems
    except (HydraException, OmegaConfBaseException) as error:
        # It may be a follow-up of what is told already; it is told all the same, as nobody can know that here.
        return [f"the rest does not compose: {str(error).splitlines()[0]}"]
    return []


def _problems_of(override: Override, key: str, conf: Path) -> Iterator[str]:
    types = leaf_types()
    if (conf / key).is_dir():
        choices = sorted(path.stem for path in (conf / key).glob("*.yaml"))
        for value in _choices_of(override, conf):
            if value is None:
                yield f"{override.input_line}: a group is left out by ~{key}; write '~{key}'"
            elif str(value) not in choices:
                yield _unknown_choice(key, str(value), choices)
    elif any(known.startswith(f"{key}.") for known in types):
        first = next(known for known in types if known.startswith(f"{key}."))
        yield f"{override.input_line}: {key} is a section with keys of its own; give one of them, such as {first}=..."
    elif key not in types:
        yield unknown_key(key)
    elif isinstance(override.value(), Glob):
        yield f"{override.input_line}: glob() chooses among the files of a group, and {key} is none; list its values"
    elif override.is_delete():
        yield f"~{key}: a key cannot be removed; set it to null if it allows that"
    else:
        for value in _values(override):
            try:
                if not (isinstance(value, str) and "${" in value):
                    convert(value, types[key])
            except ValueError as error:
                yield f"{key}={value}: {error}"


def _choices_of(override: Override, conf: Path) -> list[Any]:
    """What an override of a group chooses; of glob(...) the files that it stands for."""
    pattern = override.value()
    if not isinstance(pattern, Glob):
        return _values(override)
    there = sorted(path.stem for path in (conf / override.key_or_group).glob("*.yaml"))
    return pattern.filter(there) or [override.get_value_element_as_str()]  # told as a choice that there is not


def _values(override: Override) -> list[Any]:
    """The value, or each one of a sweep; nothing where it is only known later (interpolations)."""
    if override.is_delete():
        return []
    if override.is_sweep_override():
        if not override.is_choice_sweep() or override.is_range_sweep() or override.is_interval_sweep():
            return []
        return [_read(value) for value in override.sweep_iterator()]
    return [override.value()]


def _read(value: Any) -> Any:
    """A sweep yields texts as they were typed: what is in quotes is a text, and numbers are read as Hydra would."""
    if isinstance(value, QuotedString):
        return value.text
    if not isinstance(value, str) or not value:
        return value
    try:
        override = OverridesParser.create().parse_override(f"x={value}")
    except HydraException:  # it was escaped
        return value
    return value if override.is_sweep_override() else override.value()


def _unknown_choice(group: str, value: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean {group}={close[0]}? " if close else ""
    return f"{group}={value}: no such choice; {hint}There are {', '.join(choices)}"
