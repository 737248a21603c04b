"""The corpora a run can name: which documents they hold, in which order, and what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashtrain.config.schema import DataConfig
from flashtrain.data.document import Document
from flashtrain.data.files import find_files, stamp, text_documents
from flashtrain.data.json_lines import json_documents
from flashtrain.data.python_sources import describe_python, python_documents
from flashtrain.data.tables import hub_documents, parquet_documents


def documents(config: DataConfig) -> Iterator[Document]:
    """Every document of the corpus, in an order that is the same each time.

    Raises ValueError for a path, column or data set that is not there, for JSON that does not parse, and the like.
    """
    if config.source == "python":
        return python_documents()
    if config.source == "hub":
        return hub_documents(config)
    files = find_files(config)
    if config.source == "text":
        return text_documents(files)
    return (json_documents if config.source == "jsonl" else parquet_documents)(files, config.text_key)


def describe(config: DataConfig) -> dict[str, Any]:
    """What the corpus is, without its text: ``source``, ``name``, figures, and ``fingerprint`` (SHA-256, hex).

    The fingerprint changes when the documents do. For "python" it is taken over the text; for files over their names,
    sizes and modification times, so that no terabyte is read at each start; a set on the hub is identified by its name,
    subset, split and, where given, revision, so that it can be used offline once it is prepared.
    """
    if config.source == "python":
        return describe_python()
    if config.source == "hub":
        return _describe_hub(config)
    files = find_files(config)
    column = "" if config.source == "text" else config.text_key
    return _describe_files(config.source, str(config.path), files, column)


def _describe_hub(config: DataConfig) -> dict[str, Any]:
    folder = Path(str(config.name)).expanduser()
    if folder.is_dir():
        files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
        return _describe_files("hub", str(folder), files, str(config.subset), config.split, config.text_key)
    wanted = [config.name, config.subset, config.split, config.text_key]
    name = " ".join(part for part in (config.name, config.subset, config.split) if part)
    return {"source": "hub", "name": name, "fingerprint": hashlib.sha256(repr(wanted).encode()).hexdigest()}


def _describe_files(source: str, name: str, files: list[tuple[str, Path]], *more: str) -> dict[str, Any]:
    """more: what else decides which documents come out of the files."""
    return {
        "source": source,
        "name": name,
        "files": len(files),
        "bytes": sum(path.stat().st_size for _, path in files),
        "fingerprint": stamp(files, source, *more),
    }
