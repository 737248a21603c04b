"""Documents in JSON Lines files: one object a line, or one list of objects a file; plain or gzip.

Read line by line rather than as a table: rows may differ in their fields and types, and an error knows its line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flashtrain.data.document import Document


def json_documents(files: Iterable[tuple[str, Path]], text_key: str) -> Iterator[Document]:
    """The field ``text_key`` of each row; a later row without it, or with null, is an empty document.

    Raises ValueError, naming file and line, for what is not JSON, not UTF-8, not an object, or not text, and where the
    first row of a file has no such field.
    """
    for name, path in files:
        for count, (place, row) in enumerate(_rows(path)):
            if not isinstance(row, dict):
                raise ValueError(f"{path}, {place}: not a JSON object such as {{{json.dumps(text_key)}: ...}}")
            if not count and text_key not in row:
                raise ValueError(f"{path}: no column {text_key!r}; set data.text_key to one of: {', '.join(row)}")
            text = row.get(text_key)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{path}, {place}: data.text_key={text_key} holds {type(text).__name__}, not text")
            try:
                yield Document(f"{name}:{count + 1}", (text or "").encode("utf-8"))
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{path}, {place}: half of a surrogate pair (\\ud800 to \\udfff) is not text"
                ) from error


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row and where it stands, for messages."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip().startswith(b"["):
                    rows = _parsed(path, "from line 1 on", line + lines.read())
                    yield from ((f"row {count}", row) for count, row in enumerate(rows, start=1))
                elif line.strip():
                    yield f"line {number}", _parsed(path, f"line {number}", line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file ({error})") from error


def _parsed(path: Path, place: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, {place}: not UTF-8 at byte {error.start} of it ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, {place}: not valid JSON: {error}") from error
