"""The Long Range Arena's released Pathfinder images, read from disk: checked, divided, and packed once.

    found = open_release("lra_release", 32, "curv_contour_length_14", "data/prepared")
    found.train, found.val, found.test

The release is Tay et al.'s ("Long Range Arena", 2020), see data/lra_release.md; how it is divided, see `image_set`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashtrain.data.image_set import PARTS, SPLIT_SEED, ImageSet, fingerprint_of, split_places
from flashtrain.data.images import StoredImages
from flashtrain.data.preparing import locked, progress_bar, require_room

_log = logging.getLogger(__name__)

DIFFICULTIES = ("curv_baseline", "curv_contour_length_9", "curv_contour_length_14")
# Of 0 bytes in the release; all readers leave it out, so the set with it has 199,999 images.
KNOWN_EMPTY = "pathfinder32/curv_baseline/imgs/0/sample_172.png"

_FORMAT = 1  # raised when the same release would be packed to other files
_NUMPY_MAGIC = b"\x93NUMPY"
_LABEL_COLUMN = 3
_CHUNK = 512  # images that are decoded before they are written
_RELEASED = (200_000, 199_999)  # with the empty file, and without
_NAMED = 10  # bad images that are told by name


class ReleasedImage(NamedTuple):
    """One row of the metadata: the image's path below its difficulty's folder, and its label."""

    path: str
    label: int


def open_release(
    path: str | Path, side: int, difficulty: str, prepared_dir: str | Path, progress: bool = True
) -> ImageSet:
    """The released images of one size and difficulty, packed under `prepared_dir` now or by an earlier call.

    200,000 PNG files take a minute and more to read; packed they are memory-mapped. A call that is cut short leaves
    nothing that a later one would read. Several processes may call this at once.

    Args:
        path: the release's outermost folder, one of its two inner ones, or a folder pathfinder<side>.
        side: 32, 64, 128 or 256.
        difficulty: curv_baseline, curv_contour_length_9 or curv_contour_length_14.

    Raises:
        ValueError: no such folder; metadata that cannot be read; images that are missing, empty or damaged, by name.
        OSError: the disk is full.
        ImportError: Pillow is missing.
    """
    folder = find_pathfinder(Path(path), side)
    files = _metadata_files(folder / difficulty)
    key = [_FORMAT, str(folder), *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    packed = Path(prepared_dir) / f"release-{folder.name}-{difficulty}-{digest[:12]}"
    if not packed.exists():
        packed.parent.mkdir(parents=True, exist_ok=True)
        with locked(packed):
            if not packed.exists():  # else another process has just made it
                _pack(packed, folder, difficulty, side, progress)
    return _open_packed(packed)


def find_pathfinder(path: Path, side: int) -> Path:
    """The folder pathfinder<side> of the release that `path` is, or is a part of, as an absolute path.

    The archive holds the tree twice: all sizes in lra_release/lra_release, and pathfinder128 alone in the outer
    lra_release. A copy of pathfinder128 was broken when first released, so the inner tree is taken, and the outer one
    only, with a warning, where nothing else is there.

    Raises:
        ValueError: there is no such folder, or it is the outer tree's and the inner one is there too.
    """
    name, path = f"pathfinder{side}", path.expanduser().absolute()
    if re.fullmatch(r"pathfinder\d+", path.name):
        if path.name != name:
            raise ValueError(
                f"{path}: images of {side} x {side} are wanted; give the folder {name}, or change that size"
            )
        candidates = [path]
    else:
        candidates = [path / "lra_release" / "lra_release" / name, path / "lra_release" / name, path / name]
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        raise ValueError(_not_found(path, name))
    found = found.parent.resolve() / name  # a link may have the name alone
    inner = found.parent / "lra_release" / name
    if inner.is_dir():
        raise ValueError(f"{found}: the outer tree's copy, which was broken when first released; give {inner}")
    alone = len(list(found.parent.glob("pathfinder*"))) == 1 and not (found.parent / "tsv_data").exists()
    if side == 128 and found.parent.name == "lra_release" and alone:
        _log.warning(
            "%s seems to be the outer tree's copy, which was broken when first released (labels without a meaning); "
            "the archive has another one in lra_release/lra_release",
            found,
        )
    return found


def _not_found(path: Path, name: str) -> str:
    if not path.exists():
        return f"{path}: there is no such folder; give the unpacked release, or its folder {name}"
    depths = ("", "lra_release/", "lra_release/lra_release/")
    there = sorted({folder.name for depth in depths for folder in path.glob(f"{depth}pathfinder*") if folder.is_dir()})
    has = f"it has {', '.join(there)}" if there else "no folder pathfinder<side> is in it"
    outer = "; that is the outer tree only: unpack lra_release/lra_release too" if there == ["pathfinder128"] else ""
    return f"{path}: no folder {name} is in it or in its lra_release; {has}{outer}"


def list_images(folder: Path) -> list[ReleasedImage]:
    """The images of a difficulty's folder, by the number of their batch, then in the metadata's order.

    Raises:
        ValueError: metadata that is missing or cannot be read, by file and row.
    """
    return [image for file in _metadata_files(folder) for image in read_metadata(file)]


def read_metadata(path: Path) -> list[ReleasedImage]:
    """The rows of one metadata file: text with spaces, as released, or a NumPy array of texts, as the generator writes.

    Raises:
        ValueError: rows without a path and a label of 0 or 1, by number.
    """
    raw = path.read_bytes()
    try:
        if raw.startswith(_NUMPY_MAGIC):
            rows = np.load(io.BytesIO(raw), allow_pickle=False).astype(str).tolist()
        else:
            rows = [line.split() for line in raw.decode().rstrip().splitlines()]  # empty lines at the end are none
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(f"{path}: neither text nor a NumPy array of texts ({error}); unpack it again") from error
    images = []
    if not rows:
        raise ValueError(f"{path}: the file is empty; unpack the release again")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) <= _LABEL_COLUMN or row[_LABEL_COLUMN] not in ("0", "1"):
            raise ValueError(
                f"{path}, row {number}: {row!r}: expected a folder, a file, a number and a label of 0 or 1; "
                "unpack the release again"
            )
        images.append(ReleasedImage(f"{row[0]}/{row[1]}", int(row[_LABEL_COLUMN])))
    return images


def _metadata_files(folder: Path) -> list[Path]:
    files = list((folder / "metadata").glob("*.npy"))
    if not files:
        there = ", ".join(name for name in DIFFICULTIES if (folder.parent / name).is_dir())
        hint = f"; {folder.parent.name} has {there}" if there else ""
        raise ValueError(f"{folder}: no metadata/*.npy in it, which tell the images and their labels{hint}")
    for file in files:
        if not file.stem.isdecimal():
            raise ValueError(f"{file}: a metadata file is named by the number of its batch; take it away")
    return sorted(files, key=lambda file: int(file.stem))


def _pack(packed: Path, folder: Path, difficulty: str, side: int, progress: bool) -> None:
    """Make the folder `packed` in one rename. The caller holds its lock: an unfinished one is a killed process's."""
    images = list_images(folder / difficulty)
    images = [image for image in images if f"{folder.name}/{difficulty}/{image.path}" != KNOWN_EMPTY]
    if len(images) not in _RELEASED:
        _log.warning(
            "%s/%s has %s images, and the release 200,000: its parts are others than those of the literature",
            folder.name, difficulty, f"{len(images):,}",
        )  # fmt: skip
    require_room(packed, len(images) * side**2)
    unfinished = packed.with_name(f".{packed.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with progress_bar(f"reading {folder.name}/{difficulty}", len(images), progress) as advance:
            fingerprint = _write_parts(unfinished, folder / difficulty, images, side, advance)
        header = {"format": _FORMAT, "name": f"{folder.name}/{difficulty}", "side": side, "count": len(images)}
        header |= {"split_seed": SPLIT_SEED, "fingerprint": fingerprint}
        (unfinished / "header.json").write_text(json.dumps(header, indent=1) + "\n")
        unfinished.rename(packed)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_parts(
    unfinished: Path, folder: Path, images: list[ReleasedImage], side: int, advance: Callable[[int], None]
) -> str:
    """Write <part>.images.npy and <part>.labels.npy; the fingerprint. ValueError names the images that are bad."""
    labels = np.array([image.label for image in images], dtype=np.int64)
    home: list[tuple[str, int]] = [("", 0)] * len(images)
    pixels, problems = hashlib.sha256(), []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(min(os.cpu_count() or 1, 16)))  # decoding frees Python's lock
        files, starts = {}, {}
        for part, places in split_places(len(images)).items():
            for row, place in enumerate(places.tolist()):
                home[place] = (part, row)
            np.save(unfinished / f"{part}.labels.npy", labels[places])
            files[part] = file = stack.enter_context((unfinished / f"{part}.images.npy").open("wb"))
            shape = {"descr": "|u1", "fortran_order": False, "shape": (len(places), side, side)}
            np.lib.format.write_array_header_1_0(file, shape)
            starts[part] = file.tell()
        for first in range(0, len(images), _CHUNK):
            chunk = [folder / image.path for image in images[first : first + _CHUNK]]
            for number, found in enumerate(pool.map(partial(_decode, side=side), chunk), first):
                if isinstance(found, str):
                    problems.append(f"{images[number].path} ({found})")
                    continue
                part, row = home[number]
                files[part].seek(starts[part] + row * side**2)  # not through a map: on a full disk that would crash
                files[part].write(found)
                pixels.update(found)
            advance(len(chunk))
    if problems:
        more = f" and {len(problems) - _NAMED:,} more" if len(problems) > _NAMED else ""
        raise ValueError(
            f"{folder}: {len(problems):,} of {len(images):,} images cannot be read: {', '.join(problems[:_NAMED])}"
            f"{more}; unpack the release again"
        )
    return fingerprint_of(pixels.digest(), labels)


def _decode(path: Path, side: int) -> bytes | str:
    """The grey levels of an image row by row, or what is wrong with it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading PNG files needs Pillow: pip install 'flashtrain[pathfinder]'") from error

    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return "missing"
    except (IsADirectoryError, PermissionError) as error:
        return str(error.strerror).lower()
    if not raw:
        return "empty"
    try:
        with Image.open(io.BytesIO(raw)) as image:
            if image.size != (side, side):
                return f"{image.width} x {image.height} pixels"
            return image.convert("L").tobytes()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return "damaged"


def _open_packed(packed: Path) -> ImageSet:
    try:
        header: dict[str, Any] = json.loads((packed / "header.json").read_text())
        parts = {}
        for part in PARTS:
            images = np.load(packed / f"{part}.images.npy", mmap_mode="r")
            parts[part] = StoredImages(np.asarray(images), np.load(packed / f"{part}.labels.npy"))
        return ImageSet(header["name"], header["side"], header["fingerprint"], **parts)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{packed}: damaged ({error}); delete this folder, and it is made again") from error
