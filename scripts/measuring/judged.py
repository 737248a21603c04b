"""Images to judge a trained classifier by: generated, released or a user's own, and never those it was trained on."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.config.schema import ClassifierConfig, ImagesConfig
from flashtrain.data.image_set import npz_fingerprint, read_npz, split_places
from flashtrain.data.images import StoredImages
from flashtrain.data.pathfinder import prepare, spec_of
from flashtrain.training.classification import corpus_fingerprint, disk_corpus, images_from_disk, pathfinder_spec
from measuring.trained import Run

GENERATED = 20_000  # images that are made where --count does not say how many


@dataclass(frozen=True)
class Judged:
    """Images to be judged by. markers: (y, x) of both discs [n, 2, 2] where that is known. about: for the result."""

    source: StoredImages
    markers: np.ndarray | None
    about: dict[str, Any]


def choose_images(
    run: Run, classifier: ClassifierConfig, images: ImagesConfig, arguments: argparse.Namespace
) -> Judged:
    """The images that the arguments name, or new ones of the run's own kind.

    Raises:
        ValueError: the run was trained on them, or they are not there.
    """
    if arguments.count is not None and arguments.count < 1:
        raise ValueError(f"--count {arguments.count}: must be at least 1")
    named = {"pathfinder": arguments.images, "release": arguments.release, "npz": arguments.npz}
    source = next((key for key, value in named.items() if value is not None), images.source)
    if source == "pathfinder":
        return generated(run, images, arguments)
    if source == "release":
        return released(run, classifier, images, arguments)
    return from_npz(run, classifier, images, arguments)


def generated(run: Run, images: ImagesConfig, arguments: argparse.Namespace) -> Judged:
    own = images.source == "pathfinder"
    spec = pathfinder_spec(images) if arguments.images is None else spec_of(arguments.images)
    name, split, seed = arguments.images or images.preset, arguments.split or "test", arguments.seed
    # Whatever the spec: other stages of the same training may have had this one.
    if own and split == "train" and seed == images.seed:
        raise ValueError(
            f"--split train --seed {seed}: {run.id} was trained on images of this split and seed; another split makes "
            "other images: take --split test"
        )
    folder = Path(images.prepared_dir) / f"pathfinder-{name}-evaluation"
    packed = prepare(folder, spec, seed, split, arguments.count or GENERATED, workers=arguments.workers)
    about = {"source": "generated", "name": name, "split": split, "seed": seed, "spec": spec.as_dict()}
    return Judged(
        StoredImages(packed.images, packed.labels), packed.markers, about | {"fingerprint": packed.fingerprint}
    )


def released(run: Run, classifier: ClassifierConfig, images: ImagesConfig, arguments: argparse.Namespace) -> Judged:
    chosen = replace(
        images,
        source="release",
        path=str(arguments.release or images.path),
        side=arguments.side or images.side,
        difficulty=arguments.difficulty or images.difficulty,
    )
    found = images_from_disk(chosen, math.isqrt(run.config.seq_len), classifier.num_classes)
    split = arguments.split or "test"
    if split == "train":
        refuse_if_trained_on(run, images, "release", found.name, found.fingerprint, found.train.length)
    part = {"train": found.train, "val": found.val, "test": found.test}[split]
    about = {"source": "release", "name": found.name, "split": split, "fingerprint": found.fingerprint}
    return Judged(first(part.images, part.labels, arguments.count), None, about)


def from_npz(run: Run, classifier: ClassifierConfig, images: ImagesConfig, arguments: argparse.Namespace) -> Judged:
    path = arguments.npz or Path(images.path or "")
    split = arguments.split or ("test" if arguments.npz is None else None)
    pixels, labels = read_npz(path, classifier.num_classes)
    fingerprint = npz_fingerprint(pixels, labels)
    if split in (None, "train"):
        name = Path(images.path or "").name  # by which the run knows the file; it may have another one now
        refuse_if_trained_on(run, images, "npz", name, fingerprint, len(pixels) - 2 * (len(pixels) // 10))
    if split is not None:
        places = split_places(len(pixels))[split]
        pixels, labels = pixels[places], labels[places]
    about = {"source": "npz", "name": path.name, "split": split, "fingerprint": fingerprint}
    return Judged(first(pixels, labels, arguments.count), None, about)


def refuse_if_trained_on(
    run: Run, images: ImagesConfig, source: str, name: str, fingerprint: str, train_length: int
) -> None:
    """Raise ValueError where the training part of this set is what the run was trained on."""
    if images.source != source:
        return
    if corpus_fingerprint(disk_corpus(images, name, fingerprint, train_length)) == run.corpus:
        raise ValueError(f"{run.id} was trained on the training part of {name}; take --split test")


def first(images: np.ndarray, labels: np.ndarray, count: int | None) -> StoredImages:
    """The first `count` images; None takes all."""
    if count is not None and count > len(images):
        raise ValueError(f"--count {count}: there are {len(images):,} images; leave it out, or take fewer")
    return StoredImages(images[:count], labels[:count])
