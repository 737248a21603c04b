"""All ranks of a ring in one process, one after another: their work without the network, for tests and measurements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashtrain.attention import Mask
from flashtrain.parallel import partial, ring
from flashtrain.parallel.plan import lower_ring
from flashtrain.parallel.shards import shard


class FromList:
    """A `ring.Pass` between ranks that take turns: `tensors` holds what each rank's tensor has become so far."""

    def __init__(self, tensors: list[Tensor], rank: int) -> None:
        self.tensors, self.at_hand = tensors, rank

    def __call__(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.tensors[self.at_hand] = tensor
        self.at_hand = (self.at_hand - 1) % len(self.tensors)
        return lambda: self.tensors[self.at_hand]


class RingInOneProcess:
    """The ring of `size` ranks over k and v of the whole sequence, [batch, num_kv_heads, seq_len, head_dim].

    A rank's calls take and give its own shards, as `shard` cuts them, and do what `ContextParallel` does on that rank
    with `backend`, "hopper", "portable" or "standard": all but the sending. `dk` and `dv` of a rank are complete once
    all ranks have gone backward.
    """

    def __init__(self, k: Tensor, v: Tensor, mask: Mask | None, size: int, scale: float, backend: str) -> None:
        self.scale, self.backend = scale, backend
        self.keys = [torch.stack([shard(x, rank, size, dim=2) for x in (k, v)]) for rank in range(size)]
        self.sums = [torch.zeros_like(kv, dtype=partial.wide(kv.dtype)) for kv in self.keys]
        self.steps = [lower_ring(mask, len(k), k.shape[2], rank, size, k.device).steps for rank in range(size)]

    def forward(self, rank: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse of the rank's queries."""
        return ring.forward(q, k, v, self.steps[rank], self.scale, self.backend, FromList(self.keys, rank))

    def backward(
        self, rank: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq of the rank's queries, and what `sums` hold of dk and dv after that."""
        before = (rank - 1) % len(self.keys)
        passes = FromList(self.keys, rank), FromList(self.sums, before)
        settings = self.steps[rank], self.scale, self.backend, False
        dq, self.sums[rank] = ring.backward(dout, q, k, v, out, lse, *settings, *passes, self.sums[before])
        dk, dv = self.sums[rank]
        return dq, dk, dv
