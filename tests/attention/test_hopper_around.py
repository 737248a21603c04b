"""What runs before and after the Hopper backward kernel is plain Triton: right for every head dim, without a Hopper GPU
too."""

from __future__ import annotations

import pytest
import torch

from flashtrain.attention.hopper.around import finish_kernel
from flashtrain.attention.hopper.configs import tile_width


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 136, 192, 200, 256])
def test_dq_comes_in_order_and_nothing_beyond_it_is_written(device, head_dim):
    heads, seq_q, padded, width = 2, 100, 128, tile_width(head_dim)
    total = torch.randn(heads, padded, width, generator=torch.Generator().manual_seed(head_dim)).to(device)
    # Regions of 64 queries and 64 columns, each as the backward kernel's threads hold it: eight columns, warp, row and
    # pair of columns in a warp, lower or upper eight rows, left or right of a pair.
    regions = total.view(heads, padded // 64, 64, width // 64, 64).transpose(2, 3).reshape(-1, 4, 2, 8, 8, 4, 2)
    held = regions.permute(0, 4, 1, 3, 5, 2, 6).contiguous()
    room = torch.full((heads * seq_q * head_dim + 4096,), 7.0, device=device)
    dq = room[: heads * seq_q * head_dim].view(1, heads, seq_q, head_dim)
    strides = dq.stride()[:3]
    finish_kernel[(len(regions),)](held, dq, *strides, heads, seq_q, padded, 0.5, HEAD_DIM=width, COLUMNS=head_dim)
    torch.testing.assert_close(dq[0], 0.5 * total[:, :seq_q, :head_dim], rtol=0, atol=0)
    assert (room[dq.numel() :] == 7).all()
