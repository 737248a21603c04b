"""What making data on disk once has in common: one process at a time, room for it, and a bar."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_log = logging.getLogger(__name__)

# What a full disk, a quota and a file that grew too large call themselves.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time makes `path`; the operating system frees the lock of a killed one."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("waiting for another process that makes %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def require_room(path: Path, size: int) -> None:
    """Hours of work should not end on a full disk.

    Raises:
        OSError: less than `size` bytes are free where `path` will be.
    """
    free = shutil.disk_usage(path.parent).free
    if free < size:
        message = f"{path} needs {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free there"
        raise OSError(errno.ENOSPC, message)


@contextmanager
def progress_bar(
    about: str, total: int | None, shown: bool, counted: ProgressColumn | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; yields what moves it on. `counted` shows how much of `total` is done."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), counted or MofNCompleteColumn(), TimeElapsedColumn())
    left = TimeRemainingColumn()
    with Progress(*columns, left, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(about, total=total)
        yield lambda amount: bar.advance(task, amount)
