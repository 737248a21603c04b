"""Labelled images in three parts for training, validation and test, and those that a user brings in an .npz file.

    found = open_npz("images.npz", num_classes=2)
    found.train, found.val, found.test

The division is the customary one of the Long Range Arena's Pathfinder, that of Gu et al. ("Efficiently modeling long
sequences with structured state spaces", 2022), whose code later work shares: at random with seed 42, 80/10/10.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flashtrain.data.images import StoredImages

PARTS = ("train", "val", "test")
SPLIT_SEED = 42


@dataclass(frozen=True)
class ImageSet:
    """Labelled images in three parts, each with labels int64 [n].

    name: what they are, without where they lie. fingerprint: SHA-256 of all images and labels in their first order.
    """

    name: str
    side: int
    fingerprint: str
    train: StoredImages
    val: StoredImages
    test: StoredImages


def split_places(count: int) -> dict[str, np.ndarray]:
    """Which of `count` images each part has, int64, in the part's own order: a tenth, rounded down, for val and test.

    The same as torch.utils.data.random_split with a generator seeded 42.

    Raises:
        ValueError: fewer than ten images, of which a part would be empty.
    """
    tenth = count // 10
    if not tenth:
        raise ValueError(f"{count} images cannot be divided into training, validation and test: take at least 10")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED)).numpy()
    return dict(zip(PARTS, np.split(order, [count - 2 * tenth, count - tenth]), strict=True))


def fingerprint_of(pixels: bytes, labels: np.ndarray) -> str:
    """Of the SHA-256 of all images' pixels, and their labels."""
    return hashlib.sha256(pixels + hashlib.sha256(labels.astype("<i8").tobytes()).digest()).hexdigest()


def open_npz(path: str | Path, num_classes: int) -> ImageSet:
    """The images of an .npz file, held in memory and divided as the release is.

    Raises:
        ValueError: as `read_npz`, or too few images to divide.
    """
    images, labels = read_npz(path, num_classes)
    parts = {part: StoredImages(images[places], labels[places]) for part, places in split_places(len(images)).items()}
    return ImageSet(Path(path).name, images.shape[1], npz_fingerprint(images, labels), **parts)


def read_npz(path: str | Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """`images` uint8 [n, side, side] and `labels` int64 [n] of an .npz file.

    Raises:
        ValueError: there is no such file, or one of the arrays is not what it must be; the array and the fix are named.
    """
    path = Path(path).expanduser()
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            missing = [name for name in ("images", "labels") if name not in file]
            has = ", ".join(file) or "nothing"
            arrays = None if missing else (file["images"], file["labels"])
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file") from error
    except Exception as error:  # whatever zipfile, zlib and NumPy raise
        raise ValueError(f"{path}: not a readable .npz file ({error}); make it with numpy.savez") from error
    if arrays is None:
        raise ValueError(f"{path}: no array {missing[0]} in it, but {has}; save both with numpy.savez")
    _check_arrays(path, *arrays, num_classes)
    return arrays[0], arrays[1].astype(np.int64)


def npz_fingerprint(images: np.ndarray, labels: np.ndarray) -> str:
    """The fingerprint that the same images and labels have in an `ImageSet`."""
    return fingerprint_of(hashlib.sha256(np.ascontiguousarray(images).data).digest(), labels)


def _check_arrays(path: Path, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    is_, shape = f"{images.dtype} {list(images.shape)}", images.shape
    if images.ndim != 3 or shape[1] != shape[2]:
        raise ValueError(f"{path}: images is {is_}: must be [n, side, side]; one grey level a pixel, square images")
    if images.dtype != np.uint8:
        raise ValueError(f"{path}: images is {is_}: must be uint8; scale grey levels to 0..255, then convert")
    if not images.size:
        raise ValueError(f"{path}: images is {is_}: there must be at least one")
    if labels.dtype.kind not in "iu" or labels.shape != shape[:1]:
        raise ValueError(
            f"{path}: labels is {labels.dtype} {list(labels.shape)}: must be whole numbers [{shape[0]}], one an image"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"{path}: labels has {low} to {high}: must lie in 0..{num_classes - 1}; number the classes from 0, or "
            f"take classifier.num_classes={high + 1}"
        )
