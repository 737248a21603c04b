"""Attention of some queries to a part of their keys: by the kernels, or in plain PyTorch where they do not run.

Partial results are joined by their lse, and the gradients of a part follow from the lse and delta of the whole
(FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1). Sums over parts are float32 or wider: each part of a
bfloat16 sum would round it once more, and the error would grow with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtrain.attention.op import kernels_of
from flashtrain.attention.plan import Plan
from flashtrain.attention.reference import standard_attention

KERNELS = ("hopper", "portable")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are summed up."""
    return torch.promote_types(dtype, torch.float32)


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """out [batch, num_heads, queries, head_dim] and lse [batch, num_heads, queries] over these keys alone.

    `backend` is "hopper", "portable" or, for plain PyTorch in float32 or wider, which holds the scores, any other.
    """
    if backend in KERNELS:
        found: tuple[Tensor, Tensor] = kernels_of(backend).forward(q, k, v, plan.limits, scale)
        return found
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
        return standard_attention(q, k, v, plan, scale)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a part into out and lse, in place; both begin as 0 and -inf."""
    both = torch.logaddexp(lse, part_lse)
    # Who has seen nothing yet has a lse of -inf, and -inf - -inf is NaN.
    finite = both.masked_fill(both == float("-inf"), 0.0)
    out.mul_((lse - finite).exp_()[..., None]).addcmul_(part, (part_lse - finite).exp_()[..., None])
    lse.copy_(both)


def delta(out: Tensor, dout: Tensor, backend: str) -> Tensor:
    """rowsum(out * dout) [batch, num_heads, queries], for `backward`."""
    if backend in KERNELS:
        found: Tensor = kernels_of(backend).delta(out, dout, None)
        return found
    return (out.to(wide(out.dtype)) * dout).sum(-1)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    plan: Plan,
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv as far as they come from these keys; lse and delta are those over all keys."""
    if backend in KERNELS:
        kernels = kernels_of(backend)
        found: tuple[Tensor, Tensor, Tensor] = kernels.backward(
            dout, q, k, v, lse, delta, plan.limits, scale, deterministic
        )
        return found
    with torch.autocast(q.device.type, enabled=False):
        dout, q, k, v = (x.to(wide(x.dtype)) for x in (dout, q, k, v))
        return _plain_backward(dout, q, k, v, lse, delta, plan, scale)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, plan: Plan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    weights = (q @ k.mT * scale - lse[..., None]).exp()
    if not plan.is_full:
        weights = weights.masked_fill(~plan.dense(q.device), 0.0)
    dscores = weights * (dout @ v.mT - delta[..., None]) * scale
    dk, dv = (x.unflatten(1, (num_kv_heads, group)).sum(2) for x in (dscores.mT @ q, weights.mT @ dout))
    return dscores @ k, dk, dv
