"""A folder that is written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` at the end; if that fails nothing of it is left.

    Raises:
        ValueError: `folder` holds something.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp's folders are private, and so are safetensors' files
        for file in partial.iterdir():
            file.chmod(0o644)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
