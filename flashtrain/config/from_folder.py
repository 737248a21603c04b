"""A run from a Hugging Face folder: the model's shape and tokenizer are the folder's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.config.build import ConfigError
from flashtrain.config.command_line import overrides_of
from flashtrain.config.hugging_face import Architecture, has_tokenizer, is_hugging_face_folder, read_architecture
from flashtrain.config.sizes import parse_size


def with_folder(composed: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration with what the folder that `model.init_from` names settles; as it was if it names none.

    What stands on the command line, a `model=...` included, is held against the folder and not replaced.

    Args:
        composed: what the command line composes to, plain and resolved.
        arguments: the command line.

    Raises:
        ConfigError: a folder whose model ours cannot be, keys that contradict it, or a seq_len that its position table
            does not reach.
    """
    raw: dict[str, Any] = {**composed, "model": dict(composed["model"]), "attention": dict(composed["attention"])}
    init_from = raw["model"].get("init_from")
    if not isinstance(init_from, str) or not is_hugging_face_folder(Path(init_from)):
        return raw
    folder = Path(init_from)
    try:
        found = read_architecture(folder)
    except ValueError as error:
        raise ConfigError([f"model.init_from={init_from}: {error}"]) from error
    given = {argument.lstrip("+~").split("=", 1)[0] for argument in overrides_of(arguments)}
    problems = [*_contradictions(raw, found, given, folder), *_too_long(raw, found, folder)]
    if problems:
        raise ConfigError(problems)
    taken = {key: value for key, value in found.shape.items() if not _is_given(key, given) or raw["model"][key] is None}
    if "rope_scaling" in found.shape:
        taken["rope_scaling"] = _scaling(raw["model"].get("rope_scaling") or {}, found.shape["rope_scaling"], given)
    raw["model"] |= taken | ({} if "model" in given or "model.name" in given else {"name": folder.resolve().name})
    if has_tokenizer(folder) and "model.tokenizer" not in given:
        raw["model"]["tokenizer"] = str(folder)
    if "attention.window" not in given:
        raw["attention"]["window"] = found.window
    return raw


def _is_given(key: str, given: set[str]) -> bool:
    return any(name == f"model.{key}" or name.startswith(f"model.{key}.") for name in given)


def _scaling(here: Mapping[str, Any], there: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """The folder's rotary scaling, with single keys of the command line; all of the latter's if it names a rule."""
    if "model.rope_scaling.rule" in given:
        return dict(here)
    return {**there, **{key: value for key, value in here.items() if f"model.rope_scaling.{key}" in given}}


def _contradictions(raw: Mapping[str, Any], found: Architecture, given: set[str], folder: Path) -> Iterator[str]:
    """Keys of the command line that are not the folder's; null means whatever the folder has.

    Rotary angles are no weights: other ones are a way to read further.
    """
    for key, there in found.shape.items():
        here = raw["model"].get(key)
        if here is None or key.startswith("rope_") or not ("model" in given or _is_given(key, given)):
            continue
        if (float(here) if isinstance(there, float) else here) != there:
            yield f"model.{key}={here}: {folder} has {there}; leave it out, and model=... too, to take the folder's"


def _too_long(raw: Mapping[str, Any], found: Architecture, folder: Path) -> Iterator[str]:
    seq_len = parse_size(raw["seq_len"])
    learned = found.shape["positions"] == "learned"
    if learned and seq_len > found.max_positions and raw["model"].get("position_extension") is None:
        yield (
            f"seq_len={seq_len}: the position table of {folder} has {found.max_positions} rows; write "
            f"seq_len={found.max_positions}, or extend it by model.position_extension=duplicate or interpolate"
        )
