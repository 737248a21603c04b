"""Finding the files that a data.path names, and reading plain text from them."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashtrain.config.schema import DataConfig
from flashtrain.data.document import Document

_SUFFIXES = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
}


def find_files(config: DataConfig) -> list[tuple[str, Path]]:
    """(name, path) of each file of ``data.path``, sorted by name; names are relative to the folder given.

    A file is taken as it is, a folder is searched with its sub-folders for the suffixes of ``data.source``, and a glob
    (``**`` for any depth) takes every file that matches. Raises ValueError when nothing is found or all of it is empty.
    """
    if not config.path:
        raise ValueError(f"data.path is not set: data.source={config.source} needs a file, a folder or a glob")
    path = Path(config.path).expanduser()
    if path.is_file():
        found, missing = [(path.name, path)], ""
    elif path.is_dir():
        suffixes = _SUFFIXES[config.source]
        inside = [file for file in path.rglob("*") if file.name.endswith(suffixes) and file.is_file()]
        found = [(file.relative_to(path).as_posix(), file) for file in inside]
        missing = f"no file in it or its sub-folders ends in {', '.join(suffixes)}"
    elif glob.has_magic(str(path)):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (absolute patterns too)
        matches = [match for match in matches if match.is_file()]
        root = os.path.commonpath([match.parent for match in matches]) if matches else ""
        found = [(match.relative_to(root).as_posix(), match) for match in matches]
        missing = "no file matches this pattern"
    else:
        found, missing = [], f"there is no such file or folder ({path.absolute()})"
    if not found:
        raise ValueError(f"data.path={config.path}: {missing}")
    if not any(file.stat().st_size for _, file in found):
        what = "the file is empty" if len(found) == 1 else f"all {len(found)} files are empty"
        raise ValueError(f"data.path={config.path}: {what}")
    return sorted(found)


def text_documents(files: Iterable[tuple[str, Path]]) -> Iterator[Document]:
    """Each file as one document, its bytes untouched."""
    for name, path in files:
        yield Document(name, path.read_bytes())


def stamp(files: Iterable[tuple[str, Path]], *more: str) -> str:
    """SHA-256 over names, sizes and modification times, and ``more``: changes when a file does, without reading it."""
    digest = hashlib.sha256(repr(more).encode())
    for name, path in files:
        status = path.stat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
