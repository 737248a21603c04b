"""What the tests of the Hopper kernels on a Hopper GPU share.

They hold the promises of the portable kernels, which no interpreter can show for these.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow
from tests.attention.oracle import Case, run

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(200),
    "both sides": SlidingWindow(100, 50),
    "narrow": Causal() & SlidingWindow(0),
    "documents": Causal() & Documents(((1, 300, 0, 214, 188),)),
    "documents, full": Documents(((64, 128, 511),)),
    "documents, window": Documents(((1, 300, 0, 214, 188), (703, 0))) & SlidingWindow(40, 9),
}


def hopper(case: Case) -> dict[str, Tensor]:
    return run(case, "hopper")
