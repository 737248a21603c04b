"""Labelled images: what a step trains on is a function of the step."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from flashtrain.data.images import ImageSteps, StoredImages, held_out_batches, turned


def stored(count: int = 10, side: int = 4, targets: bool = True) -> StoredImages:
    """Image i is made of the number i, and its target too, so that they can be told apart."""
    numbers = np.arange(count, dtype=np.uint8)
    images = np.broadcast_to(numbers[:, None, None], (count, side, side)).copy()
    images[:, 0, 1] = 200  # one corner's neighbour, to see flips and turns
    return StoredImages(images, numbers % 2, images // 100 + 1 if targets else None)


def steps(source: StoredImages, flips: bool = False, brightness: tuple[float, float] = (1.0, 1.0), seed: int = 1):
    return ImageSteps(source, 4, 2, seed=seed, flips=flips, brightness=brightness)


def numbers_of(batches) -> list[int]:
    return [int(image.flatten()[-1]) for batch in batches for image in batch.images]


def test_an_epoch_has_every_image_once_and_the_next_has_another_order():
    source = steps(stored(8))
    epochs = [numbers_of(source.batches(2 * e)) + numbers_of(source.batches(2 * e + 1)) for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]


def test_a_step_is_the_same_whenever_it_is_asked_for():
    first, again = steps(stored(), True, (0.5, 1.0)), steps(stored(), True, (0.5, 1.0))
    later = first.batches(7)
    first.batches(0)
    for a, b in zip(later, again.batches(7), strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and torch.equal(a.labels, b.labels)


def test_micro_batches_hold_the_step_in_order():
    batches = steps(stored()).batches(0)
    assert [batch.num_targets for batch in batches] == [2, 2]
    assert [batch.images.shape for batch in batches] == [(2, 4, 4)] * 2
    assert batches[0].labels.tolist() + batches[1].labels.tolist() == [n % 2 for n in numbers_of(batches)]


def test_flips_and_turns_go_with_the_target_and_all_eight_come():
    source, seen = steps(stored(), flips=True), set()
    for step in range(40):
        for batch in source.batches(step):
            for image, target in zip(batch.images, batch.targets, strict=True):
                bright = (image == 200).nonzero()
                assert len(bright) == 1
                assert ((target == 3).nonzero() == bright).all()
                seen.add(tuple(bright[0].tolist()))
    assert len(seen) == 8


def test_the_eight_ways_are_different_and_keep_every_pixel():
    image = np.arange(16).reshape(4, 4)
    ways = {turned(image, way).tobytes() for way in range(8)}
    assert len(ways) == 8
    assert all(sorted(turned(image, way).flatten()) == list(range(16)) for way in range(8))


def test_brightness_scales_an_image_and_never_its_target():
    batches = steps(stored(), brightness=(0.5, 0.6)).batches(0)
    for batch in batches:
        assert all(100 <= int(image.max()) <= 120 for image in batch.images)
        assert set(batch.targets.unique().tolist()) == {1, 3}


def test_stored_images_are_left_as_they_are():
    source = stored()
    before = source.images.copy()
    steps(source, True, (0.5, 0.9)).batches(3)
    assert np.array_equal(source.images, before)


def test_held_out_images_come_once_each_in_order():
    batches = list(held_out_batches(stored(5), 2))
    assert [batch.num_targets for batch in batches] == [2, 2, 1]
    assert numbers_of(batches) == list(range(5))


def test_another_seed_gives_another_order():
    assert numbers_of(steps(stored(), seed=1).batches(0)) != numbers_of(steps(stored(), seed=2).batches(0))


@pytest.mark.parametrize("targets", [True, False])
def test_a_batch_moves_whole(targets):
    batch = steps(stored(targets=targets)).batches(0)[0].to("meta")
    assert batch.images.is_meta and batch.labels.is_meta
    assert batch.targets is None or batch.targets.is_meta


@pytest.mark.parametrize("targets", [True, False])
def test_a_batch_comes_out_of_another_process_as_it_went_in(targets):
    batch = steps(stored(targets=targets)).batches(0)[0]
    other = pickle.loads(pickle.dumps(batch))
    assert torch.equal(other.images, batch.images) and torch.equal(other.labels, batch.labels)
    assert (other.num_targets, other.hidden) == (batch.num_targets, None)
    assert torch.equal(other.targets, batch.targets) if targets else other.targets is None
