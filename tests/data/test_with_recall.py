"""Text with recall tasks mixed in: as many as asked for, whole, and the same at every look."""

import numpy as np
import torch

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.data.with_recall import WithRecall


def text(step, borders=False):
    """Two micro-batches of 8 rows that hold nothing but their step."""
    tokens = torch.full((8, 200), step)
    positions = torch.arange(200).remainder(100).repeat(8, 1) if borders else None
    documents = ((100, 100),) * 8 if borders else None
    return [Batch(tokens.clone(), tokens.clone(), positions, documents, tokens.numel()) for _ in range(2)]


def test_the_share_of_the_rows_are_tasks_and_the_others_are_untouched():
    mixed = WithRecall(text, ByteTokenizer(), 0.25, seed=1)
    replaced = 0
    for step in range(1, 60):
        for batch in mixed.batches(step):
            assert batch.num_targets == int((batch.targets != IGNORE).sum())
            own = (batch.tokens == step).all(1)
            assert torch.equal(own, (batch.targets == step).all(1))
            replaced += int((~own).sum())
    assert abs(replaced / (59 * 16) - 0.25) < 0.05
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(mixed.batches(3), mixed.batches(3), strict=True))
    rows = torch.cat([batch.tokens for step in range(1, 60) for batch in mixed.batches(step)])
    tasks = [bytes(np.clip(row, 0, 255).astype(np.uint8)) for row in rows.numpy() if len(set(row)) > 1]
    assert len(set(tasks)) == len(tasks)  # never the same twice


def test_a_task_is_one_document():
    (batch, _) = WithRecall(lambda step: text(step, True), ByteTokenizer(), 1.0, seed=1).batches(1)
    assert batch.documents == ((200,),) * 8
    assert torch.equal(batch.positions, torch.arange(200).repeat(8, 1))
    assert WithRecall(text, ByteTokenizer(), 0.0, seed=1).batches(1)[0].num_targets == 1600


def test_a_step_has_the_same_tasks_however_it_is_cut_and_shared():
    def rows(size, count, rank=0):
        def batches(step):
            tokens = torch.full((size, 200), step)
            return [Batch(tokens.clone(), tokens.clone(), None, None, tokens.numel()) for _ in range(count)]

        mixed = WithRecall(batches, ByteTokenizer(), 0.5, seed=1, rank=rank).batches(2)
        return torch.cat([torch.stack((batch.tokens, batch.targets), dim=1) for batch in mixed])

    whole = rows(16, 1)
    assert 0 < int((whole[:, 0] != 2).any(1).sum()) < 16
    assert torch.equal(rows(4, 4), whole)
    assert torch.equal(torch.cat([rows(8, 1, rank) for rank in (0, 1)]), whole)
    assert torch.equal(torch.cat([rows(2, 4, rank) for rank in (0, 1)]), whole)
