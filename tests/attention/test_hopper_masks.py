"""Every mask through the Hopper kernels."""

from __future__ import annotations

import pytest
import torch

from flashtrain.attention import Causal, Documents, lower
from tests.attention.hopper_cases import BF16, FP16, MASKS, ON_HOPPER, hopper
from tests.attention.oracle import NAMES, Case, assert_accurate, make_case

pytestmark = ON_HOPPER


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(BF16, 64), (BF16, 128), (BF16, 256), (FP16, 64), (FP16, 128), (FP16, 192)], ids=str
)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_right(device, dtype, head_dim, name, heads):
    case = make_case(device, dtype, MASKS[name], batch=2, heads=heads, seq=(703, 703), head_dim=head_dim)
    assert_accurate(case, "hopper")


def test_a_plan_of_another_batch_row_is_not_read(device):
    """Two packings in one batch: each row reads its own part of the table."""
    lengths = ((100, 603), (400, 303))
    case = make_case(device, BF16, Causal() & Documents(lengths), batch=2, heads=(2, 2), seq=(703, 703))
    together = hopper(case)
    for row in range(2):
        plan = lower(Causal() & Documents((lengths[row],)), 1, 703, 703, device)
        one = Case(*(x[row : row + 1] for x in (*case.inputs(), case.dout, case.dlse)), case.scale, plan)
        alone = hopper(one)
        assert torch.equal(together["out"][row : row + 1], alone["out"])
        for name in set(NAMES) - {"out", "dq"}:
            assert torch.equal(together[name][row : row + 1], alone[name]), name
