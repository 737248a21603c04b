"""Which backend can do which call, decided before anything is launched."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

BACKENDS = ("auto", "hopper", "portable", "sdpa", "standard")

# What the kernels hold in registers and shared memory ends here.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Smaller head dims waste most of a Hopper tile, of 64 columns at least.
HOPPER_MIN_HEAD_DIM = 40
# Block layouts, and a backward pass that adds in one order, end here: the kernel for wider tiles does neither.
HOPPER_NARROW_HEAD_DIM = 128


def supported(
    backend: str, q: Tensor, return_lse: bool = False, blocks: tuple[int, ...] = (), group: int = 1
) -> str | None:
    """Why `backend` cannot do attention on tensors like q, or None if it can.

    blocks: `Plan.blocks`. group: query heads a key head.
    """
    if backend == "sdpa":
        return "PyTorch's SDPA does not return the lse" if return_lse else None
    if backend == "standard":
        return None
    if q.device.type != "cuda" and not interpreted():
        return f"the Triton kernels need a CUDA GPU (or TRITON_INTERPRET=1) and q is on {q.device}"
    if q.dtype not in KERNEL_DTYPES:
        return f"the kernels take float16, bfloat16 and float32, not {q.dtype}"
    if not MIN_HEAD_DIM <= q.shape[-1] <= MAX_HEAD_DIM:
        return f"the kernels take head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {q.shape[-1]}"
    if q.device.type == "cuda" and (capability := _capability(q.device)) < (8, 0):
        return f"the kernels need compute capability 8.0 and {torch.cuda.get_device_name(q.device)} has {capability}"
    return _unsupported_by_hopper(q, blocks, group) if backend == "hopper" else None


def _unsupported_by_hopper(q: Tensor, blocks: tuple[int, ...], group: int) -> str | None:
    if interpreted():
        return "Triton's interpreter cannot run Gluon"
    if _capability(q.device) != (9, 0):
        return "the Hopper kernels need compute capability 9.0"
    if q.dtype == torch.float32:
        return "the Hopper kernels take float16 and bfloat16, not float32"
    head_dim = q.shape[-1]
    if head_dim < HOPPER_MIN_HEAD_DIM or head_dim % 8:
        return f"the Hopper kernels take head_dim {HOPPER_MIN_HEAD_DIM} and more in steps of 8, not {head_dim}"
    if blocks and head_dim > HOPPER_NARROW_HEAD_DIM:
        return f"the Hopper kernels take layouts up to head_dim {HOPPER_NARROW_HEAD_DIM}, not {head_dim}"
    if blocks and blocks[3] > 1 and group > 1:
        return "the Hopper kernels take no layouts by head together with grouped-query heads"
    return None


def portable_backward(head_dim: int, blocks: Sequence[int], deterministic: bool) -> str | None:
    """Why the backward pass of the Hopper kernels goes to the portable ones, or None if it does not."""
    if head_dim > HOPPER_NARROW_HEAD_DIM and (blocks or deterministic):
        which = "Hopper backward pass over a block layout" if blocks else "deterministic Hopper backward pass"
        return f"the {which} takes head_dim up to {HOPPER_NARROW_HEAD_DIM}, not {head_dim}"
    if blocks and deterministic:
        return "the Hopper backward pass over a block layout is not deterministic"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose_backend(
    requested: str, q: Tensor, return_lse: bool = False, blocks: tuple[int, ...] = (), group: int = 1
) -> str:
    """The backend that will run; `auto` takes the fastest that can. Triton's interpreter is never that: it runs only
    when `portable` is named. Arguments as in `supported`.

    Raises:
        ValueError: an unknown name, or a call that the named backend cannot do, with the reason.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r}: choose one of {', '.join(BACKENDS)}")
    if requested != "auto":
        reason = supported(requested, q, return_lse, blocks, group)
        if reason is not None:
            raise ValueError(f"backend={requested!r}: {reason}; backend='auto' takes one that can")
        return requested
    for candidate in ("hopper", "portable", "sdpa") if q.device.type == "cuda" else ("sdpa",):
        if supported(candidate, q, return_lse, blocks, group) is None:
            return candidate
    return "standard"


def interpreted() -> bool:
    """True where Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
