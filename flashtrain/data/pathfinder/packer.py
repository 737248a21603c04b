"""Generate a split once, with many processes, into a packed file."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from flashtrain.data.pathfinder.images import GENERATOR, PathfinderImages, generate
from flashtrain.data.pathfinder.packed import SUFFIX, PackedImages, encode_header, layout
from flashtrain.data.pathfinder.parameters import PathfinderSpec
from flashtrain.data.preparing import NO_SPACE, locked, progress_bar, require_room

# One task of a worker: some seconds of work, some megabytes to send back.
_TASK_PIXELS = 1 << 22
_TASK_IMAGES = 256


def prepare(
    folder: str | Path,
    spec: PathfinderSpec,
    seed: int,
    split: str,
    count: int,
    *,
    targets: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> PackedImages:
    """Images 0 to count - 1 of a split as a packed file in `folder`, made now or by an earlier call.

    The hash in its name stands for spec, seed, split, count and targets. The images do not depend on `workers`, the
    number of processes (None: one for each core; with 1 this process does the work). The file appears when it is whole:
    an interrupted call leaves at most a hidden one that the next call overwrites. Several processes may call this at
    once. The workers start afresh and import the main script, which must do its work under `if __name__ == "__main__"`.

    Raises:
        ValueError: a wrong argument; a file of that name that is damaged or foreign; contours that do not fit.
        OSError: the disk is full.
        ImportError: numba or Pillow is missing.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", split):
        raise ValueError(f"split={split!r}: it names a file; use letters, digits, '_', '-' and '.', such as 'train'")
    for key, value in (("count", count), ("workers", 1 if workers is None else workers)):
        if value < 1:
            raise ValueError(f"{key}={value}: must be at least 1")
    header = {"generator": GENERATOR, "spec": spec.as_dict(), "seed": int(seed), "split": split}
    header |= {"count": int(count), "targets": targets}
    path = Path(folder) / _name(header)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            if not path.exists():  # else another process has just made it
                _write(path, spec, header, workers or os.cpu_count() or 1, progress)
    packed = PackedImages.open(path)
    packed.require(spec, seed=seed, split=split, count=count, targets=targets)
    return packed


def _name(header: dict[str, Any]) -> str:
    """Readable, and different whenever the file would be."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    return f"pathfinder{header['spec']['side']}-{header['split']}-{digest[:12]}{SUFFIX}"


def _write(path: Path, spec: PathfinderSpec, header: dict[str, Any], workers: int, progress: bool) -> None:
    """Write beside `path` and move it there when it is whole. The caller holds its lock."""
    places, size = layout(header)
    require_room(path, size)
    unfinished = path.with_name(f".{path.name}.unfinished")
    pixels, labels, done = hashlib.sha256(), hashlib.sha256(), 0
    try:
        with (
            unfinished.open("wb") as file,
            closing(_chunks(spec, header, workers)) as chunks,
            progress_bar(f"Pathfinder {header['split']} images", header["count"], progress) as advance,
        ):
            for chunk in chunks:
                for name, (start, _, dtype) in places.items():
                    data = getattr(chunk, name).astype(dtype, copy=False).tobytes()
                    file.seek(start + done * (len(data) // len(chunk.labels)))
                    file.write(data)
                pixels.update(chunk.images.data)
                labels.update(chunk.labels.data)
                done += len(chunk.labels)
                advance(len(chunk.labels))
            fingerprint = hashlib.sha256(pixels.digest() + labels.digest()).hexdigest()
            file.seek(0)
            file.write(encode_header(header | {"fingerprint": fingerprint}))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise OSError(error.errno, f"{error.strerror}: cannot write {path} of {size / 2**20:,.0f} MiB") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _chunks(spec: PathfinderSpec, header: dict[str, Any], workers: int) -> Generator[PathfinderImages]:
    """All images in order. Closing it early drops the tasks that no worker has begun."""
    count = header["count"]
    size = max(1, min(_TASK_IMAGES, _TASK_PIXELS // spec.side**2, count // (4 * workers)))
    firsts = range(0, count, size)
    arguments = [(spec, header["seed"], header["split"], at, min(size, count - at), header["targets"]) for at in firsts]
    if workers == 1:
        yield from (generate(*each) for each in arguments)
        return
    # Fresh processes: a fork of one that has threads or a GPU may hang.
    context = multiprocessing.get_context("spawn")
    number = min(workers, len(arguments))
    with ProcessPoolExecutor(number, mp_context=context, initializer=_start_worker) as pool:
        yield from pool.map(generate, *zip(*arguments, strict=True))


def _start_worker() -> None:
    """Leave an interrupt to the main process, and leave with it even where it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
