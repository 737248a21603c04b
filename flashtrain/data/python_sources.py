"""The default corpus: the Python source files that every machine with PyTorch has (see data/python_sources.md).

Real text, long documents (the longest over half a million GPT-2 tokens), no network and no copy in the repository. It
differs with the versions of torch and Python, so both, and a fingerprint, are part of its description.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashtrain.data.document import CorpusHash, Document

# Installed packages are no part of the standard library, and its own tests are shipped by some distributions only.
_SKIPPED = {"__pycache__", "site-packages", "dist-packages"}
_SKIPPED_IN_STDLIB = _SKIPPED | {"test", "tests", "idle_test"}


def python_documents() -> Iterator[Document]:
    """Each Python file of torch and of the standard library, sorted by name; empty and non-UTF-8 files are left out."""
    for name, path in _python_files():
        data = path.read_bytes()
        if data and _is_utf8(data):
            yield Document(name, data)


def describe_python() -> dict[str, Any]:
    """Versions, number of files, bytes, and fingerprint of ``python_documents`` (reads them all, in about a second)."""
    files, size, fingerprint = 0, 0, CorpusHash()
    for document in python_documents():
        files += 1
        size += len(document.text)
        fingerprint.add(document)
    torch_version, python_version = importlib.metadata.version("torch"), platform.python_version()
    return {
        "source": "python",
        "name": f"Python files of torch {torch_version} and of the standard library of Python {python_version}",
        "torch": torch_version,
        "python": python_version,
        "files": files,
        "bytes": size,
        "fingerprint": fingerprint.hexdigest(),
    }


def _python_files() -> list[tuple[str, Path]]:
    """(name, path), sorted by name: "stdlib/abc.py", "torch/__init__.py"."""
    torch = importlib.util.find_spec("torch")  # found, not imported: that would take seconds
    if torch is None or not torch.submodule_search_locations:
        raise ValueError("data.source=python needs an installed torch package")
    roots = {
        "torch": (Path(next(iter(torch.submodule_search_locations))), _SKIPPED),
        "stdlib": (Path(sysconfig.get_path("stdlib")), _SKIPPED_IN_STDLIB),
    }
    found = []
    for label, (root, skipped) in roots.items():
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            paths = [Path(folder, name) for name in files if name.endswith(".py")]
            found += [(f"{label}/{path.relative_to(root).as_posix()}", path) for path in paths]
    return sorted(found)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
