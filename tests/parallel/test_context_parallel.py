"""Several processes that share a sequence compute what one computes alone: results and gradients, for every mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parallel.cases import (
    MASKS,
    Case,
    attend,
    attend_in_pairs,
    backward_without_plan,
    error_of,
    forward_passes,
    joined,
    recompilations,
    require_close,
)
from tests.parallel.ranks import Ranks

METHODS = ("ring", "ulysses")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_mask_gives_what_one_process_gives(ranks: Ranks, method: str, mask: str) -> None:
    case = Case(mask, method)
    require_close(joined(ranks.call(attend, case)), case.whole(), 1e-9)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_float32_is_right_to_its_rounding(ranks: Ranks, method: str, mask: str) -> None:
    case = Case(mask, method, torch.float32)
    require_close(joined(ranks.call(attend, case)), case.whole(), 1e-5)


@pytest.mark.parametrize("heads", [(8, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_key_heads_may_be_fewer_than_query_heads_and_than_ranks(
    ranks: Ranks, method: str, heads: tuple[int, int]
) -> None:
    case = Case("causal documents", method, heads=heads)
    require_close(joined(ranks.call(attend, case)), case.whole(), 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_groups_side_by_side_share_a_sequence_each(ranks: Ranks, method: str) -> None:
    cases = Case("causal", method), Case("causal documents", method)
    found = ranks.call(attend_in_pairs, cases)
    for pair, case in zip(range(0, ranks.size, 2), cases, strict=False):
        require_close(joined(found[pair : pair + 2]), case.whole(), 1e-9)


@pytest.mark.parametrize("wrapped", ["checkpoint", "compile"])
@pytest.mark.parametrize("method", METHODS)
def test_it_can_be_checkpointed_and_compiled_in_one_graph(ranks: Ranks, method: str, wrapped: str) -> None:
    case = Case("causal documents", method, wrapped=wrapped)
    require_close(joined(ranks.call(attend, case)), case.whole(), 1e-9)


def test_other_documents_need_no_other_graph(ranks: Ranks) -> None:
    assert ranks.call(recompilations, "ring") == [1] * ranks.size


@pytest.mark.parametrize("wrapped", ["", "compile"])
def test_a_plan_lives_as_long_as_a_backward_pass_needs_it(ranks: Ranks, wrapped: str) -> None:
    found = ranks.call(backward_without_plan, wrapped)
    require_close(joined(found), Case("causal documents").whole(), 1e-9)


def test_checkpointing_can_keep_the_results_of_a_ring(ranks: Ranks) -> None:
    assert ranks.call(forward_passes) == [1] * ranks.size


@pytest.mark.parametrize("method", METHODS)
def test_autocast_casts_the_inputs(ranks: Ranks, method: str) -> None:
    case = Case("causal", method, torch.float32, wrapped="autocast")
    found = ranks.call(attend, case)
    assert found[0][0].dtype == torch.bfloat16
    assert found[0][1].dtype == torch.float32
    require_close(joined(found), case.whole(), 0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks' tensors are on the CPU, where Triton interprets")
@pytest.mark.parametrize("mask", ["causal", "window in documents"])
def test_the_kernels_go_round_the_ring(ranks: Ranks, mask: str) -> None:
    case = Case(mask, "ring", torch.float32, heads=(2, 1), head_dim=16, backend="portable")
    require_close(joined(ranks.call(attend, case)), case.whole(), 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_length_that_cannot_be_cut_is_refused_by_name(ranks: Ranks, method: str) -> None:
    for message in ranks.call(error_of, Case("causal", method), 90 + ranks.size // 4):
        assert f"seq_len={90 + ranks.size // 4}" in message
        assert "96" in message or "92" in message


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_for_another_length_is_refused(ranks: Ranks, method: str) -> None:
    for message in ranks.call(error_of, Case("causal", method), 192):
        assert "192 tokens" in message


def test_chunks_that_cut_the_blocks_of_a_layout_are_refused(ranks: Ranks) -> None:
    case = Case("576 tokens", "ring")
    for message in ranks.call(error_of, case, 576):
        assert "seq_len=576" in message
        assert f"multiple of {2 * ranks.size * 64}" in message


def test_heads_that_the_ranks_cannot_share_are_refused_by_name(ranks: Ranks) -> None:
    odd = Case("causal", "ulysses", heads=(3, 3))
    assert all("num_heads=3" in message for message in ranks.call(error_of, odd, odd.seq_len))
    keys = replace(odd, heads=(12, 3))
    assert all("num_kv_heads=3" in message for message in ranks.call(error_of, keys, keys.seq_len))
