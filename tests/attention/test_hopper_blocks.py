"""Block layouts through the Hopper kernels."""

from __future__ import annotations

import pytest
import torch

from flashtrain.attention import Causal, Documents, Full, SlidingWindow, attention, choose_backend, layouts, lower
from tests.attention.hopper_cases import BF16, FP16, ON_HOPPER, hopper
from tests.attention.oracle import assert_accurate, make_case

pytestmark = ON_HOPPER


LAYOUTS = {
    "butterfly": lambda seq, block=128: layouts.butterfly(seq, block),
    "sinks": lambda seq, block=128: layouts.window_sinks(seq, block, window=1),
    "uneven, with empty rows": lambda seq, block=128: layouts.random_blocks(
        seq, block, density=0.3, seed=5, no_empty_rows=False
    ),
    "all blocks": lambda seq, block=128: layouts.random_blocks(seq, block, density=1.0),
    "no block": lambda seq, block=128: layouts.random_blocks(seq, block, density=0.0, no_empty_rows=False),
}
RESTS = {
    "alone": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(333),
    "documents": Documents(((1, 300, 0, 602, 200), (703, 400))),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_block_layout_is_right(device, layout, rest, head_dim):
    mask = LAYOUTS[layout](1103) & RESTS[rest]
    case = make_case(device, BF16, mask, batch=2, heads=(4, 4), seq=(1103, 1103), head_dim=head_dim)
    assert_accurate(case, "hopper")


@pytest.mark.parametrize("block", [64, (128, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_blocks_are_right_in_every_layout(device, layout, rest, head_dim, block):
    mask = LAYOUTS[layout](1103, block) & RESTS[rest]
    case = make_case(device, BF16, mask, batch=2, heads=(4, 4), seq=(1103, 1103), head_dim=head_dim)
    assert_accurate(case, "hopper")


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiles_of_long_lists_are_right_with_every_block_layout(device, layout, rest):
    """Lists here are short ones: these tiles are named."""
    from flashtrain.attention.hopper import calls
    from flashtrain.attention.hopper.configs import LISTED, LONG_LISTED

    assert LISTED[64] != LONG_LISTED[64]
    mask = LAYOUTS[layout](1103) & RESTS[rest]
    case = make_case(device, BF16, mask, batch=2, heads=(4, 4), seq=(1103, 1103))
    with torch.no_grad():
        out, lse = calls.forward(*case.inputs(), case.plan.limits, case.scale, LONG_LISTED[64])
    assert_accurate(case, "hopper", {**hopper(case), "out": out, "lse": lse})


@pytest.mark.parametrize("block", [128, 64, (128, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [(900, 1500), (1500, 900), (1, 300), (128, 128)], ids=str)
def test_block_layouts_of_grouped_heads_and_of_other_lengths_are_right(device, seq, head_dim, block):
    mask = layouts.random_blocks(seq, block, density=0.4, seed=2, no_empty_rows=False) & Causal()
    assert_accurate(make_case(device, BF16, mask, batch=2, heads=(6, 2), seq=seq, head_dim=head_dim), "hopper")


@pytest.mark.parametrize("block", [128, 64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_layout_of_each_head_is_right(device, head_dim, block):
    mask = layouts.random_blocks(1103, block, density=0.3, seed=2, heads=4, no_empty_rows=False)
    assert_accurate(make_case(device, FP16, mask, batch=2, heads=(4, 4), seq=(1103, 1103), head_dim=head_dim), "hopper")


def test_block_layouts_that_the_kernels_do_not_walk_go_to_the_portable_ones(device):
    q = torch.randn(1, 4, 512, 64, device=device, dtype=BF16)
    own = lower(layouts.random_blocks(512, density=0.5, heads=4), 1, 512, 512, device)
    assert choose_backend("auto", q, blocks=own.blocks, group=2) == "portable"
    assert choose_backend("auto", q, blocks=own.blocks) == "hopper"
    with pytest.raises(ValueError, match="layouts by head"):
        attention(q, q[:, :2], q[:, :2], own, backend="hopper")
