"""The attention functions that are compared, each behind one call, and the FLOPs they are credited with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.attention import BACKENDS, Causal, attention, lower
from measuring.report import Unavailable

# A backward pass has five products where the forward pass has two (FlashAttention-2, section 4.1).
PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}


@dataclass(frozen=True)
class Shape:
    """One problem: q, k and v are [batch, num_heads, seq_len, head_dim]."""

    batch: int
    num_heads: int
    seq_len: int
    head_dim: int
    causal: bool

    def flops(self, name: str) -> float:
        """4 * batch * num_heads * seq_len^2 * head_dim, half of it when causal; backward 2.5, both 3.5 times that."""
        full = 4.0 * self.batch * self.num_heads * self.seq_len**2 * self.head_dim
        return full * (0.5 if self.causal else 1.0) * PASSES[name]

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout, normally distributed. Never zeros: they hide unwritten results and run faster."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (self.batch, self.num_heads, self.seq_len, self.head_dim)
        q, k, v, dout = (torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(4))
        return q, k, v, dout


@dataclass(frozen=True)
class Implementation:
    """A function of q, k and v.

    `context` is entered around all calls. With seq_first, tensors are [batch, seq, heads, head_dim]. `parameters` are
    what it learns itself: a backward pass makes their gradients too.
    """

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    seq_first: bool = False
    parameters: tuple[Tensor, ...] = ()


class Case:
    """An implementation and its inputs, in the layout that it likes best."""

    def __init__(self, implementation: Implementation, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self.implementation = implementation
        self.inputs = tuple(self._own(x).requires_grad_() for x in (q, k, v))
        self.dout = self._own(dout)

    def forward(self) -> Tensor:
        return self.implementation.call(*self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """dq, dk and dv; gradients of the implementation's own parameters are made and dropped."""
        return torch.autograd.grad(out, (*self.inputs, *self.implementation.parameters), self.dout)[:3]

    def forward_backward(self) -> None:
        self.backward(self.forward())

    def results(self) -> dict[str, Tensor]:
        """out, dq, dk and dv, [batch, num_heads, seq_len, head_dim] whatever the layout."""
        out = self.forward()
        return self.named(out, *self.backward(out))

    def named(self, *results: Tensor) -> dict[str, Tensor]:
        """The same from out, dq, dk and dv as the implementation gave them."""
        pairs = zip(("out", "dq", "dk", "dv"), results, strict=True)
        return {name: x.detach().transpose(1, 2) if self.implementation.seq_first else x.detach() for name, x in pairs}

    def _own(self, x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).contiguous() if self.implementation.seq_first else x.detach()


def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: Tensor | None = None) -> Tensor:
    """Attention as GPT implementations write it without a fused kernel: product, scale, mask, softmax, product.

    Each is a kernel of its own over the whole seq_q x seq_k matrix, in the dtype of q. With fewer queries than keys the
    two are aligned at the end. hidden: bool [seq_q, seq_k], true where a query must not see a key, on top of the causal
    mask.
    """
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    if causal:
        seq_q, seq_k = scores.shape[-2:]
        future = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device).triu(1 + seq_k - seq_q)
        hidden = future if hidden is None else hidden | future
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def standard_bytes(shape: Shape, itemsize: int) -> float:
    """What `standard` holds at its peak, in bytes: three matrices of all pairs, and a mask."""
    return shape.seq_len**2 * (3.0 * itemsize * shape.batch * shape.num_heads + (1 if shape.causal else 0))


def build(name: str, shape: Shape, device: torch.device, must_fit: bool = True) -> Implementation:
    """The implementation called `name`, ready for `shape`.

    must_fit: refuse standard attention where its matrices would not fit, instead of running out of memory.

    Raises:
        Unavailable: it is not installed here, cannot run here, or does not fit.
    """
    if name not in BUILDERS:
        raise Unavailable(f"no implementation of that name; there are {', '.join(BUILDERS)}")
    if must_fit and name.startswith("standard"):
        _require_room(shape, device)
    return BUILDERS[name](shape, device)


def _require_room(shape: Shape, device: torch.device) -> None:
    if device.type != "cuda":
        return
    needed, free = standard_bytes(shape, 2), torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise Unavailable(f"needs {needed / 2**30:.0f} GiB for its matrices and {free / 2**30:.0f} are free")


def _standard(shape: Shape, device: torch.device) -> Implementation:
    return Implementation("standard", functools.partial(standard, causal=shape.causal))


def _ours(
    name: str, backend: str, shape: Shape, device: torch.device, deterministic: bool | None = None
) -> Implementation:
    if backend not in BACKENDS:
        raise Unavailable(f"attention has no backend {backend!r}; it has {', '.join(BACKENDS)}")
    mask = Causal() if shape.causal else None
    plan = lower(mask, shape.batch, shape.seq_len, shape.seq_len, device)
    call = functools.partial(attention, mask=plan, backend=backend, deterministic=deterministic)
    return Implementation(name, call)


def _sdpa(name: str, kernel: SDPBackend | None, shape: Shape, device: torch.device) -> Implementation:
    call = functools.partial(F.scaled_dot_product_attention, is_causal=shape.causal)
    if kernel is None:
        return Implementation(name, call)
    if device.type != "cuda":
        raise Unavailable(f"this kernel of PyTorch's runs on GPUs, not on {device.type}")
    return Implementation(name, call, context=functools.partial(sdpa_kernel, kernel))


def _flex(shape: Shape, device: torch.device) -> Implementation:
    import torch._dynamo.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Static shapes mean one compilation a shape, more of them than the default limit allows.
    torch._dynamo.config.recompile_limit = 64
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if shape.causal:
        size = (shape.seq_len, shape.seq_len)
        block_mask = create_block_mask(_sees_past, None, None, *size, device=str(device))
    return Implementation("flex", functools.partial(compiled, block_mask=block_mask))


def _sees_past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flash_attn4(shape: Shape, device: torch.device) -> Implementation:
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
    except ImportError as error:
        raise Unavailable(f"flash-attn 4 is not installed ({error})") from None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=shape.causal)
        return result[0] if isinstance(result, tuple) else result

    return Implementation("flash_attn4", call, seq_first=True)


BUILDERS: dict[str, Callable[[Shape, torch.device], Implementation]] = {
    "portable": functools.partial(_ours, "portable", "portable"),
    "hopper": functools.partial(_ours, "hopper", "hopper"),
    "hopper_deterministic": functools.partial(_ours, "hopper_deterministic", "hopper", deterministic=True),
    "standard": _standard,
    "standard_backend": functools.partial(_ours, "standard_backend", "standard"),
    "sdpa_cudnn": functools.partial(_sdpa, "sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": functools.partial(_sdpa, "sdpa_flash", SDPBackend.FLASH_ATTENTION),
    "sdpa": functools.partial(_sdpa, "sdpa", None),
    "flex": _flex,
    "flash_attn4": _flash_attn4,
}
