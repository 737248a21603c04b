"""A key that nothing reads could be set and swept without any effect, and nobody would be told."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_type_hints

from flashtrain.config import Config, schema
from flashtrain.config.layout_rules import PARAMETERS
from flashtrain.config.schema import StageConfig

from .reads import reads

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = [section for section in vars(schema).values() if dataclasses.is_dataclass(section)]
FIELDS = {(section.__name__, field.name) for section in SECTIONS for field in dataclasses.fields(section)}

# What only checks a value gives it no effect, and kernels know of no configuration.
NO_READERS = re.compile(r"flashtrain/(config/(\w*rules|ranges|resume)\.py|attention/.*)")


def sources() -> dict[str, str]:
    """The code that may read keys, by path."""
    files = [ROOT / "train.py", *(ROOT / "flashtrain").rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    return {name: text for name, text in texts.items() if not NO_READERS.fullmatch(name)}


def read_by_other_ways() -> Iterator[tuple[str, str]]:
    """The exceptions: fields that take effect although no source names them behind their section."""
    for parameters in PARAMETERS.values():  # what training/layouts.py hands to the layout's function, by these names
        yield from (("LayoutConfig", name) for name in parameters)
    for field in dataclasses.fields(StageConfig):  # what a stage changes of the images, by names in the schema
        if field.default is None and StageConfig(max_steps=1, **{field.name: "given"}).images:
            yield "StageConfig", field.name
    of = get_type_hints(Config)
    for file in (ROOT / "conf").rglob("*.yaml"):  # what other keys take their value from, such as ${model.lr}
        for section, key in re.findall(r"\$\{(\w+)\.(\w+)\}", file.read_text()):
            if section in of:
                yield of[section].__name__, key


def unread(sources: Mapping[str, str], fields: set[tuple[str, str]]) -> set[str]:
    """Those of the fields that have no effect, as Section.key."""
    return {f"{section}.{key}" for section, key in fields - reads(sources.values()) - set(read_by_other_ways())}


def test_every_key_is_read_by_some_code():
    assert unread(sources(), FIELDS) == set()


def test_a_key_that_nothing_reads_is_found_though_others_of_its_name_are_read():
    code = sources()
    reader = "flashtrain/training/run.py"
    assert code[reader].count("trainer_config.keep_checkpoints") == 1
    code[reader] = code[reader].replace("trainer_config.keep_checkpoints", "3")
    code["flashtrain/config/schema.py"] = code["flashtrain/config/schema.py"].replace(
        "    only: bool = False\n", "    only: bool = False\n    window: int = 1\n"
    )
    found = unread(code, FIELDS | {("PlanConfig", "window")})
    assert found == {"TrainerConfig.keep_checkpoints", "PlanConfig.window"}
