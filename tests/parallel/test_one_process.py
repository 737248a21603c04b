"""A ring that one process plays alone, rank after rank, does the same work and gives the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, SlidingWindow, lower
from flashtrain.parallel import positions_of, shard, unshard
from flashtrain.parallel.one_process import RingInOneProcess
from flashtrain.parallel.plan import RingPlan, lower_ring
from tests.parallel.cases import MASKS, Case, require_close


@pytest.mark.parametrize("mask", ["causal", "two-sided window", "causal documents", "layout in documents"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_ring_in_one_process_gives_the_whole(mask: str, size: int) -> None:
    case = Case(mask, heads=(4, 2))
    require_close(_played(case, size), case.whole(), 1e-9)


def test_many_ranks_round_to_bfloat16_no_more_often_than_one() -> None:
    case = Case("causal", dtype=torch.bfloat16)
    alone, many = (_played(case, size) for size in (1, 8))
    for one, ours, truth in zip(alone, many, case.whole(), strict=True):
        error, wanted = (
            (x.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt() for x in (ours, one)
        )
        assert error <= 1.05 * wanted + 1e-6


def _played(case: Case, size: int) -> list[Tensor]:
    """out, dq, dk, dv of all ranks together."""
    q, k, v, dout = case.inputs()
    played = RingInOneProcess(k, v, case.mask_of(), size, case.head_dim**-0.5, "standard")
    results = []
    for rank in range(size):
        own = [shard(x, rank, size, dim=2) for x in (q, k, v)]
        out, lse = played.forward(rank, *own)
        dq, _, _ = played.backward(rank, shard(dout, rank, size, dim=2), *own, out, lse)
        results.append((out, dq))
    out, dq = (unshard(parts, dim=2) for parts in zip(*results, strict=True))
    dk, dv = (unshard([sums[i] for sums in played.sums], dim=2) for i in (0, 1))
    return [out, dq, dk, dv]


def _work(plan: RingPlan) -> list[list[tuple[int, int, bool]]]:
    """Of each piece in each step: queries, keys, and whether it needs tables."""
    return [[(p.plan.seq_q, p.plan.seq_k, p.plan.rows is not None) for p in step] for step in plan.steps]


def test_under_a_causal_mask_all_ranks_have_equally_much_to_do_and_no_table() -> None:
    plans = [lower_ring(Causal(), 1, 96, rank, 4, torch.device("cpu")) for rank in range(4)]
    assert {plan.visible_pairs for plan in plans} == {96 * 97 / 2 / 4}
    # Own keys first; then all queries with the first chunk of earlier ranks, the late ones with all of later ranks.
    assert _work(plans[1]) == [[(24, 24, False)], [(24, 12, False)], [(12, 24, False)], [(12, 24, False)]]


def test_what_a_rank_does_not_see_is_not_computed() -> None:
    plan = lower_ring(Causal() & SlidingWindow(5), 1, 96, 1, 4, torch.device("cpu"))
    # Chunks 1 and 6: of the keys of rank 0 the first five queries of chunk 1 see those before them; rank 2 has chunk 5.
    assert _work(plan) == [[(24, 24, True)], [(5, 5, True)], [], [(5, 5, True)]]


@pytest.mark.parametrize("mask", MASKS)
def test_all_ranks_together_see_what_the_mask_shows(mask: str) -> None:
    case = Case(mask)
    plans = [lower_ring(case.mask_of(), case.batch, case.seq_len, rank, 4, torch.device("cpu")) for rank in range(4)]
    seen = torch.zeros(2, 4, case.seq_len, case.seq_len, dtype=torch.int64)
    for rank, plan in enumerate(plans):
        queries = positions_of(case.seq_len, rank, 4)
        for step, pieces in enumerate(plan.steps):
            keys = positions_of(case.seq_len, (rank - step) % 4, 4)
            for piece in pieces:
                place = queries[piece.queries][:, None], keys[piece.keys]
                seen[:, :, *place] += piece.plan.dense().expand(2, 4, -1, -1)
    whole = lower(case.mask_of(), case.batch, case.seq_len, case.seq_len, "cpu")
    assert torch.equal(seen, whole.dense().expand_as(seen).long())
    assert sum(plan.visible_pairs for plan in plans) == whole.visible_pairs


def test_shards_and_their_positions_belong_together() -> None:
    whole = torch.arange(48).reshape(1, 24, 2)
    parts = [shard(whole, rank, 3) for rank in range(3)]
    assert positions_of(24, 1, 3).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert torch.equal(parts[1][0], whole[0, positions_of(24, 1, 3)])
    assert torch.equal(unshard(parts), whole)
