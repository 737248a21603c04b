"""A packed file: the images of one split in one memory-mapped file, with a header that says what they are.

Layout, little-endian; every part begins at a multiple of 4,096 bytes:

    bytes 0..7      magic
    bytes 8..11     version, uint32
    bytes 12..15    length of the header, uint32
    bytes 16..4095  the header as JSON, then zeros
    images          uint8 [count, side, side]
    labels          uint8 [count]
    targets         uint8 [count, side, side], where the header says so
    markers         int16 [count, 2, 2]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.data.pathfinder.images import GENERATOR
from flashtrain.data.pathfinder.parameters import PathfinderSpec

MAGIC = b"FLPATHFD"
VERSION = 1
PAGE = 4096
SUFFIX = ".pathfinder"
_REQUIRED = {
    "generator": int,
    "spec": dict,
    "seed": int,
    "split": str,
    "count": int,
    "targets": bool,
    "fingerprint": str,
}


class PackedImages:
    """An open packed file. Nothing is read until it is asked for.

    images: uint8 [count, side, side], memory-mapped, as are labels, targets and markers (see `PathfinderImages`);
    targets is None where the file has none.
    header: the JSON header; `fingerprint` is a SHA-256 of images and labels, the same with and without targets.
    """

    def __init__(self, path: Path, header: dict[str, Any], spec: PathfinderSpec, parts: dict[str, np.ndarray]) -> None:
        self.path = path
        self.header = header
        self.spec = spec
        self.images = parts["images"]
        self.labels = parts["labels"]
        self.targets = parts.get("targets")
        self.markers = parts["markers"]
        self.seed: int = header["seed"]
        self.split: str = header["split"]
        self.fingerprint: str = header["fingerprint"]

    def __len__(self) -> int:
        return len(self.images)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedImages.open, (self.path,)  # a worker process maps the file itself

    @classmethod
    def open(cls, path: str | Path) -> PackedImages:
        """Map the file at `path`. Raises ValueError, naming it, when it is not a whole packed file."""
        path = Path(path)
        header, spec = _read_header(path)
        places, expected = layout(header)
        actual = path.stat().st_size
        if actual != expected:
            what = "truncated" if actual < expected else "longer than it should be"
            raise ValueError(
                f"{path}: {what}: {actual:,} bytes, the header asks for {expected:,}; delete it and make it again"
            )
        raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        parts = {}
        for name, (start, shape, dtype) in places.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            parts[name] = raw[start : start + size].view(dtype).reshape(shape)
        return cls(path, header, spec, parts)

    def require(self, spec: PathfinderSpec, *, seed: int, split: str, count: int, targets: bool) -> None:
        """Raise ValueError, naming what differs, unless the file holds these images, and targets where asked for."""
        wanted: dict[str, Any] = {"seed": seed, "split": split, "count": count, "generator": GENERATOR}
        has = {key: self.header[key] for key in wanted} | self.spec.as_dict()
        wanted |= spec.as_dict()
        if targets:
            wanted, has = wanted | {"targets": True}, has | {"targets": self.header["targets"]}
        different = [f"{key}={has[key]!r}, not {wanted[key]!r}" for key in wanted if has[key] != wanted[key]]
        if different:
            raise ValueError(f"{self.path}: made with {'; '.join(different)}; take another folder, or delete this file")


def layout(header: dict[str, Any]) -> tuple[dict[str, tuple[int, tuple[int, ...], str]], int]:
    """Where each part lies, as (byte offset, shape, dtype), and the size of the whole file in bytes."""
    count, side = header["count"], header["spec"]["side"]
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "images": ((count, side, side), "u1"),
        "labels": ((count,), "u1"),
        "targets": ((count, side, side), "u1"),
        "markers": ((count, 2, 2), "<i2"),
    }
    if not header["targets"]:
        del shapes["targets"]
    places, end = {}, PAGE
    for name, (shape, dtype) in shapes.items():
        start = -(-end // PAGE) * PAGE
        places[name] = (start, shape, dtype)
        end = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
    return places, end


def encode_header(header: dict[str, Any]) -> bytes:
    """The first bytes of a file, at most a page. ValueError where the header does not fit."""
    text = json.dumps(header).encode()
    if len(text) > PAGE - 16:
        raise ValueError(f"a header of {len(text)} bytes does not fit into {PAGE - 16}; shorten split or margins")
    return MAGIC + VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text


def _read_header(path: Path) -> tuple[dict[str, Any], PathfinderSpec]:
    """Header and spec of `path`, checked field by field."""
    try:
        with path.open("rb") as file:
            start = file.read(PAGE)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such packed file; make it with scripts/pathfinder.py") from error
    if not start.startswith(MAGIC):
        what = f"it starts with {start[:8]!r}" if start else "it is empty"
        raise ValueError(f"{path}: not a file of packed Pathfinder images ({what})")
    if len(start) < PAGE:
        raise ValueError(f"{path}: truncated within its header; delete it and make it again")
    version, length = int.from_bytes(start[8:12], "little"), int.from_bytes(start[12:16], "little")
    if not 1 <= version <= VERSION:
        raise ValueError(f"{path}: packed file version {version}, this flashtrain reads up to {VERSION}")
    try:
        header = json.loads(start[16 : 16 + length])
        for key, kind in _REQUIRED.items():
            if not isinstance(header.get(key), kind):
                raise ValueError(f"{key!r} must be {kind.__name__}, not {header.get(key)!r}")
        if header["count"] < 1:
            raise ValueError(f"'count' is {header['count']}")
        return header, PathfinderSpec(**header["spec"])
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the header is damaged ({error}); delete it and make it again") from error
