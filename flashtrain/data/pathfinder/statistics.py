"""Figures over a set of images, to hold generated ones against others, and the shortcut that a model must beat."""

from __future__ import annotations

import numpy as np


def image_statistics(images: np.ndarray) -> dict[str, np.ndarray]:
    """Figures of each image of uint8 [count, side, side], float64 [count] each.

    mean, std: of the pixels, 255 being 1. above_0, above_25, above_64, above_127: share of brighter pixels.
    full: share of pixels of 255. components: 8-connected components of the pixels above 64.
    """
    pixels = images.reshape(len(images), -1)
    figures = {"mean": pixels.mean(axis=1) / 255, "std": pixels.std(axis=1) / 255}
    figures |= {f"above_{level}": (pixels > level).mean(axis=1) for level in (0, 25, 64, 127)}
    figures["full"] = (pixels == 255).mean(axis=1)
    figures["components"] = np.array([count_components(image > 64) for image in images], dtype=np.float64)
    return figures


def count_components(mask: np.ndarray) -> int:
    """Number of 8-connected components of bool [height, width]."""
    own = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    names = own
    while True:  # the largest name spreads by one pixel a round
        padded = np.pad(names, 1)
        rows = np.maximum(np.maximum(padded[:-2], padded[1:-1]), padded[2:])
        spread = np.maximum(np.maximum(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:]) * mask
        if (spread == names).all():
            return int((names == own)[mask].sum())
        names = spread


def marker_distances(markers: np.ndarray) -> np.ndarray:
    """Distance between the two discs in pixels, float64 [count], from (y, x) of either, [count, 2, 2]."""
    return np.linalg.norm(np.diff(markers.astype(np.float64), axis=1)[:, 0], axis=1)


def shortcut_accuracy(distances: np.ndarray, labels: np.ndarray, bins: int = 40) -> float:
    """Accuracy of guessing the label from the distance between the discs alone: what a model must beat.

    Each half of the images is guessed by the majority in equal-width bins of the other half, so that few images do not
    flatter it; a bin that the other half leaves empty or tied counts as half right. Standard error: 0.5 / sqrt(count).
    """
    edges = np.linspace(distances.min(), distances.max() + 1e-9, bins + 1)
    places = np.clip(np.digitize(distances, edges) - 1, 0, bins - 1)
    right = 0.0
    for half in (0, 1):
        votes = np.bincount(places[half::2], weights=2.0 * labels[half::2] - 1, minlength=bins)
        verdict = np.sign(votes)[places[1 - half :: 2]] * (2.0 * labels[1 - half :: 2] - 1)
        right += ((1 + verdict) / 2).sum()
    return right / len(labels)
