"""Scores that all lie far below zero: a score of zero that nobody asked for, such as that of a key past the end, would
get a weight beyond all numbers."""

from __future__ import annotations

import pytest
import torch

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow, layouts
from tests.attention.hopper_cases import ON_HOPPER
from tests.attention.oracle import assert_accurate, make_case, run

SEQ = 321  # a key past two blocks of 64 and of 128 each, and no multiple of either
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": Causal(),
    "window": SlidingWindow(70, 40),
    "documents": Documents(((100, 221),)),
    "causal documents": Causal() & Documents(((100, 221),)),
    "blocks": layouts.random_blocks(SEQ, 128, density=1.0),
    "small blocks": layouts.random_blocks(SEQ, 64, density=1.0),
    "causal blocks": Causal() & layouts.random_blocks(SEQ, 128, density=1.0),
}
BACKENDS = [pytest.param("portable", id="portable"), pytest.param("hopper", id="hopper", marks=ON_HOPPER)]
# The Hopper kernels take layouts up to head dim 128.
CASES = [
    pytest.param(backend, head_dim, name, marks=ON_HOPPER if backend == "hopper" else ())
    for backend in ("portable", "hopper")
    for head_dim in (64, 128, 192)
    for name in MASKS
    if backend == "portable" or head_dim <= 128 or "blocks" not in name
]


@pytest.mark.parametrize(("backend", "head_dim", "name"), CASES)
def test_keys_past_the_end_get_no_weight(device, backend, head_dim, name):
    case = make_case(device, torch.bfloat16, MASKS[name], heads=(2, 1), seq=(SEQ, SEQ), head_dim=head_dim)
    # One channel takes all scores to -200 and below, where exp(-lse) is infinite in float32.
    case.q[..., 0], case.k[..., 0] = 40.0, -200.0 / (40.0 * case.scale)
    assert_accurate(case, backend)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [(130, 65), (65, 193), (200, 3)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nor_do_they_with_other_lengths_and_in_order(device, backend, seq, head_dim, deterministic):
    case = make_case(device, torch.bfloat16, None, heads=(1, 1), seq=seq, head_dim=head_dim)
    case.q[..., 0], case.k[..., 0] = 40.0, -200.0 / (40.0 * case.scale)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        ours = run(case, backend)
    finally:
        torch.use_deterministic_algorithms(before)
    assert_accurate(case, backend, ours)
