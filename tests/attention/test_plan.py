"""A plan says exactly what its mask says, held against a definition that looks at one query and one key at a time."""

import random

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, Documents, Full, Mask, Plan, SlidingWindow, lower
from flashtrain.attention.masks import parts
from flashtrain.attention.plan import OPEN


def by_definition(mask: Mask, row: int, seq_q: int, seq_k: int) -> Tensor:
    """bool [seq_q, seq_k] for one batch row."""
    q_lengths: tuple[int, ...] = (seq_q,)
    k_lengths: tuple[int, ...] = (seq_k,)
    for member in parts(mask):
        if isinstance(member, Documents):
            keys = member.key_lengths or member.lengths
            q_lengths, k_lengths = member.lengths[row % len(member.lengths)], keys[row % len(keys)]
    visible = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    q_start = k_start = 0
    for q_len, k_len in zip(q_lengths, k_lengths, strict=True):
        for i in range(q_len):
            position = i + k_len - q_len
            for j in range(k_len):
                visible[q_start + i, k_start + j] = all(_allows(member, position, j) for member in parts(mask))
        q_start, k_start = q_start + q_len, k_start + k_len
    return visible


def _allows(member: Mask, position: int, key: int) -> bool:
    if isinstance(member, Causal):
        return key <= position
    if isinstance(member, SlidingWindow):
        after_left = member.left is None or key >= position - member.left
        return after_left and (member.right is None or key <= position + member.right)
    return True


def random_documents(seq: int, count: int, generator: random.Random) -> tuple[int, ...]:
    cuts = sorted(generator.randint(0, seq) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, seq], strict=True))


def random_masks() -> list[tuple[Mask, int, int, int]]:
    """(mask, batch, seq_q, seq_k): every kind and conjunction, short and long sides, empty documents."""
    generator = random.Random(0)
    cases = []
    for trial in range(60):
        seq_q, seq_k = generator.choice([(9, 9), (4, 11), (11, 4), (1, 7), (7, 1), (0, 5), (5, 0)])
        batch = generator.choice([1, 3])
        mask: Mask = Full()
        if trial % 2:
            mask &= Causal()
        if trial % 3 == 0:
            mask &= SlidingWindow(generator.choice([None, 0, 2]), generator.choice([None, 0, 3]))
        if trial % 5 < 3:
            count, rows = generator.randint(1, 4), generator.choice([1, batch])
            q_rows = tuple(random_documents(seq_q, count, generator) for _ in range(rows))
            k_rows = tuple(random_documents(seq_k, count, generator) for _ in range(rows))
            mask &= Documents(q_rows, k_rows)
        cases.append((mask, batch, seq_q, seq_k))
    return cases


@pytest.mark.parametrize(("mask", "batch", "seq_q", "seq_k"), random_masks())
def test_a_plan_is_its_mask(mask: Mask, batch: int, seq_q: int, seq_k: int) -> None:
    plan = lower(mask, batch, seq_q, seq_k, "cpu")
    wanted = torch.stack([by_definition(mask, row, seq_q, seq_k) for row in range(batch)])
    assert torch.equal(plan.dense()[:, 0].expand_as(wanted), wanted)
    assert plan.visible_pairs == pytest.approx(wanted.sum().item() / batch)
    assert plan.density == pytest.approx(wanted.float().mean().item() if wanted.numel() else 0.0)
    _assert_sorted(plan)
    if plan.rows is not None:
        _assert_transposed(plan, wanted)


def _assert_sorted(plan: Plan) -> None:
    """What the kernels rely on: intervals never move backwards, and lie among the keys."""
    lo, hi = plan.intervals()
    assert bool((lo <= hi).all()) and bool((hi <= plan.seq_k).all()) and bool((lo >= 0).all())
    assert bool((lo.diff(dim=-1) >= 0).all()) and bool((hi.diff(dim=-1) >= 0).all())


def _assert_transposed(plan: Plan, wanted: Tensor) -> None:
    assert plan.rows is not None and plan.columns is not None
    assert plan.rows.dtype == plan.columns.dtype == torch.int32
    query = torch.arange(plan.seq_q)
    first, last = plan.columns[:, 0, :, None], plan.columns[:, 1, :, None]
    assert torch.equal(((query >= first) & (query < last)).expand(len(wanted), -1, -1), wanted.mT)


def test_full_and_causal_store_nothing_and_are_recognised() -> None:
    full, causal = lower(None, 1, 8, 8, "cpu"), lower(Causal() & Full(), 1, 8, 8, "cpu")
    assert full.is_full and not full.is_causal and full.rows is None and (full.left, full.right) == (OPEN, OPEN)
    assert causal.is_causal and not causal.is_full and causal.rows is None
    assert not lower(Causal() & SlidingWindow(3), 1, 8, 8, "cpu").is_causal
    assert not lower(Causal() & Documents(((8,),)), 1, 8, 8, "cpu").is_causal


def test_two_packings_of_one_shape_never_share_a_plan_and_one_packing_always_does() -> None:
    first, second = Documents(((3, 5),)), Documents(((5, 3),))
    assert lower(first, 1, 8, 8, "cpu") is lower(Documents(((3, 5),)), 1, 8, 8, "cpu")
    assert not torch.equal(lower(first, 1, 8, 8, "cpu").dense(), lower(second, 1, 8, 8, "cpu").dense())
    causal = lower(first & Causal(), 1, 8, 8, "cpu")
    assert not torch.equal(causal.dense(), lower(first, 1, 8, 8, "cpu").dense())


def test_several_windows_join_to_the_narrowest() -> None:
    plan = lower(SlidingWindow(5, 9) & SlidingWindow(None, 2) & Causal() & SlidingWindow(7), 1, 20, 20, "cpu")
    assert (plan.left, plan.right) == (5, 0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Documents(((3, 4),)), r"lengths\[0\] adds up to 7 tokens and the sequence has 8"),
        (Documents(((8,), (8,), (8,))), "describes 3 rows and the batch has 2"),
        (Documents(((8,),), ((7,),)), r"key_lengths\[0\] adds up to 7"),
        (Documents(((8,),)) & Documents(((4, 4),)), "two different Documents"),
    ],
)
def test_documents_that_do_not_fit_are_refused_by_name(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lower(mask, 2, 8, 8, "cpu")
