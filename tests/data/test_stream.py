from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flashtrain.data.batch import IGNORE
from flashtrain.data.packing import Sequences, pack
from flashtrain.data.stream import StepBatches, validation_batches
from flashtrain.data.token_file import TokenFile

Write = Callable[..., TokenFile]


@pytest.fixture
def sequences(token_file: Write) -> Sequences:
    """25 sequences of 8 tokens; the first token of sequence i is 8 * i."""
    return pack(token_file([90, 111]), 8, "concat", False)


def firsts(batches: list) -> list[int]:
    """Sequence numbers, read off the tokens."""
    return [int(token) // 8 for batch in batches for token in batch.tokens[:, 0]]


def test_a_step_is_its_micro_batches_with_shifted_targets(sequences: Sequences) -> None:
    batches = StepBatches(sequences, 6, 2, seed=0).batches(0)
    assert [tuple(batch.tokens.shape) for batch in batches] == [(2, 8)] * 3
    for batch in batches:
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, batch.tokens + 1)
        assert batch.num_targets == 16
        assert batch.positions is None
        assert batch.documents is None


def test_each_sequence_comes_once_an_epoch_also_where_a_step_crosses_epochs(sequences: Sequences) -> None:
    stream = StepBatches(sequences, 6, 3, seed=0)
    order = [number for step in range(25) for number in firsts(stream.batches(step))]  # 150 = 6 epochs of 25
    epochs = [order[at : at + 25] for at in range(0, 150, 25)]
    assert all(sorted(epoch) == list(range(25)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len(stream) == 5


def test_any_step_can_be_had_at_any_time_and_twice(sequences: Sequences) -> None:
    stream = StepBatches(sequences, 4, 2, seed=3)
    straight = [firsts(stream.batches(step)) for step in range(12)]
    resumed = StepBatches(sequences, 4, 2, seed=3)
    assert [firsts(resumed.batches(step)) for step in reversed(range(12))] == straight[::-1]
    assert torch.equal(stream.batches(7)[1].tokens, stream.batches(7)[1].tokens)


def test_the_seed_changes_the_order(sequences: Sequences) -> None:
    assert (
        StepBatches(sequences, 25, 5, seed=0).indices(0).tolist()
        != StepBatches(sequences, 25, 5, 1).indices(0).tolist()
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_step_without_duplicates(sequences: Sequences, world_size: int) -> None:
    alone = StepBatches(sequences, 12, 2, seed=0)
    ranks = [StepBatches(sequences, 12, 2, 0, rank, world_size) for rank in range(world_size)]
    for step in range(5):
        shared = [number for rank in ranks for number in firsts(rank.batches(step))]
        assert shared == firsts(alone.batches(step))


def test_fewer_sequences_than_a_step_are_repeated_over_epochs(token_file: Write) -> None:
    stream = StepBatches(pack(token_file([25]), 8, "concat", False), 8, 4, seed=0)
    assert sorted(firsts(stream.batches(0))) == [0, 0, 0, 1, 1, 1, 2, 2] or len(firsts(stream.batches(0))) == 8
    seen = [number for step in range(3) for number in firsts(stream.batches(step))]
    assert [seen.count(number) for number in range(3)] == [8, 8, 8]


def test_a_step_that_cannot_be_shared_names_the_keys(sequences: Sequences) -> None:
    with pytest.raises(ValueError, match=r"trainer\.batch_tokens.*6 sequences.*trainer\.micro_batch_tokens"):
        StepBatches(sequences, 6, 4, seed=0)
    with pytest.raises(ValueError, match="4 devices"):
        StepBatches(sequences, 6, 1, seed=0, rank=0, world_size=4)
    with pytest.raises(ValueError, match="rank"):
        StepBatches(sequences, 6, 1, seed=0, rank=2, world_size=2)


def test_borders_come_with_lengths_positions_and_counted_targets(token_file: Write) -> None:
    stream = StepBatches(pack(token_file([7, 9, 20, 13]), 16, "concat", True), 3, 3, seed=0)
    (batch,) = stream.batches(0)
    assert batch.documents is not None
    assert batch.positions is not None
    assert sorted(batch.documents) == [(4, 12), (7, 9), (16,)]
    for row, lengths in enumerate(batch.documents):
        assert batch.positions[row].tolist() == [place for length in lengths for place in range(length)]
    assert batch.num_targets == int((batch.targets != IGNORE).sum()) == 14 + 16 + 15


def test_a_batch_moves_with_all_its_tensors(token_file: Write) -> None:
    (batch,) = StepBatches(pack(token_file([7, 10]), 16, "concat", True), 1, 1, seed=0).batches(0)
    moved = batch.to("meta", non_blocking=True)
    assert moved.positions is not None
    assert {tensor.device.type for tensor in (moved.tokens, moved.targets, moved.positions)} == {"meta"}
    assert moved.documents == batch.documents
    assert moved.num_targets == batch.num_targets


def test_validation_sees_each_sequence_once_in_a_fixed_order(sequences: Sequences) -> None:
    batches = list(validation_batches(sequences, 4))
    assert firsts(batches) == list(range(25))
    assert [len(batch.tokens) for batch in batches] == [4] * 6 + [1]


@pytest.mark.parametrize("limit", [None, 1, 7, 25, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_is_shared_by_ranks_without_duplicates(
    sequences: Sequences, limit: int | None, world_size: int
) -> None:
    shares = [firsts(list(validation_batches(sequences, 2, limit, rank, world_size))) for rank in range(world_size)]
    everything = sorted(number for share in shares for number in share)
    assert everything == firsts(list(validation_batches(sequences, 2, limit)))
    assert len(everything) == len(set(everything)) == min(limit or 25, 25)


def test_limited_validation_is_spread_over_the_whole_set(sequences: Sequences) -> None:
    numbers = firsts(list(validation_batches(sequences, 2, limit=5)))
    assert numbers == [0, 5, 10, 15, 20]
    assert np.diff(numbers).min() > 0
