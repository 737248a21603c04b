"""Short sequences first: the same tokens and targets in the same order, cut into pieces that see only themselves."""

from __future__ import annotations

import pytest
import torch

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.data.short_first import ShortFirst, cut, lengths


def batch(documents: tuple[tuple[int, ...], ...] | None) -> Batch:
    tokens = torch.arange(32).view(2, 16)
    targets = tokens + 1
    targets[0, 3] = IGNORE
    positions = None if documents is None else torch.zeros(2, 16, dtype=torch.int64)
    return Batch(tokens, targets, positions, documents, 31)


def test_lengths_double_from_the_first_to_the_whole():
    assert lengths(1024, 8192) == [1024, 2048, 4096, 8192]
    assert lengths(1000, 3000) == [1500, 3000]
    assert lengths(64, 100) == [100]


def test_each_length_has_the_same_share_of_the_steps_and_then_all_are_whole():
    growing = ShortFirst(None, seq_len=4096, first=1024, warmup_steps=10)  # type: ignore[arg-type]
    assert [growing.length_at(step) for step in range(12)] == [1024] * 5 + [2048] * 5 + [4096] * 2
    assert ShortFirst(None, 4096, 1024, warmup_steps=0).length_at(0) == 4096  # type: ignore[arg-type]


def test_cutting_loses_no_token_and_no_target():
    whole = batch(None)
    pieces = cut(whole, 4)
    assert pieces.tokens.shape == pieces.targets.shape == (8, 4)
    assert torch.equal(pieces.tokens.flatten(), whole.tokens.flatten())
    assert torch.equal(pieces.targets.flatten(), whole.targets.flatten())
    assert pieces.num_targets == whole.num_targets
    assert pieces.positions is None and pieces.documents is None


def test_a_document_over_a_cut_goes_on_as_another_one_and_positions_restart():
    pieces = cut(batch(((6, 10), (16,))), 8)
    assert pieces.documents == ((6, 2), (8,), (8,), (8,))
    assert pieces.positions is not None
    assert pieces.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert pieces.positions[1].tolist() == list(range(8))


@pytest.mark.parametrize("documents", [None, ((16,), (4, 12))])
def test_a_whole_sequence_is_left_as_it_is(documents):
    whole = batch(documents)
    assert cut(whole, 16) is whole
