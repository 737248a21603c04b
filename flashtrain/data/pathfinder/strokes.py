"""Tables of all strokes that can occur in an image.

A contour's first dash has one of 360 orientations, every further one is one of some 20 to 50 offsets from its pivot. So
each dash's picture, the space it takes, and the odds of what may follow it are computed once and looked up afterwards.

Coordinates are (y, x) with y down; an orientation of 0 degrees points right, 90 down. A dash is known by its number:
0..359 for the first dashes, at number - 180 degrees, anchored at their tail; from 360 on the extensions, anchored at
their head.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flashtrain.data.pathfinder.parameters import PathfinderSpec

try:
    from PIL import Image, ImageDraw
except ImportError as error:
    raise ImportError("generating Pathfinder images needs Pillow: pip install 'flashtrain[pathfinder]'") from error

FIRST_DASHES = 360


class Dashes(NamedTuple):
    """The tables of one margin: D dashes, of which K are extensions, in patches of P x P pixels around their anchor.

    orientations: float64 [D], radians, the direction in which the contour goes on.
    strokes: float32 [D, P, P], the drawn dash, 1 = full.
    masks: float32 [D, P, P], the space it takes (the dash widened by the margin), 0..1.
    heads, pivots: int64 [360, 2], of a first dash, from its tail; the pivot lies a margin behind the tail.
    advances: int64 [D, 2], from a dash's pivot to the next one, a margin ahead of its head.
    offsets: int64 [K, 2], of an extension's head from its pivot.
    weights: float64 [D, K], odds of each extension after each dash: less for sharper turns.
    near: int64 [B, 2], the pixels within one margin.
    footprints: int64 [360, F, 2], pixels that must be free for a first dash, from its tail; only the first
        `footprint_sizes[dash]` (int64 [360]) count.
    usable: bool [360], whether a first dash ever finds a free pixel (see `PathfinderSpec.seeding_flaw`).
    partners: float64 [360, 2], from the first contour's start to where the second's may be.
    start_boxes: int64 [U, 5], where the first contour may start: (dash, y from, y to, x from, x to), ends excluded, for
        each first dash that fits.
    """

    orientations: np.ndarray
    strokes: np.ndarray
    masks: np.ndarray
    heads: np.ndarray
    pivots: np.ndarray
    advances: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    near: np.ndarray
    footprints: np.ndarray
    footprint_sizes: np.ndarray
    usable: np.ndarray
    partners: np.ndarray
    start_boxes: np.ndarray


@lru_cache(maxsize=16)
def dashes(spec: PathfinderSpec, margin: int) -> Dashes:
    """The tables of `spec` with this margin. ValueError where the first contour can start nowhere."""
    length, reach = spec.dash_length, spec.dash_length + margin
    first = np.radians(np.arange(-180, 180))
    offsets = _extension_offsets(reach)
    turns = np.arctan2(offsets[:, 0], offsets[:, 1])
    orientations = np.concatenate([first, turns])
    # An extension is drawn from its head back to its pivot.
    patches = [_dash(spec, margin, angle) for angle in np.concatenate([first, _reversed(turns)])]
    heads = _moves(length, first)
    strokes, masks = (np.stack(kind) for kind in zip(*patches, strict=True))
    footprints, sizes, usable = _footprints(masks[:FIRST_DASHES], reach, spec.seeding_flaw)
    return Dashes(
        orientations=orientations,
        strokes=strokes,
        masks=masks,
        heads=heads,
        pivots=heads + _moves(reach, _reversed(first)),
        advances=_moves(length + 2 * margin, orientations),
        offsets=offsets,
        weights=_weights(orientations, turns, spec.continuity),
        near=_ball(margin),
        footprints=footprints,
        footprint_sizes=sizes,
        usable=usable,
        partners=np.round(spec.seed_distance * np.stack([np.sin(first), np.cos(first)], axis=1), 9),
        start_boxes=_start_boxes(spec, footprints, sizes, usable),
    )


@lru_cache(maxsize=16)
def disc(spec: PathfinderSpec) -> np.ndarray:
    """The white disc, float32 [P, P], its largest value 1."""
    scale, half = spec.antialias, math.ceil(spec.disc_radius) + 4
    y, x = np.mgrid[-half * scale : (half + 1) * scale, -half * scale : (half + 1) * scale]
    inside = x * x + y * y <= (spec.disc_radius * scale) ** 2
    if spec.rendering == "eight_bit":
        return _shrink(np.where(inside, np.uint8(255), np.uint8(0)), 2 * half + 1) / np.float32(255)
    shrunk = _shrink(inside.astype(np.float32), 2 * half + 1)
    return np.maximum(shrunk / shrunk.max(), 0)


def _dash(spec: PathfinderSpec, margin: int, orientation: float) -> tuple[np.ndarray, np.ndarray]:
    """Stroke and mask of a dash that begins in the middle of its patch, float32 [P, P] each."""
    scale, half = spec.antialias, spec.dash_length + math.ceil(spec.dash_thickness) + margin
    side, middle = 2 * half * scale + 1, half * scale
    # Rounded up as it stands: cos(-120 degrees) is not quite -1/2, and the original draws it so.
    head_y, head_x = (math.ceil(middle + spec.dash_length * scale * f(orientation)) for f in (math.sin, math.cos))
    picture = Image.new("L", (side, side), 0)
    width = round(spec.dash_thickness * scale)
    ImageDraw.Draw(picture).line([(middle, middle), (head_x, head_y)], fill=255, width=width)
    line = np.asarray(picture)
    patch = 2 * half + 1  # a little less than side / scale, as in the original
    mask = _shrink(_widen(line, margin * scale), patch) / np.float32(255)
    if spec.rendering == "eight_bit":
        return _shrink(line, patch) / np.float32(255), mask
    return _shrink(line.astype(np.float32), patch) / np.float32(255), mask


def _shrink(picture: np.ndarray, side: int) -> np.ndarray:
    """Lanczos to [side, side]. uint8 is rounded and clipped to 0..255; float32 keeps what overshoots."""
    return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS))


def _widen(picture: np.ndarray, radius: int) -> np.ndarray:
    """Each pixel becomes the largest within `radius`."""
    side = len(picture)
    padded = np.pad(picture, radius)
    shifted = [padded[y : y + side, x : x + side] for y, x in (_ball(radius) + radius).tolist()]
    return np.maximum.reduce(shifted)


def _ball(radius: int) -> np.ndarray:
    """Offsets of all pixels within `radius`, int64 [B, 2]."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(x * x + y * y <= radius * radius) - radius


def _moves(distance: int, orientations: np.ndarray) -> np.ndarray:
    """Whole-pixel moves, int64 [n, 2]. Rounded up, which shifts by half a pixel on average and is part of the rules."""
    moves = distance * np.stack([np.sin(orientations), np.cos(orientations)], axis=1)
    return np.ceil(np.round(moves, 9)).astype(np.int64)  # 5 * sin(180 degrees) is 6e-16, not 1


def _reversed(orientations: np.ndarray) -> np.ndarray:
    return np.where(orientations < 0, orientations + math.pi, orientations - math.pi)


def _extension_offsets(reach: int) -> np.ndarray:
    """The distinct pixels of a circle of radius `reach`, sampled once a pixel of arc: int64 [K, 2]."""
    angles = np.arange(0, 2 * math.pi, 1 / reach)
    circle = reach * np.stack([np.sin(angles), np.cos(angles)], axis=1)
    return np.unique(np.floor(circle).astype(np.int64), axis=0)


def _weights(orientations: np.ndarray, turns: np.ndarray, continuity: float) -> np.ndarray:
    """cos^2 of the turn times `continuity`, 0 from 90 degrees on: float64 [D, K]."""
    turn = np.abs(turns[None, :] - orientations[:, None])
    scaled = continuity * np.minimum(turn, 2 * math.pi - turn)
    return np.where(scaled < math.pi / 2, np.cos(scaled) ** 2, 0.0)


def _footprints(masks: np.ndarray, reach: int, flaw: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Footprints, their sizes, and which first dashes are usable.

    A footprint is where the mask is exactly 1, within `reach` pixels, moved by (1, 1): the original's anchor. Its
    dilation takes pixels outside the image for minus infinity, and one such value makes it give up. That happens in a
    corner of the image unless the footprint has a pixel in each closed quadrant, which is the rule here.
    """
    middle = masks.shape[1] // 2
    found = []
    for mask in masks:
        pixels = np.argwhere(mask >= 1) - middle + 1
        found.append(pixels[(np.abs(pixels) <= reach).all(axis=1)])
    sizes = np.array([len(pixels) for pixels in found], dtype=np.int64)
    footprints = np.zeros((len(found), max(1, sizes.max()), 2), dtype=np.int64)
    for row, pixels in zip(footprints, found, strict=True):
        row[: len(pixels)] = pixels
    quadrants = np.array([(1, 1), (1, -1), (-1, 1), (-1, -1)])
    usable = [not flaw or all(((pixels * signs) >= 0).all(axis=1).any() for signs in quadrants) for pixels in found]
    return footprints, sizes, np.array(usable)


def _start_boxes(spec: PathfinderSpec, footprints: np.ndarray, sizes: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Where the first contour may start: the middle square shrunk by the footprint, which is a rectangle."""
    border, boxes = max(spec.border, spec.padding), []
    for dash in np.flatnonzero(usable & (sizes > 0)):
        pixels = footprints[dash, : sizes[dash]]
        low = border - pixels.min(axis=0)
        high = spec.side - border - pixels.max(axis=0)
        if (low < high).all():
            boxes.append((dash, low[0], high[0], low[1], high[1]))
    if not boxes:
        raise ValueError(
            f"start_border={border}: no first dash fits into the middle of side={spec.side}; "
            "set start_border or seed_distance lower, or seeding_flaw=false"
        )
    return np.array(boxes, dtype=np.int64)
