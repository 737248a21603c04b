"""Documents in a column of a table, through the ``datasets`` library: Parquet files, and data sets of the hub."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flashtrain.config.schema import DataConfig
from flashtrain.data.document import Document
from flashtrain.data.hub import hub_is_off, require_hub

_ROWS = 1024  # that are read at once

_INSTEAD = "give a folder made by save_to_disk as data.name, or use data.source=jsonl, parquet or text with data.path"


def parquet_documents(files: Iterable[tuple[str, Path]], text_key: str) -> Iterator[Document]:
    """The column ``text_key`` of each file, row by row, without a copy on disk. ValueError names an unreadable file."""
    from datasets import load_dataset
    from pyarrow import ArrowException, parquet

    for name, path in files:
        pattern = glob.escape(str(path.absolute()))
        try:
            columns = list(parquet.read_schema(path).names)
            _check_column(columns, text_key, str(path))
            # By itself the library takes the size of the first row group, and none where that is empty.
            rows = load_dataset(
                "parquet", data_files=pattern, split="train", streaming=True, columns=[text_key], batch_size=_ROWS
            )
            for number, row in enumerate(rows, start=1):
                yield _document(row[text_key], text_key, f"{name}:{number}", str(path))
        except (ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def hub_documents(config: DataConfig) -> Iterator[Document]:
    """The column ``data.text_key`` of the data set ``data.name``: "org/set", "org/set@revision", or a local folder."""
    rows = _load_named(config)
    where = f"data.name={config.name}"
    _check_column(rows.column_names, config.text_key, where)
    for number, row in enumerate(rows.select_columns([config.text_key]), start=1):
        yield _document(row[config.text_key], config.text_key, f"{config.name}:{number}", where)


def _load_named(config: DataConfig) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    if not config.name:
        raise ValueError("data.name is not set: data.source=hub needs the name of a data set, such as org/set")
    name, _, revision = config.name.partition("@")
    folder = Path(config.name).expanduser()
    if not folder.is_dir() and not hub_is_off():
        require_hub(f"data.name={name}", f"set HF_HUB_OFFLINE=1 to use a copy in the local cache, {_INSTEAD}")
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            loaded = load_from_disk(str(folder))
        elif folder.is_dir():
            loaded = load_dataset(str(folder), config.subset, split=config.split)
        else:
            loaded = load_dataset(name, config.subset, split=config.split, revision=revision or None)
    except Exception as error:  # unknown set, subset or split, no permission, not in the cache: each its own kind
        wanted = f"data.name={config.name}, data.subset={config.subset}, data.split={config.split}"
        way_out = "" if folder.is_dir() or not hub_is_off() else f"; HF_HUB_OFFLINE forbids the hub: {_INSTEAD}"
        raise ValueError(f"{wanted}: {error}{way_out}") from error
    if isinstance(loaded, DatasetDict):
        if config.split not in loaded:
            raise ValueError(f"data.split={config.split}: {folder} has the splits {', '.join(loaded)}")
        loaded = loaded[config.split]
    return loaded


def _document(text: Any, text_key: str, name: str, where: str) -> Document:
    """A missing value is an empty document."""
    if text is not None and not isinstance(text, str | bytes):
        raise ValueError(f"{where}: data.text_key={text_key} holds {type(text).__name__}, not text ({name})")
    return Document(name, text.encode("utf-8") if isinstance(text, str) else text or b"")


def _check_column(columns: list[str], text_key: str, where: str) -> None:
    if text_key not in columns:
        raise ValueError(f"{where}: no column {text_key!r}; set data.text_key to one of: {', '.join(columns)}")
