from __future__ import annotations

import numpy as np
import pytest

from flashtrain.data.order import shuffled, shuffled_many


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000, 4097, 100_003])
def test_the_order_is_a_bijection(length: int) -> None:
    order = shuffled_many(np.arange(length), length, seed=1, epoch=0)
    assert np.array_equal(np.sort(order), np.arange(length))


def test_it_differs_by_epoch_and_seed_and_is_equal_for_equal_ones() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return shuffled_many(np.arange(1000), 1000, seed, epoch).tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1, 11) for epoch in (0, 1, 10)}) == 9


def test_one_index_and_many_agree() -> None:
    many = shuffled_many(np.arange(77), 77, seed=5, epoch=3)
    assert [shuffled(i, 77, 5, 3) for i in range(77)] == many.tolist()


def test_the_order_is_the_same_on_every_machine() -> None:
    assert shuffled_many(np.arange(8), 8, seed=0, epoch=0).tolist() == [3, 7, 4, 6, 5, 2, 1, 0]


def test_lengths_beyond_32_bits_work() -> None:
    length = 2**40 + 12_345
    indices = np.array([0, 1, length - 1, 2**33])
    order = shuffled_many(indices, length, seed=0, epoch=0)
    assert len(set(order.tolist())) == 4
    assert order.max() > 2**32
    assert 0 <= order.min() <= order.max() < length


def test_every_place_is_equally_likely() -> None:
    length, epochs = 6, 2000
    counts = np.zeros((length, length))
    for epoch in range(epochs):
        counts[np.arange(length), shuffled_many(np.arange(length), length, seed=7, epoch=epoch)] += 1
    expected = epochs / length
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_neighbours_do_not_stay_together() -> None:
    order = shuffled_many(np.arange(10_000), 10_000, seed=0, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        shuffled(10, 10, 0, 0)
