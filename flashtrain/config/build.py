"""From the composed YAML to the typed `Config`, with all problems in one message."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from flashtrain.config.rules import broken_rules
from flashtrain.config.schema import Config
from flashtrain.config.sizes import parse_duration, parse_size


class ConfigError(ValueError):
    """What is wrong with a configuration: every problem, each with the key, its value and what to write instead."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            "\n".join((f"{count} in the configuration:", *(f"  - {problem}" for problem in self.problems)))
        )


def build(raw: Mapping[str, Any]) -> Config:
    """The typed configuration of a plain, resolved mapping.

    Raises:
        ConfigError: unknown or missing keys, wrong types, and combinations that cannot work.
    """
    problems: list[str] = []
    config = _section(Config, raw, "", problems)
    if not problems:
        problems = list(broken_rules(config))
    if problems:
        raise ConfigError(problems)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars: what config.yaml, checkpoints and trackers store."""
    return _plain(dataclasses.asdict(config))


def leaf_types() -> dict[str, Any]:
    """Dotted key -> declared type, for every key that holds a value."""
    return dict(_leaves(Config, ""))


def optional_keys() -> list[str]:
    """Dotted names of what a run may lack: sections that may be null, and keys that may be left out."""
    return list(_optional(Config, ""))


def unknown_key(key: str, known: Sequence[str] | None = None) -> str:
    """The complaint about a key that does not exist, with the nearest of those that do (`known`; None: all)."""
    if known is None:
        known = [*leaf_types(), *(field.name for field in dataclasses.fields(Config))]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:  # the right name in the wrong section, or without one
        last = key.rsplit(".", 1)[-1]
        by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        close = [by_last[name] for name in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.6)]
    return f"unknown key '{key}'" + (f": did you mean '{close[0]}'?" if close else ": see conf/ for the keys there are")


def convert(value: Any, wanted: Any) -> Any:
    """`value` as the declared type.

    Raises:
        ValueError: it is not one; the message says what is expected.
    """
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return convert(value, next(argument for argument in arguments if argument is not type(None)))
    if value is None:
        raise ValueError("expected a value")
    if origin is Annotated:
        return parse_size(value) if arguments[1] == "size" else parse_duration(value)
    if origin is Literal:
        return _choice(value, arguments)
    if origin is tuple:
        return _tuple(value, arguments)
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, Mapping):  # an item of a list, which has no key that could be named
            raise ValueError(f"{value!r} is no section: write {{{dataclasses.fields(wanted)[0].name}: ...}} for it")
        problems: list[str] = []
        section = _section(wanted, value, "", problems)  # type: ignore[arg-type]
        if problems:
            raise ValueError("; ".join(problems))
        return section
    return _scalar(value, wanted)


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value in choices:
        return value
    names = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"expected one of {', '.join(names)}{hint}")


def _tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list such as [a,b]")
    if arguments[-1] is Ellipsis:
        return tuple(convert(item, arguments[0]) for item in value)
    if len(value) != len(arguments):
        raise ValueError(f"expected {len(arguments)} values")
    return tuple(convert(item, argument) for item, argument in zip(value, arguments, strict=True))


def _scalar(value: Any, wanted: type) -> Any:
    if wanted is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)  # YAML reads 1e-3 as a text
        except ValueError:
            raise ValueError("expected a number") from None
        if not math.isfinite(number):
            raise ValueError("expected a finite number")
        return number
    if wanted is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # run_id=17
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    raise ValueError(f"expected {names[wanted]}")


def _section(section: type, raw: Any, prefix: str, problems: list[str]) -> Any:
    if not isinstance(raw, Mapping):
        problems.append(f"{prefix.rstrip('.')}={raw!r}: expected a section with keys of its own")
        return None
    hints = get_type_hints(section, include_extras=True)
    # A section that is an item of a list has no key of its own, nor have the sections in it.
    has_a_key = section is Config or prefix.split(".")[0] in get_type_hints(Config)
    known = None if has_a_key else [f"{prefix}{name}" for name in hints]
    problems.extend(unknown_key(f"{prefix}{key}", known) for key in raw if key not in hints)
    values: dict[str, Any] = {}
    defaults = {f.name: f.default for f in dataclasses.fields(section) if f.default is not dataclasses.MISSING}
    for name, wanted in hints.items():
        key = f"{prefix}{name}"
        if name not in raw and name in defaults:
            values[name] = defaults[name]
        elif name not in raw or (isinstance(raw[name], str) and raw[name] == "???"):
            problems.append(f"missing key '{key}': give it a value with {key}=...")
        elif (inner := _section_type(wanted)) is not None:
            if raw[name] is None and inner is not wanted:
                values[name] = None
            else:
                values[name] = _section(inner, raw[name], f"{key}.", problems)
        else:
            try:
                values[name] = convert(raw[name], wanted)
            except ValueError as error:
                problems.append(f"{key}={raw[name]!r}: {error}")
    return None if problems else section(**values)


def _leaves(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, wanted in get_type_hints(section, include_extras=True).items():
        inner = _section_type(wanted)
        if inner is not None:
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", wanted


def _optional(section: type, prefix: str) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name, wanted in get_type_hints(section, include_extras=True).items():
        inner = _section_type(wanted)
        if inner is not None and inner is wanted:
            yield from _optional(inner, f"{prefix}{name}.")
        elif inner is not None or fields[name].default is not dataclasses.MISSING:
            yield f"{prefix}{name}"


def _section_type(wanted: Any) -> type | None:
    """The dataclass that a declared type is, or may be where it is optional; None for a value."""
    for candidate in (wanted, *(get_args(wanted) if get_origin(wanted) is types.UnionType else ())):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
