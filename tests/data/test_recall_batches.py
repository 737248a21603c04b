"""Recall tasks for validation: all of them once, the same ones each time, in batches of one shape."""

import pytest
import torch

from flashtrain.data.batch import IGNORE
from flashtrain.data.recall import TASKS, associative_recall, induction, passkey, shortest_passkey, spread_depths
from flashtrain.data.recall_batches import recall_batches
from flashtrain.data.tokenizers import load_tokenizer

BYTES = load_tokenizer("bytes")


@pytest.mark.parametrize("rows", [1, 3, 16, 20])
def test_every_task_is_asked_once_in_batches_of_one_shape(rows):
    batches = list(recall_batches(BYTES, 256, rows, document_borders=False))
    assert all(batch.tokens.shape == batch.targets.shape == (rows, 256) for batch in batches)
    assert len(batches) == -(-16 // rows)
    expected = [(0, passkey(BYTES, 256, depth, seed)) for seed, depth in enumerate(spread_depths(8))]
    expected += [(1, associative_recall(257, 256, seed)) for seed in range(4)]
    expected += [(2, induction(257, 256, seed)) for seed in range(4)]
    found = [
        row
        for batch in batches
        for row in zip(batch.tasks, batch.tokens, batch.targets, strict=True)
        if (row[2] != IGNORE).any()
    ]
    assert spread_depths(8)[0] == 0
    assert spread_depths(8)[-1] == 1
    for (task, example), (its, tokens, targets) in zip(expected, found, strict=True):
        assert task == its
        assert tokens.tolist() == example.tokens.tolist()
        assert targets.tolist() == example.targets.tolist()
    assert sum(batch.num_targets for batch in batches) == 0


def test_a_task_is_one_document_where_borders_are_cut():
    for batch in recall_batches(BYTES, 32, 3, document_borders=True):
        assert batch.documents == ((32,),) * 3
        assert torch.equal(batch.positions, torch.arange(32).expand(3, -1))


def test_passkeys_are_left_out_where_they_have_no_room():
    room = shortest_passkey(BYTES)
    for length, tasks in ((room, TASKS), (room - 1, TASKS[1:])):
        batches = recall_batches(BYTES, length, 1, document_borders=False)
        assert {TASKS[batch.tasks[0]] for batch in batches} == set(tasks)
