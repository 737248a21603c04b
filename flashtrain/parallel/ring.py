"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): queries stay, keys and values go round.

Each rank computes its queries' attention to the keys at hand while these already travel on to the next rank, and joins
the partial results. In the backward pass the keys go round once more, and the sums of their gradients follow them one
step behind: what a rank adds goes on while it computes the next part, until the sums are back home. A rank's own keys
need nobody, so they are what it computes while it would have to wait: a half of their heads while the first keys of
others come, the other half while the sums of its own keys come home.

How a tensor gets to the next rank is handed in as a `Pass`: over the network, or from a list where one process plays
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.parallel import partial
from flashtrain.parallel.plan import Piece, Steps

# Starts to send a tensor to the next rank. What it returns waits for that and gives the one from the previous rank, of
# the same shape and dtype.
Pass = Callable[[Tensor], Callable[[], Tensor]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float, backend: str, pass_keys: Pass
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: [batch, num_heads, seq_len / size, head_dim]
        k, v: [batch, num_kv_heads, seq_len / size, head_dim]
        steps: of this rank's plan.
        backend: as in `partial.forward`.

    Returns:
        out like q, and lse [batch, num_heads, seq_len / size], float32 or wider.
    """
    dtype = partial.wide(q.dtype)
    out, lse = q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    kv = torch.stack((k, v))
    for step, pieces in enumerate(steps, 1):
        arrive = pass_keys(kv) if step < len(steps) else None
        for piece in pieces:
            rows, (keys, values) = piece.queries, kv[:, :, :, piece.keys]
            part = partial.forward(q[:, :, rows], keys, values, piece.plan, scale, backend)
            partial.merge(out[:, :, rows], lse[:, :, rows], *part)
        if arrive is not None:
            kv = arrive()
    return torch.empty_like(q).copy_(out), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    steps: Steps,
    scale: float,
    backend: str,
    deterministic: bool,
    pass_keys: Pass,
    pass_sums: Pass,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `forward`; out and lse are its results.

    Args:
        pass_sums: first called with those of the keys of step 2, the previous rank's.
        sums: what the gradients of these keys are added to, [2, *k.shape] in the dtype of lse; zeros if None.

    Returns:
        dq like q, and dk and dv as one tensor [2, *k.shape] in the dtype of lse.
    """
    queries = _Queries(q, dout, lse, partial.delta(out, dout, backend), scale, backend, deterministic)
    own, *others = steps
    kv = torch.stack((k, v))
    own_sums = torch.zeros_like(kv, dtype=lse.dtype)
    middle = _half(k.shape[1], own) if others else 0
    every, first_half, second_half = slice(0, k.shape[1]), slice(0, middle), slice(middle, k.shape[1])
    arrive = pass_keys(kv) if others else None
    _add(own_sums, queries.gradients(own, kv, first_half), first_half)
    arrive_sums: Callable[[], Tensor] | None = None
    for step, pieces in enumerate(others, 1):
        assert arrive is not None
        at_hand = arrive()
        arrive = pass_keys(at_hand) if step < len(others) else None
        found = queries.gradients(pieces, at_hand, every)
        if arrive_sums is not None:
            sums = arrive_sums()  # of the keys at hand, from the ranks that had them before
        sums = torch.zeros_like(own_sums) if sums is None else sums
        _add(sums, found, every)
        arrive_sums = pass_sums(sums)
    _add(own_sums, queries.gradients(own, kv, second_half), second_half)
    if arrive_sums is not None:
        own_sums += arrive_sums()
    return torch.empty_like(q).copy_(queries.dq), own_sums


class _Queries:
    """This rank's queries in the backward pass; dq is what has been found so far, in the dtype of lse."""

    def __init__(
        self, q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float, backend: str, deterministic: bool
    ) -> None:
        self.tensors, self.settings = (dout, q, lse, delta), (scale, backend, deterministic)
        self.dq = q.new_zeros(q.shape, dtype=lse.dtype)

    def gradients(self, pieces: tuple[Piece, ...], kv: Tensor, heads: slice) -> list[tuple[slice, tuple[Tensor, ...]]]:
        """dk and dv of some heads of the keys at hand, with the places of these keys; dq is taken into `dq`.

        kv: [2, batch, num_kv_heads, keys, head_dim]
        """
        found = []
        group = self.dq.shape[1] // kv.shape[2]
        of_queries = slice(heads.start * group, heads.stop * group)
        for piece in pieces if heads.start < heads.stop else ():
            dout, q, lse, delta = (x[:, of_queries, piece.queries] for x in self.tensors)
            keys, values = kv[:, :, heads, piece.keys]
            dq, *of_keys = partial.backward(dout, q, keys, values, lse, delta, piece.plan, *self.settings)
            self.dq[:, of_queries, piece.queries] += dq
            found.append((piece.keys, (*of_keys,)))
        return found


def _half(num_kv_heads: int, pieces: tuple[Piece, ...]) -> int:
    """How many heads are half of them; 0 where heads differ in what they see, whose lists are not cut."""
    differ = any(piece.plan.blocks[3] > 1 for piece in pieces if piece.plan.blocks)
    return 0 if differ else num_kv_heads // 2


def _add(sums: Tensor, found: list[tuple[slice, tuple[Tensor, ...]]], heads: slice) -> None:
    """Take gradients of some heads of keys into sums, [2, batch, num_kv_heads, keys, head_dim], in place."""
    for places, of_keys in found:
        for total, part in zip(sums, of_keys, strict=True):
            total[:, heads, places] += part


class ToNextRank:
    """A `Pass` over the network; `tag` keeps what goes round at the same time apart."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.tag = group, tag
        self.next, self.previous = (dist.get_global_rank(group, (rank + i) % self.size) for i in (1, -1))

    def __call__(self, tensor: Tensor) -> Callable[[], Tensor]:
        if self.size == 1:
            return lambda: tensor
        arriving = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, self.next, self.group, self.tag),
                dist.P2POp(dist.irecv, arriving, self.previous, self.group, self.tag),
            ]
        )

        def wait(sent: Tensor = tensor) -> Tensor:  # `sent` may not be freed before
            for work in works:
                work.wait()
            return arriving

        return wait
