"""Images with labels: the batches of training, a pure function of the optimiser step, and those of validation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from flashtrain.data.hiding import Hiding
from flashtrain.data.order import WHOLE, Share, shuffled_many
from flashtrain.data.pathfinder import PathfinderSpec, generate


@dataclass
class ImageBatch:
    """A micro-batch of grey images.

    images: uint8 [batch, side, side].
    labels: int64 [batch].
    targets: uint8 [batch, side, side], 0 where a pixel has no class, else 1 + its class; None without such targets.
    hidden: int64 [batch, n], the pixels that are hidden, counted row by row; None where all are seen.
    num_targets: images in the batch, which is what losses are divided by.
    """

    images: torch.Tensor
    labels: torch.Tensor
    targets: torch.Tensor | None
    num_targets: int
    hidden: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageBatch:
        """The same batch with its tensors on ``device``; ``non_blocking`` as in ``torch.Tensor.to``."""
        return replace(
            self,
            images=self.images.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            targets=None if self.targets is None else self.targets.to(device, non_blocking=non_blocking),
            hidden=None if self.hidden is None else self.hidden.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> ImageBatch:
        """The same batch in page-locked host memory, from which a ``non_blocking`` copy to a GPU overlaps with work."""
        return replace(
            self,
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            targets=None if self.targets is None else self.targets.pin_memory(),
            hidden=None if self.hidden is None else self.hidden.pin_memory(),
        )

    def __reduce__(self) -> tuple[Callable[..., ImageBatch], tuple[Any, ...]]:
        """Between processes a batch travels as bytes.

        PyTorch would send each tensor as shared memory, with a connection to its sender for each: for a batch of a few
        hundred kilobytes that takes longer than a copy, and longer than some steps.
        """
        tensors = (self.images, self.labels, self.targets, self.hidden)
        return _from_arrays, (*(None if tensor is None else tensor.numpy() for tensor in tensors), self.num_targets)

    def copy_(self, other: ImageBatch) -> None:
        """Write another batch of the same shapes into this one's memory; a copy to a GPU does not wait for it."""
        assert self.num_targets == other.num_targets, "batches of one number of images"
        for name in ("images", "labels", "targets", "hidden"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.copy_(its, non_blocking=True)


def _from_arrays(
    images: np.ndarray, labels: np.ndarray, targets: np.ndarray | None, hidden: np.ndarray | None, num_targets: int
) -> ImageBatch:
    first, second = torch.from_numpy(images), torch.from_numpy(labels)
    others = (None if array is None else torch.from_numpy(array) for array in (targets, hidden))
    return ImageBatch(first, second, next(others), num_targets, next(others))


class LabelledImages(NamedTuple):
    """images uint8 [n, side, side], labels int [n], targets uint8 [n, side, side] or None."""

    images: np.ndarray
    labels: np.ndarray
    targets: np.ndarray | None


class ImageSource(Protocol):
    """Images by number; a source without end has no length."""

    @property
    def length(self) -> int | None: ...

    def read(self, indices: np.ndarray) -> LabelledImages: ...


class FreshPathfinder:
    """Pathfinder images made when they are asked for, without end and never one twice."""

    length: int | None = None

    def __init__(self, spec: PathfinderSpec, seed: int, split: str, targets: bool) -> None:
        self.spec, self.seed, self.split, self.targets = spec, seed, split, targets

    def read(self, indices: np.ndarray) -> LabelledImages:
        made = [generate(self.spec, self.seed, self.split, int(i), 1, self.targets) for i in indices]
        targets = np.concatenate([part.targets for part in made]) if self.targets else None
        return LabelledImages(
            np.concatenate([part.images for part in made]), np.concatenate([part.labels for part in made]), targets
        )


class StoredImages:
    """Arrays in memory or memory-mapped files, each image by its place."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, targets: np.ndarray | None = None) -> None:
        self.images, self.labels, self.targets = images, labels, targets
        self.length = len(images)

    def read(self, indices: np.ndarray) -> LabelledImages:
        targets = None if self.targets is None else self.targets[indices]
        return LabelledImages(self.images[indices], self.labels[indices], targets)


class ImageSteps:
    """The micro-batches of each optimiser step.

    Global position p = step * images_per_step + i counts all images ever trained on. A source without end gives image
    p; one of n images gives what stands at place p % n of the permutation of epoch p // n. Flips, turns, brightness and
    hidden pixels are drawn from (seed, p), so that resuming needs the step only.

    Args:
        flips: mirror and turn images by quarters, each of the eight ways with equal odds.
        brightness: factors between which the grey levels of an image are scaled; (1, 1) leaves them.
        hiding: what of each image is hidden; None hides nothing.
        share: of each step's images; shares have equally many.
    """

    def __init__(
        self,
        source: ImageSource,
        images_per_step: int,
        images_per_micro_batch: int,
        seed: int,
        flips: bool,
        brightness: tuple[float, float],
        hiding: Hiding | None = None,
        share: Share = WHOLE,
    ) -> None:
        self.source = source
        self.images_per_step, self.images_per_micro_batch = images_per_step, images_per_micro_batch
        self.seed, self.flips, self.brightness, self.hiding = seed, flips, brightness, hiding
        self.rank, self.share_of_step = share[0], images_per_step // share[1]

    def first(self, step: int) -> int:
        """Global position of the share's first image in optimiser step ``step`` (from 0)."""
        return step * self.images_per_step + self.rank * self.share_of_step

    def indices(self, step: int) -> np.ndarray:
        """Numbers of the share's images in optimiser step ``step`` (from 0), int64 [images of the share]."""
        positions = np.arange(self.first(step), self.first(step) + self.share_of_step)
        length = self.source.length
        if length is None:
            return positions
        epochs, places = np.divmod(positions, length)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = shuffled_many(places[here], length, self.seed, epoch)
        return places

    def batches(self, step: int) -> list[ImageBatch]:
        """The micro-batches of optimiser step ``step``."""
        found, first = self.source.read(self.indices(step)), self.first(step)
        images, targets = np.array(found.images), None if found.targets is None else np.array(found.targets)
        hidden: list[np.ndarray] | None = None if self.hiding is None else []
        for i in range(len(images)):
            draw = _draw(self.seed, first + i)
            if self.flips:
                way = int(draw.integers(8))
                images[i] = turned(images[i], way)
                if targets is not None:
                    targets[i] = turned(targets[i], way)
            if self.brightness != (1.0, 1.0):
                images[i] = np.minimum(images[i] * draw.uniform(*self.brightness) + 0.5, 255).astype(np.uint8)
            if self.hiding is not None and hidden is not None:
                hidden.append(self.hiding.places(images.shape[1], draw))
        size = self.images_per_micro_batch
        parts = [slice(at, at + size) for at in range(0, len(images), size)]
        return [
            _batch(
                LabelledImages(images[part], found.labels[part], None if targets is None else targets[part]),
                None if hidden is None else hidden[part],
            )
            for part in parts
        ]


def held_out_batches(
    source: StoredImages, images_per_micro_batch: int, hiding: Hiding | None = None
) -> Iterator[ImageBatch]:
    """All images once, always in the same order and with the same pixels hidden; the last batch may be smaller."""
    for at in range(0, source.length, images_per_micro_batch):
        numbers = np.arange(at, min(at + images_per_micro_batch, source.length))
        found = source.read(numbers)
        side = found.images.shape[1]
        hidden = None if hiding is None else [hiding.places(side, _draw("held out", int(n))) for n in numbers]
        yield _batch(found, hidden)


def turned(image: np.ndarray, way: int) -> np.ndarray:
    """One of the eight ways to see a square image [side, side]: `way` % 4 quarter turns, mirrored from 4 on."""
    image = np.rot90(image, way % 4)
    return image[:, ::-1] if way >= 4 else image


def _draw(seed: int | str, position: int) -> np.random.Generator:
    digest = hashlib.blake2b(repr((seed, position)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def _batch(found: LabelledImages, hidden: list[np.ndarray] | None = None) -> ImageBatch:
    return ImageBatch(
        images=torch.from_numpy(np.ascontiguousarray(found.images)),
        labels=torch.from_numpy(found.labels.astype(np.int64)),
        targets=None if found.targets is None else torch.from_numpy(np.ascontiguousarray(found.targets)),
        num_targets=len(found.images),
        hidden=None if hidden is None else torch.from_numpy(np.stack(hidden)),
    )
