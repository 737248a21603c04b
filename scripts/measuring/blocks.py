"""Block layouts in the forms that others take: FlexAttention's, and a matrix of what is hidden."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import BlockLayout
from measuring.report import Unavailable


def seen_blocks(layout: BlockLayout, first: int = 0) -> Tensor:
    """Bool [num_q_blocks - first, num_k_blocks], true where a block is visible; of a layout that all heads share.

    first: block of queries to begin with, which at long sequences must be near the end.
    """
    counts, device = layout.starts.diff()[first:], layout.blocks.device
    seen = torch.zeros(len(counts), layout.num_k_blocks, dtype=torch.bool, device=device)
    row = torch.arange(len(counts), device=device).repeat_interleave(counts)
    seen[row, layout.blocks[layout.starts[first] :].long()] = True
    return seen


def hidden_keys(layout: BlockLayout, tail: int) -> Tensor:
    """Bool [tail, seq_k], true where the layout hides a key from one of the last `tail` queries."""
    query = torch.arange(layout.seq_q - tail, layout.seq_q, device=layout.blocks.device) // layout.block_q
    first = (layout.seq_q - tail) // layout.block_q
    key = torch.arange(layout.seq_k, device=layout.blocks.device) // layout.block_k
    return ~seen_blocks(layout, first)[query - first][:, key]


def flex(layout: BlockLayout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with the same blocks, all of them full."""
    device = layout.blocks.device
    if device.type != "cuda":
        raise Unavailable("FlexAttention's kernels run on GPUs")
    import torch._dynamo.config
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    seen, counts = seen_blocks(layout), layout.starts.diff()
    # As wide as there are blocks of keys: FlexAttention takes the length from it.
    indices = torch.zeros_like(seen, dtype=torch.int32)
    place = torch.arange(indices.shape[1], device=device)
    indices[place < counts[:, None]] = layout.blocks.int()
    num = counts.int()[None, None]
    none = torch.zeros_like(num), torch.zeros_like(indices)[None, None]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[query // layout.block_q, key // layout.block_k]

    size = (layout.block_q, layout.block_k)
    mask = BlockMask.from_kv_blocks(*none, num, indices[None, None], BLOCK_SIZE=size, mask_mod=visible)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask)
