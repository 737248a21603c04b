"""Attention with heads in place of tokens (DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).

An all-to-all exchange gives each rank the whole sequence of a share of the heads; it computes ordinary attention, and
another exchange brings the outputs back to their tokens. The tokens stand in their own order in between, so that a mask
of the whole sequence holds as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain.attention import BlockLayout, Full, Mask, Plan, attention, lower
from flashtrain.attention.masks import parts
from flashtrain.parallel.shards import chunk_length, shard, unshard

# All-to-all: of a tensor [size, ...] part i goes to rank i, and part i of the result is from rank i. Its gradient is
# another one.
Exchange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class HeadsPlan:
    """`plan` for the whole sequence of `seq_len` tokens and, under a block layout by head, for this rank's heads.

    batch: rows of the batch; device: where the plan's tables lie; size: ranks; heads: query heads, those of all ranks
    together, that the layout has lists for, or 1.
    """

    seq_len: int
    batch: int
    device: torch.device
    size: int
    heads: int
    plan: Plan

    @property
    def counted_pairs(self) -> float | Tensor:
        """`visible_pairs`, left on the device where only that knows it."""
        pairs = self.plan.visible_pairs if self.plan.counted_pairs is None else self.plan.counted_pairs
        return pairs / self.size

    @property
    def visible_pairs(self) -> float:
        """The rank's share of the mask's visible (query, key) pairs, a batch row and head."""
        return float(self.counted_pairs)


def lower_heads(mask: Mask | None, batch: int, seq_len: int, rank: int, size: int, device: torch.device) -> HeadsPlan:
    """The plan of `rank` among `size` for a mask of the whole sequence.

    Raises:
        ValueError: lengths that do not fit the mask, as in `attention.lower`; a sequence that cannot be cut into equal
            chunks; a block layout by head whose heads cannot be shared.
    """
    chunk_length(seq_len, size)
    own: Mask = Full()
    heads = 1
    for member in parts(Full() if mask is None else mask):
        if isinstance(member, BlockLayout) and member.heads > 1:
            heads = member.heads
            own = own & _own_heads(member, rank, size)
        else:
            own = own & member
    return HeadsPlan(seq_len, batch, device, size, heads, lower(own, batch, seq_len, seq_len, device))


@functools.lru_cache(maxsize=64)
def _own_heads(layout: BlockLayout, rank: int, size: int) -> BlockLayout:
    """The layout of one rank's heads; kept, since attention's plans are kept for each layout."""
    if layout.heads % size:
        raise ValueError(
            f"mask: the block layout has heads={layout.heads}, which {size} ranks cannot share; "
            'take method="ring", or one layout for all heads'
        )
    rows = layout.heads // size * layout.num_q_blocks
    starts = layout.starts[rank * rows : (rank + 1) * rows + 1]
    blocks = layout.blocks[int(starts[0]) : int(starts[-1])]
    sizes = layout.seq_q, layout.seq_k, layout.block_q, layout.block_k
    return BlockLayout(*sizes, layout.heads // size, starts - starts[0], blocks)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: HeadsPlan,
    scale: float | None,
    backend: str,
    deterministic: bool | None,
    exchange: Exchange,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: [batch, num_heads, seq_len / size, head_dim]
        k, v: [batch, num_kv_heads, seq_len / size, head_dim]. With fewer key heads than ranks each is sent to all the
            ranks that have its query heads.

    Returns:
        out like q.

    Raises:
        ValueError: heads that the ranks cannot share.
    """
    size, num_heads, num_kv_heads = plan.size, q.shape[1], k.shape[1]
    if num_heads % size:
        raise ValueError(
            f'num_heads={num_heads}: method="ulysses" gives each of {size} ranks as many heads; take a multiple of '
            f'{size}, fewer ranks, or method="ring"'
        )
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f'num_kv_heads={num_kv_heads}: method="ulysses" gives each of {size} ranks as many key heads, or one to '
            f'several; take a multiple or a divisor of {size}, or method="ring"'
        )
    if num_kv_heads < size:
        k, v = (x.repeat_interleave(size // num_kv_heads, dim=1) for x in (k, v))
    # One exchange for all three: [size, batch, a rank's heads of q, k and v, seq_len / size, head_dim].
    shares = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)]
    together = unshard(exchange(torch.cat(shares, dim=2)).unbind(0), dim=2)
    q, k, v = together.split([share.shape[2] for share in shares], dim=1)
    out = attention(q, k, v, plan.plan, scale=scale, backend=backend, deterministic=deterministic)
    back = exchange(torch.stack([shard(out, rank, size, dim=2) for rank in range(size)]))
    return back.movedim(0, 1).flatten(1, 2)
