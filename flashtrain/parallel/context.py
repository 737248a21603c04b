"""Attention over a sequence whose tokens lie on several ranks."""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.attention import Mask, choose_backend
from flashtrain.parallel import heads, op
from flashtrain.parallel.heads import HeadsPlan, lower_heads
from flashtrain.parallel.partial import KERNELS
from flashtrain.parallel.plan import RingPlan, lower_ring

METHODS = ("ring", "ulysses")

_log = logging.getLogger(__name__)


class ContextParallel:
    """Attention as `attention` computes it, over the whole sequence, of which each rank holds what `shard` cuts for it.

    All ranks of the group make the same calls in the same order. torch.compile takes a call as one node of its graph
    (ring) or as attention between two exchanges (ulysses), and serves all plans of one mask's kind with one graph. In
    activation checkpointing a call that is made again sends everything again, unless the operator
    `flashtrain::ring_forward` is among those whose results are kept. There is no double backward.

    Args:
        group: the ranks that share each sequence.
        method: "ring" sends keys and values round while they are used, whatever the number of heads. "ulysses"
            exchanges tokens for heads and back: less to send with many ranks, but nothing is computed meanwhile, and
            the ranks must be able to share the heads.
        backend: as in `attention`. The ring needs the lse, which PyTorch's SDPA does not give: where the kernels do not
            run, and for "sdpa", it computes in plain PyTorch and holds the scores of a rank's queries and the keys at
            hand.

    Raises:
        ValueError: another method.
    """

    def __init__(self, group: dist.ProcessGroup, method: str = "ring", backend: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r}: choose one of {', '.join(METHODS)}")
        self.method, self.backend = method, backend
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = op.name_of(group)
        self._exchange = functools.partial(torch.ops.flashtrain.exchange, group=self._group)

    def lower(self, mask: Mask | None, batch: int, seq_len: int, device: torch.device | str) -> RingPlan | HeadsPlan:
        """The plan of this rank for a mask of the whole sequence; once a step, for every layer with that mask.

        Args:
            seq_len: tokens of the whole sequence.

        Raises:
            ValueError: as `attention.lower`; and seq_len is not a multiple of 2 * size or, for a ring over a block
                layout, of 2 * size blocks.
        """
        lower = lower_ring if self.method == "ring" else lower_heads
        return lower(mask, batch, seq_len, self.rank, self.size, torch.device(device))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: RingPlan | HeadsPlan,
        *,
        scale: float | None = None,
        deterministic: bool | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            q: [batch, num_heads, seq_len / size, head_dim], in any dtype that `attention` takes, of any strides.
            k, v: [batch, num_kv_heads, seq_len / size, head_dim]
            plan: what `lower` made for the whole sequence.
            scale, deterministic: as in `attention`.

        Returns:
            out like q.

        Raises:
            ValueError: shapes that do not fit each other, the plan or the method; a call that the named backend cannot
                do.
        """
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        self._check(q, k, v, plan)
        if isinstance(plan, HeadsPlan):
            return heads.attend(q, k, v, plan, scale, self.backend, deterministic, self._exchange)
        backend = self._ring_backend(q, k, plan)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        out, _ = torch.ops.flashtrain.ring_forward(q, k, v, plan.number, self._group, scale, backend, deterministic)
        return out

    def _ring_backend(self, q: Tensor, k: Tensor, plan: RingPlan) -> str:
        wanted = "standard" if self.backend == "sdpa" else self.backend
        chosen = choose_backend(wanted, q, True, plan.blocks, q.shape[1] // k.shape[1])
        if not torch.compiler.is_compiling():
            _say_once(chosen, q.dtype, q.shape[-1], q.device.type)
        return chosen

    def _check(self, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan | HeadsPlan) -> None:
        if isinstance(plan, RingPlan) != (self.method == "ring"):
            raise ValueError(
                f"plan: it is not one for method={self.method!r}; lower the mask with this ContextParallel"
            )
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4 or k.shape != v.shape or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ValueError(f"q, k and v are [batch, heads, seq_len / size, head_dim], k and v alike; got {shapes}")
        if q.shape[0::2] != k.shape[0::2] or q.shape[3] != k.shape[3]:
            raise ValueError(f"q, k and v must agree in batch, length and head_dim; got {shapes}")
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one dtype or use autocast")
        if (plan.batch, plan.seq_len) != (q.shape[0], q.shape[2] * self.size):
            raise ValueError(
                f"the plan is for {plan.batch} rows of {plan.seq_len} tokens, and {self.size} ranks hold {q.shape[0]} "
                f"of {q.shape[2] * self.size}; lower the mask for the whole sequence"
            )
        if plan.heads not in (1, q.shape[1]):
            raise ValueError(
                f"mask: the block layout has heads={plan.heads} and q has num_heads={q.shape[1]}; give a layout for 1 "
                f"head, which all share, or for {q.shape[1]} query heads"
            )
        if plan.device.type != q.device.type:
            raise ValueError(f"the plan is on {plan.device} and q on {q.device}; lower the mask on {q.device}")


@functools.cache
def _say_once(backend: str, dtype: torch.dtype, head_dim: int, device: str) -> None:
    line = f"ring attention takes the {backend} backend for {dtype}, head_dim {head_dim}, on {device}"
    if backend not in KERNELS:
        line += ": plain PyTorch, which holds the scores"
    _log.info(line)
