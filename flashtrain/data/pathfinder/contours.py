"""The compiled kernels: where the dashes of an image lie, and how they are drawn.

Target contours are found by rejection: both are grown in turn, and when one is stuck both are thrown away. That is what
shapes their distribution (long contours hug the border), so it is kept, and made cheap by tables (`strokes.Dashes`).

Everything compiled lies in this file, because the compiler's cache notices changes in the file of a kernel only. A dash
is (y, x, number): its anchor and its place in the tables. `occupancy` is float32 [side, side], 1 where no dash may go.
"""

from __future__ import annotations

import numpy as np

from flashtrain.data.pathfinder.strokes import FIRST_DASHES, Dashes

try:
    from numba import njit
except ImportError as error:
    raise ImportError("generating Pathfinder images needs numba: pip install 'flashtrain[pathfinder]'") from error

# The hardest preset, 64 px, takes some 1,500 restarts on average, so a longer wait is for a contour that never fits.
MAX_RESTARTS = 200_000
_CONTOUR_TRIES = 5
_DASH_TRIES = 3


@njit(cache=True)
def uniform(state: np.ndarray) -> float:
    """A number from [0, 1) by SplitMix64 (Steele, Lea and Flood 2014); `state` is uint64 [1] and moves on."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) * 2.0**-53


@njit(cache=True)
def _below(state: np.ndarray, limit: int) -> int:
    return int(uniform(state) * limit)


@njit(cache=True)
def _inside(side: int, y: int, x: int) -> bool:
    return 0 <= y < side and 0 <= x < side


@njit(cache=True)
def _merge(occupancy: np.ndarray, mask: np.ndarray, y: int, x: int) -> None:
    """Mark the space of a dash with its anchor at (y, x)."""
    side, patch = occupancy.shape[0], mask.shape[0]
    top, left = y - patch // 2, x - patch // 2
    for i in range(max(0, -top), min(patch, side - top)):
        for j in range(max(0, -left), min(patch, side - left)):
            occupancy[top + i, left + j] = max(occupancy[top + i, left + j], mask[i, j])


@njit(cache=True)
def _collides(occupancy: np.ndarray, mask: np.ndarray, y: int, x: int) -> bool:
    side, patch = occupancy.shape[0], mask.shape[0]
    top, left = y - patch // 2, x - patch // 2
    for i in range(max(0, -top), min(patch, side - top)):
        for j in range(max(0, -left), min(patch, side - left)):
            if occupancy[top + i, left + j] + mask[i, j] >= 1.8:
                return True
    return False


@njit(cache=True)
def _extend(
    state: np.ndarray, occupancy: np.ndarray, contour: np.ndarray, place: int, pivot: np.ndarray, dashes: Dashes
) -> bool:
    """Find dash `place` of a contour, int64 [dashes, 3], and only then mark the space of the dash before it.

    `pivot`, int64 [2], is that of the dash before and moves on. False when the contour is stuck.
    """
    side = occupancy.shape[0]
    before_y, before_x, before = contour[place - 1]
    pivot_y = pivot[0] + dashes.advances[before, 0]
    pivot_x = pivot[1] + dashes.advances[before, 1]
    summed = np.zeros(len(dashes.offsets))
    total = 0.0
    for choice in range(len(summed)):
        weight = dashes.weights[before, choice]
        y, x = pivot_y + dashes.offsets[choice, 0], pivot_x + dashes.offsets[choice, 1]
        if weight > 0 and _inside(side, y, x):
            fullest = np.float32(0)
            for near in range(len(dashes.near)):
                v, u = y + dashes.near[near, 0], x + dashes.near[near, 1]
                if _inside(side, v, u):
                    fullest = max(fullest, occupancy[v, u])
            total += weight * (1 - fullest)
        summed[choice] = total
    if total < 1e-4:
        return False
    for _ in range(_DASH_TRIES):
        choice = min(np.searchsorted(summed, uniform(state) * total, side="right"), len(summed) - 1)
        y, x = pivot_y + dashes.offsets[choice, 0], pivot_x + dashes.offsets[choice, 1]
        if not _collides(occupancy, dashes.masks[FIRST_DASHES + choice], y, x):
            _merge(occupancy, dashes.masks[before], before_y, before_x)
            contour[place] = y, x, FIRST_DASHES + choice
            pivot[:] = pivot_y, pivot_x
            return True
    return False


@njit(cache=True)
def _stays_inside(side: int, y: int, x: int, dash: int, dashes: Dashes) -> bool:
    """Whether head and pivot of a first dash with its tail at (y, x) lie in the image."""
    head, pivot = dashes.heads[dash], dashes.pivots[dash]
    return _inside(side, y + head[0], x + head[1]) and _inside(side, y + pivot[0], x + pivot[1])


@njit(cache=True)
def _start_pair(state: np.ndarray, side: int, contours: np.ndarray, dashes: Dashes) -> bool:
    """The first dash of either target. The second one's may lie across the first's: it is not checked against it."""
    dash, top, bottom, left, right = dashes.start_boxes[_below(state, len(dashes.start_boxes))]
    y, x = top + _below(state, bottom - top), left + _below(state, right - left)
    if not _stays_inside(side, y, x, dash, dashes):
        return False
    contours[0, 0] = y, x, dash
    for _ in range(_DASH_TRIES):
        dash, direction = _below(state, FIRST_DASHES), _below(state, FIRST_DASHES)
        second_y = int(np.rint(y + dashes.partners[direction, 0]))
        second_x = int(np.rint(x + dashes.partners[direction, 1]))
        if _stays_inside(side, second_y, second_x, dash, dashes):
            contours[1, 0] = second_y, second_x, dash
            return True
    return False


@njit(cache=True)
def _grow_pair(state: np.ndarray, occupancy: np.ndarray, contours: np.ndarray, dashes: Dashes) -> bool:
    """Extend both targets in turn. The very last dash of the first one is never marked in `occupancy`."""
    pivots = np.empty((2, 2), np.int64)
    for which in range(2):
        pivots[which] = contours[which, 0, :2] + dashes.pivots[contours[which, 0, 2]]
    for place in range(1, contours.shape[1]):
        for which in range(2):
            if not _extend(state, occupancy, contours[which], place, pivots[which], dashes):
                return False
    y, x, last = contours[1, -1]
    _merge(occupancy, dashes.masks[last], y, x)
    return True


@njit(cache=True)
def _has_room(occupancy: np.ndarray, y: int, x: int, dash: int, dashes: Dashes) -> bool:
    """Whether a distractor's first dash may have its tail at (y, x): its footprint is free and off the edge."""
    side = occupancy.shape[0]
    for pixel in range(dashes.footprint_sizes[dash]):
        v, u = y + dashes.footprints[dash, pixel, 0], x + dashes.footprints[dash, pixel, 1]
        if _inside(side, v, u) and (occupancy[v, u] > 0.3 or not _inside(side - 2, v - 1, u - 1)):
            return False
    return True


@njit(cache=True)
def _find_room(state: np.ndarray, occupancy: np.ndarray, dash: int, dashes: Dashes) -> tuple[int, int]:
    """A tail for a distractor's first dash, uniform over all pixels that have room; (-1, -1) where none has."""
    side = occupancy.shape[0]
    for _ in range(100):
        y, x = _below(state, side), _below(state, side)
        if _has_room(occupancy, y, x, dash, dashes):
            return y, x
    found, seen = (-1, -1), 0
    for y in range(side):  # little room or none: look at every pixel, and keep each with equal odds
        for x in range(side):
            if _has_room(occupancy, y, x, dash, dashes):
                seen += 1
                if _below(state, seen) == 0:
                    found = (y, x)
    return found


@njit(cache=True)
def _start_distractor(state: np.ndarray, occupancy: np.ndarray, contour: np.ndarray, dashes: Dashes) -> bool:
    side = occupancy.shape[0]
    if np.sum(occupancy <= 0.3) < 0.01 * side * side:
        return False
    for _ in range(_DASH_TRIES):
        dash = _below(state, FIRST_DASHES)
        if not dashes.usable[dash]:
            return False
        y, x = _find_room(state, occupancy, dash, dashes)
        if y < 0:
            return False
        if _stays_inside(side, y, x, dash, dashes):
            contour[0] = y, x, dash
            return True
    return False


@njit(cache=True)
def _grow_distractor(state: np.ndarray, occupancy: np.ndarray, contour: np.ndarray, dashes: Dashes) -> bool:
    """One try at a distractor, int64 [dashes, 3]; a failed one leaves `occupancy` as it was."""
    if not _start_distractor(state, occupancy, contour, dashes):
        return False
    before = occupancy.copy()
    pivot = contour[0, :2] + dashes.pivots[contour[0, 2]]
    for place in range(1, len(contour)):
        if not _extend(state, occupancy, contour, place, pivot, dashes):
            occupancy[:] = before
            return False
    y, x, last = contour[-1]
    _merge(occupancy, dashes.masks[last], y, x)
    return True


@njit(cache=True)
def place_contours(
    state: np.ndarray, side: int, padding: int, contours: np.ndarray, distractors: np.ndarray, dashes: Dashes
) -> int:
    """Fill `contours`, int64 [2, dashes, 3], and `distractors`, int64 [count, dashes, 3], from the random stream.

    Returns how many distractors found room: the first so many are filled. -1 when the targets never fit.
    """
    occupancy = np.empty((side, side), np.float32)
    restarts = 0
    while restarts < MAX_RESTARTS:
        occupancy[:] = 1
        occupancy[padding : side - padding, padding : side - padding] = 0
        if _start_pair(state, side, contours, dashes) and _grow_pair(state, occupancy, contours, dashes):
            break
        restarts += 1
    if restarts == MAX_RESTARTS:
        return -1
    placed = 0
    for _ in range(len(distractors)):
        for _ in range(_CONTOUR_TRIES):
            if _grow_distractor(state, occupancy, distractors[placed], dashes):
                placed += 1
                break
    return placed


@njit(cache=True)
def _stamp(
    light: np.ndarray, targets: np.ndarray, stroke: np.ndarray, y: int, x: int, brightness: float, target: int
) -> None:
    """Draw by maximum. A pixel becomes the contour's where its stroke is the brightest and at least a fifth of full."""
    side, patch = light.shape[0], stroke.shape[0]
    top, left = y - patch // 2, x - patch // 2
    for i in range(max(0, -top), min(patch, side - top)):
        for j in range(max(0, -left), min(patch, side - left)):
            value = stroke[i, j] * brightness
            if value > light[top + i, left + j]:
                light[top + i, left + j] = value
                if stroke[i, j] >= 0.2:
                    targets[top + i, left + j] = target


@njit(cache=True)
def draw_contour(
    light: np.ndarray, targets: np.ndarray, contour: np.ndarray, brightness: float, target: int, dashes: Dashes
) -> None:
    """Draw a contour, int64 [dashes, 3], into `light`, float32 [side, side], and `targets`, uint8 [side, side]."""
    for place in range(len(contour)):
        y, x, dash = contour[place]
        _stamp(light, targets, dashes.strokes[dash], y, x, brightness, target)


@njit(cache=True)
def draw_disc(light: np.ndarray, targets: np.ndarray, tip: np.ndarray, target: int, disc: np.ndarray) -> None:
    """Draw a disc at `tip`, int64 [2 or 3]."""
    _stamp(light, targets, disc, tip[0], tip[1], 1.0, target)
