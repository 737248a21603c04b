"""Images by number: each a pure function of (spec, seed, split, index), in whatever chunks and processes it is made."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashtrain.data.pathfinder.parameters import PathfinderSpec

if TYPE_CHECKING:
    from flashtrain.data.pathfinder.strokes import Dashes

# Raised when the same spec, seed, split and index would give another image.
GENERATOR = 1


class PathfinderImages(NamedTuple):
    """Images and what is known of them.

    images: uint8 [count, side, side], grey levels.
    labels: uint8 [count], 1 where both discs lie on one contour.
    targets: uint8 [count, side, side] or None, for each pixel 0 where nothing is drawn, else 1 + the number of discs
        (0, 1 or 2) on the contour that owns the pixel: the one whose stroke is the brightest there. Where no stroke has
        a fifth of its full strength, nothing counts as drawn. So label 0 has the values 0, 1, 2, with both target
        contours at 2; label 1 has 0, 1, 3; distractors have 1 always. A disc belongs to its contour.
    markers: int16 [count, 2, 2], (y, x) of the two discs' centres, the one on a contour's start first.
    """

    images: np.ndarray
    labels: np.ndarray
    targets: np.ndarray | None
    markers: np.ndarray


class Geometry(NamedTuple):
    """Where everything lies in one image. A dash is (y, x, number): its anchor and its place in `dashes`.

    contours: int64 [2, contour_length, 3], the targets. distractors: int64 [drawn, distractor_length, 3].
    label: 1 where both discs lie on one contour. start: the contour (0 or 1) whose start carries a disc.
    """

    contours: np.ndarray
    distractors: np.ndarray
    label: int
    start: int
    margin: int
    dashes: Dashes

    @property
    def end(self) -> int:
        """The contour whose end carries the other disc."""
        return self.start if self.label else 1 - self.start


def generate(
    spec: PathfinderSpec, seed: int, split: str, first: int, count: int, targets: bool = False
) -> PathfinderImages:
    """Images `first` to `first + count - 1` of a split.

    Each image has a random stream of its own, started by a hash of spec, seed, split and index; a split is any text.
    The first call compiles the kernels (some seconds, kept on disk) and computes the tables of `spec`.

    Raises:
        ValueError: first or count is negative, or the contours do not fit into the image.
        ImportError: numba or Pillow is missing.
    """
    from flashtrain.data.pathfinder.contours import draw_contour, draw_disc
    from flashtrain.data.pathfinder.strokes import disc

    if first < 0 or count < 0:
        raise ValueError(f"first={first}, count={count}: must not be negative")
    side = spec.side
    images = np.empty((count, side, side), np.uint8)
    labels = np.empty(count, np.uint8)
    classes = np.zeros((count if targets else 1, side, side), np.uint8)
    markers = np.empty((count, 2, 2), np.int16)
    light = np.empty((side, side), np.float32)
    key = stream_key(spec, seed, split)
    for row in range(count):
        found = geometry(spec, key, first + row)
        light[:] = 0
        owned = classes[row if targets else 0]
        for which, contour in enumerate(found.contours):
            discs = (which == found.start) + (which == found.end)
            draw_contour(light, owned, contour, spec.target_brightness, 1 + discs, found.dashes)
        for contour in found.distractors:
            draw_contour(light, owned, contour, spec.distractor_brightness, 1, found.dashes)
        tips = found.contours[found.start, 0], found.contours[found.end, -1]
        for tip in tips:
            draw_disc(light, owned, tip, 2 + found.label, disc(spec))
        images[row] = _grey_levels(light, spec.rendering)
        labels[row] = found.label
        markers[row] = [tip[:2] for tip in tips]
    return PathfinderImages(images, labels, classes if targets else None, markers)


def _grey_levels(light: np.ndarray, rendering: str) -> np.ndarray:
    """Integers 0..255 of float32 [side, side], 1 being white."""
    if rendering == "eight_bit":  # as old SciPy saved pictures: stretched to their own maximum and rounded
        return np.floor(255 * light / light.max() + 0.5)
    return np.minimum(np.floor(255 * light), 255)


@lru_cache(maxsize=64)
def stream_key(spec: PathfinderSpec, seed: int, split: str) -> bytes:
    """What all images of a split share: SHA-256 of spec, seed and split."""
    named = {"generator": GENERATOR, "spec": spec.as_dict(), "seed": int(seed), "split": split}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()


def geometry(spec: PathfinderSpec, key: bytes, index: int) -> Geometry:
    """Place the contours of image `index` of the split with this `stream_key`. Raises ValueError as `generate` does."""
    from flashtrain.data.pathfinder.contours import place_contours
    from flashtrain.data.pathfinder.strokes import dashes

    digest = hashlib.sha256(key + index.to_bytes(8, "little")).digest()
    state = np.frombuffer(digest[:8], dtype="<u8").astype(np.uint64)
    margin = spec.margins[int.from_bytes(digest[8:16], "little") % len(spec.margins)]
    label, start = digest[16] & 1, digest[17] & 1
    tables = dashes(spec, margin)
    contours = np.empty((2, spec.contour_length, 3), np.int64)
    distractors = np.empty((spec.distractor_count, spec.distractor_length, 3), np.int64)
    placed = place_contours(state, spec.side, spec.padding, contours, distractors, tables)
    if placed < 0:
        raise ValueError(
            f"contour_length={spec.contour_length}: two contours of {spec.contour_length} dashes of "
            f"{spec.dash_length} px do not fit into side={spec.side}; shorten them or enlarge the image"
        )
    return Geometry(contours, distractors[:placed], label, start, margin, tables)
