"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): queries stay, keys and values go round.

Each rank computes its queries' attention to the keys at hand while these already travel on to the next rank, and joins
the partial results. In the backward pass the keys go round once more, and the sums of their gradients follow them one
step behind: what a rank adds goes on while it computes the next part, and after a whole round the sums are back home.

How a tensor gets to the next rank is handed in as a `Pass`: over the network, or from a list where one process plays
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.parallel import partial
from flashtrain.parallel.plan import Steps

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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`; out and lse are its results.

    Args:
        sums: what the gradients of the rank's own keys and values are added to, [2, *k.shape] in the dtype of lse;
            zeros if None.

    Returns:
        dq like q, and dk, dv in the dtype of lse.
    """
    delta = partial.delta(out, dout, backend)
    dq = q.new_zeros(q.shape, dtype=lse.dtype)
    kv = torch.stack((k, v))
    sums = torch.zeros_like(kv, dtype=lse.dtype) if sums is None else sums
    arrive_sums: Callable[[], Tensor] | None = None
    for step, pieces in enumerate(steps, 1):
        arrive = pass_keys(kv) if step < len(steps) else None
        found = []
        for piece in pieces:
            rows, (keys, values) = piece.queries, kv[:, :, :, piece.keys]
            dout_here, q_here, lse_here, delta_here = (x[:, :, rows] for x in (dout, q, lse, delta))
            settings = piece.plan, scale, backend, deterministic
            grads = partial.backward(dout_here, q_here, keys, values, lse_here, delta_here, *settings)
            dq[:, :, rows] += grads[0]
            found.append((piece.keys, grads[1:]))
        if arrive_sums is not None:
            sums = arrive_sums()  # of the keys at hand, from the ranks that had them before
        for places, of_keys in found:
            for total, part in zip(sums, of_keys, strict=True):
                total[:, :, places] += part
        arrive_sums = pass_sums(sums)
        if arrive is not None:
            kv = arrive()
    assert arrive_sums is not None
    dk, dv = arrive_sums()
    return torch.empty_like(q).copy_(dq), dk, dv


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
