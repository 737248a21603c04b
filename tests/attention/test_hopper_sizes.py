"""Every length, head dim and scale through the Hopper kernels."""

from __future__ import annotations

import pytest
import torch

from flashtrain.attention import Causal
from tests.attention.hopper_cases import BF16, MASKS, ON_HOPPER, hopper
from tests.attention.oracle import assert_accurate, assert_close, make_case
from tests.attention.test_on_gpu import by_chunks

pytestmark = ON_HOPPER


@pytest.mark.parametrize("name", ["full", "causal", "documents"])
@pytest.mark.parametrize("head_dim", [40, 48, 56, 72, 80, 96, 112, 120, 136, 192, 256])
def test_every_head_dim_in_steps_of_8_is_right(device, head_dim, name):
    """Tiles are wider than most of these; what lies beyond must be neither read nor written."""
    case = make_case(device, BF16, MASKS[name], batch=2, heads=(4, 2), seq=(703, 703), head_dim=head_dim)
    assert_accurate(case, "hopper")


@pytest.mark.parametrize("head_dim", [80, 96, 192])
@pytest.mark.parametrize("seq", [(1, 1), (65, 129), (300, 2048), (2048, 300)], ids=str)
def test_every_length_is_right_at_head_dims_between_tiles(device, seq, head_dim):
    assert_accurate(make_case(device, BF16, Causal(), heads=(4, 1), seq=seq, head_dim=head_dim), "hopper")


LENGTHS = [
    (1, 1),
    (1, 4097),
    (63, 64),
    (65, 129),
    (191, 193),
    (192, 192),
    (799, 3),
    (2048, 300),
    (300, 2048),
    (3, 5000),
]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("seq", LENGTHS, ids=str)
def test_every_length_is_right_and_rows_that_see_nothing_give_zero(device, seq, mask, head_dim):
    assert_accurate(make_case(device, BF16, mask, heads=(4, 1), seq=seq, head_dim=head_dim), "hopper")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys_give_zero(device, seq, head_dim):
    results = hopper(make_case(device, BF16, Causal(), seq=seq, head_dim=head_dim))
    assert all((results[name] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert torch.isneginf(results["lse"]).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq", [4096, 5000, 16384])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_stay_within_twice_the_error_of_plain_pytorch(device, seq, head_dim, causal):
    case = make_case(device, BF16, Causal() if causal else None, heads=(1, 1), seq=(seq, seq), head_dim=head_dim)
    case.dlse.zero_()
    ours = hopper(case)
    truth, plain = by_chunks(case, torch.float64, causal=causal), by_chunks(case, BF16, causal=causal)
    for name in ("out", "dq", "dk", "dv"):
        assert_close(name, ours[name], plain[name], truth[name])


@pytest.mark.parametrize("scale", [0.0, -0.5, 30.0])
def test_any_scale_is_right(device, scale):
    case = make_case(device, BF16, Causal(), heads=(2, 2), seq=(300, 300), scale=scale)
    assert_accurate(case, "hopper")
