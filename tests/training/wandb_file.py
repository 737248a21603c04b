"""Reads wandb's offline files back: blocks of 32 KiB with LevelDB-style records, each a protobuf `Record`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7


@dataclass
class OfflineRun:
    run_id: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def read_offline_run(folder: Path, all_parts: bool = False) -> OfflineRun:
    """The run that lies in `folder`; with `all_parts` the files of all its processes, in order."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert files and (all_parts or len(files) == 1), files
    run = OfflineRun()
    for file in files:
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            _take(run, record)
    run.config.pop("_wandb", None)
    return run


def _take(run: OfflineRun, record: wandb_internal_pb2.Record) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        assert run.run_id in ("", record.run.run_id)
        run.run_id, run.group = record.run.run_id, record.run.run_group
    updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
    for item in updates:
        _set(run.config, list(item.nested_key) or [item.key], json.loads(item.value_json))
    if kind == "history":
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        run.history.append({key: value for key, value in row.items() if not key.startswith("_")})


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a file: each header is a checksum (4 bytes), a length (2) and a kind: whole, first, middle, last."""
    at, parts = _FILE_HEADER, []
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + _HEADER : at + _HEADER + length])
        at += _HEADER + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
