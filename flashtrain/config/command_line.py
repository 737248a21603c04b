"""The command line, read before Hydra composes anything.

Hydra's own answer to a mistyped key advises `+key=value`, which then changes nothing, and it stops at the first
problem. Here every override is held against the schema and the groups under conf/, sweeps included, and all problems
come in one message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtrain.config.build import ConfigError, build, convert, leaf_types, optional_sections, unknown_key


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """The key=value arguments, without Hydra's own flags."""
    return [
        argument for argument in arguments if not argument.startswith("-") and ("=" in argument or argument[0] == "~")
    ]


def check_overrides(arguments: Sequence[str], conf: Path) -> None:
    """Hold the overrides of a command line against the schema and the groups in the folder `conf`.

    Raises:
        ConfigError: all problems, each with the key, the value and what to write instead.
    """
    problems: list[str] = []
    seen: set[str] = set()
    right: list[str] = []
    for text in overrides_of(arguments):
        try:
            override = OverridesParser.create().parse_override(text)
        except OverrideParseException as error:
            problems.append(f"{text}: not an override ({str(error).splitlines()[0]}); write key=value")
            continue
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra":
            continue  # Hydra checks its own keys
        own = list(_problems_of(override, key, conf))
        if key in seen:
            own.append(f"{key} is given twice; keep one")
        seen.add(key)
        problems.extend(own)
        if not own and not override.is_sweep_override():
            right.append(text)
    absent = _keys_of_absent_sections(right, conf)
    problems.extend(absent.values())
    right = [text for text in right if text not in absent]
    if problems:
        raise ConfigError([*problems, *_problems_of_the_rest(right, conf)])


def _keys_of_absent_sections(overrides: list[str], conf: Path) -> dict[str, str]:
    """Overrides of keys in sections that are null in this run, each with the complaint about it."""
    inside = [text for text in overrides if text.lstrip("+").split(".")[0] in optional_sections() and "." in text]
    if not inside:
        return {}
    groups = [text for text in overrides if (conf / text.split("=")[0]).is_dir()]
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            composed = compose("config", groups)
    except (HydraException, OmegaConfBaseException):
        return {}  # Hydra tells it when it composes the run
    complaints = {}
    for text in inside:
        section = text.lstrip("+").split(".")[0]
        if composed[section] is None:
            choices = ", ".join(f"{section}={path.stem}" for path in sorted((conf / section).glob("*.yaml")))
            complaints[text] = (
                f"{text}: this run has no section {section}; choose one ({choices}) or an experiment with one"
            )
    return complaints


def _problems_of_the_rest(overrides: list[str], conf: Path) -> Sequence[str]:
    """What is wrong with the combination of those overrides that are right one by one: all comes in one message."""
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            build(OmegaConf.to_container(compose("config", overrides), resolve=True))  # type: ignore[arg-type]
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
        for value in _values(override):
            if value is not None and str(value) not in choices:
                yield _unknown_choice(key, str(value), choices)
    elif key not in types:
        yield unknown_key(key)
    elif override.is_delete():
        yield f"~{key}: a key cannot be removed; set it to null if it allows that"
    else:
        for value in _values(override):
            try:
                if not (isinstance(value, str) and "${" in value):
                    convert(value, types[key])
            except ValueError as error:
                yield f"{key}={value}: {error}"


def _values(override: Override) -> list[Any]:
    """The value, or each one of a sweep; nothing where it is only known later (interpolations, glob)."""
    if override.is_delete():
        return []
    if override.is_sweep_override():
        if not override.is_choice_sweep() or override.is_range_sweep() or override.is_interval_sweep():
            return []
        return [_unquoted(value) for value in override.sweep_iterator()]
    return [_unquoted(override.value())]


def _unquoted(value: Any) -> Any:
    """A sweep yields texts as they were typed; the number in them is read as Hydra would."""
    text = getattr(value, "text", value)  # a quoted string
    if isinstance(text, str):
        parsed = OverridesParser.create().parse_override(f"x={text}").value() if text else text
        return getattr(parsed, "text", parsed)
    return text


def _unknown_choice(group: str, value: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean {group}={close[0]}? " if close else ""
    return f"{group}={value}: no such choice; {hint}There are {', '.join(choices)}"
