"""Pixels that are hidden: how many, which, and always the same ones for the same step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashtrain.data.hiding import Hiding
from flashtrain.data.images import ImageSteps, StoredImages, held_out_batches


def drawn(hiding: Hiding, side: int, seed: int = 0) -> np.ndarray:
    return hiding.places(side, np.random.default_rng(seed))


@pytest.mark.parametrize(("share", "count"), [(0.5, 32), (0.25, 16), (0.001, 1), (0.999, 63)])
def test_the_share_is_kept_but_never_all_and_never_none(share, count):
    places = drawn(Hiding(share), 8)
    assert len(places) == len(set(places.tolist())) == count
    assert places.min() >= 0 and places.max() < 64


def test_squares_are_hidden_as_a_whole():
    mask = np.zeros(12 * 12, bool)
    mask[drawn(Hiding(0.5, 4), 12)] = True
    blocks = mask.reshape(3, 4, 3, 4).transpose(0, 2, 1, 3).reshape(9, 16)
    assert sorted(blocks.sum(1).tolist()) == [0] * 5 + [16] * 4


def test_every_pixel_is_hidden_as_often_as_any_other():
    often = np.bincount(np.concatenate([drawn(Hiding(0.25, 2), 8, seed) for seed in range(800)]), minlength=64)
    assert abs(often - 200).max() < 5 * np.sqrt(800 * 0.25 * 0.75)


@pytest.mark.parametrize(("square", "side"), [(3, 32), (32, 32)])
def test_squares_that_do_not_fit_are_refused(square, side):
    with pytest.raises(ValueError, match=r"pretrain\.square"):
        Hiding(0.5, square).check(side)


HALF = Hiding(0.5)


def steps(seed: int = 1, hiding: Hiding | None = HALF) -> ImageSteps:
    images = np.arange(8, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    return ImageSteps(StoredImages(images, np.zeros(8)), 4, 2, seed, True, (0.7, 1.0), hiding)


def hidden(batches) -> torch.Tensor:
    return torch.cat([batch.hidden for batch in batches])


def test_what_a_step_hides_is_a_function_of_seed_and_step():
    first = hidden(steps().batches(5))
    again = steps()
    again.batches(0)
    assert torch.equal(hidden(again.batches(5)), first) and first.shape == (4, 8)
    assert not torch.equal(hidden(steps().batches(6)), first)
    assert not torch.equal(hidden(steps(seed=2).batches(5)), first)
    assert all(not torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


def test_hiding_changes_no_image_and_without_it_nothing_is_hidden():
    with_it, without = steps().batches(3), steps(hiding=None).batches(3)
    assert all(torch.equal(a.images, b.images) and b.hidden is None for a, b in zip(with_it, without, strict=True))


def test_held_out_images_always_hide_the_same_whatever_the_batch():
    source = StoredImages(np.zeros((5, 4, 4), np.uint8), np.zeros(5))
    two, five = (hidden(held_out_batches(source, size, Hiding(0.5))) for size in (2, 5))
    assert torch.equal(two, five)
    assert next(held_out_batches(source, 2)).hidden is None
