"""Where the two discs of a Pathfinder image lie, for images of which nobody wrote it down."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Radius of the discs in pixels at the sizes of the Long Range Arena.
_SIDES, _RADII = (32, 64, 128, 256), (1.5, 2.5, 3.0, 5.0)
# A disc's mean grey level is above this share of the image's brightest, in all but few images.
_FILLED, _FEW = 0.7, 0.05
_CHUNK_PIXELS = 1 << 23


def find_discs(images: np.ndarray, device: torch.device) -> np.ndarray | None:
    """(y, x) of the two discs in each of uint8 images [n, side, side], int64 [n, 2, 2]; None where they have no discs.

    The brightest round spots: strokes are thinner than discs, so that the mean over a disc's size is largest on the
    discs themselves. Held against generated images, both centres are met within a pixel in 99 of 100 and more.
    """
    side = images.shape[1]
    # Half a pixel less than the disc, whose edge is grey.
    radius = float(np.interp(side, _SIDES, _RADII)) - 0.5
    step = max(1, _CHUNK_PIXELS // side**2)
    found, filled = [], 0
    for first in range(0, len(images), step):
        grey = torch.from_numpy(images[first : first + step].copy()).to(device).float()
        centres, second = _brightest_spots(grey, radius)
        found.append(centres.cpu().numpy())
        filled += int((second > _FILLED * grey.amax((1, 2))).sum())
    return np.concatenate(found) if filled >= (1 - _FEW) * len(images) else None


def _brightest_spots(grey: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """The two brightest spots of grey [n, side, side] that do not overlap, int64 [n, 2, 2]; the second's mean [n]."""
    reach = int(np.ceil(radius))
    offsets = torch.arange(-reach, reach + 1, device=grey.device)
    distance = torch.hypot(offsets[:, None].float(), offsets[None, :].float())
    weights = (radius + 0.5 - distance).clamp(0, 1)
    means = F.conv2d(grey[:, None], (weights / weights.sum())[None, None], padding=reach)[:, 0]
    places = torch.arange(grey.shape[1], device=grey.device)
    spots = []
    for _ in range(2):
        strength, flat = means.flatten(1).max(dim=1)
        y, x = flat // grey.shape[2], flat % grey.shape[2]
        spots.append(torch.stack([y, x], dim=1))
        near = (places[:, None] - y[:, None, None]) ** 2 + (places - x[:, None, None]) ** 2 <= (2 * radius + 1) ** 2
        means = means.masked_fill(near, -1)
    return torch.stack(spots, dim=1), strength
