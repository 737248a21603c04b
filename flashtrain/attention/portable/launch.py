"""What the host prepares before a launch: device, strides, precision, and the order in which heads are visited."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

# Of the L2 cache (A100 40 MB, H100 50 MB) this much is meant for the tensors that all programs of a head stream.
STREAMED_BYTES = 16 * 2**20
_INT32_LIMIT = 2**31
_HERE = contextlib.nullcontext()  # made once: it is entered several times a call
# Statistics are padded to whole tiles of any size up to this, so that no load of them needs a mask.
STATISTICS_ROWS = 128


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on the tensor's device, whichever is current."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.device.index:
        return _HERE
    return torch.cuda.device(tensor.device)


def padded_head_dim(head_dim: int) -> int:
    """Tiles are powers of two, and a tensor-core product is at least 16 deep."""
    return max(16, 1 << (head_dim - 1).bit_length())


def precision_of(tensor: Tensor) -> str:
    """float32 products are float32 unless the user allows TF32, as in PyTorch's own matmul."""
    allowed = tensor.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def fit_tile(tensor: Tensor, block: int) -> Tensor:
    """The tensor itself, or a contiguous copy where offsets inside a tile of `block` rows would pass 32 bits."""
    row, dim = tensor.stride()[2:]
    reach = (block - 1) * row + (padded_head_dim(tensor.shape[3]) - 1) * dim
    return tensor if reach < _INT32_LIMIT else tensor.contiguous()


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """q, a scale above zero with the same scores, and the factor that q's gradient then needs.

    The kernels take a row's maximum before they scale, which only a positive scale allows.
    """
    if not scale <= 0:  # above zero, or NaN, which stays one
        return q, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return q * sign, -scale if scale < 0 else 1.0, sign


def table_strides(table: Tensor | None) -> tuple[Tensor | None, int]:
    """A plan's table, contiguous in its rows, and its stride from one batch row to the next; 0 if all share one."""
    if table is None:
        return None, 0
    table = table.contiguous()
    return table, table.stride(0) if table.shape[0] > 1 else 0


def heads_together(streamed: tuple[int, ...], itemsize: int, all_heads: int, share: int = 1) -> int:
    """Of `all_heads` heads that programs are made for, how many to visit at a time: as many as stream `share` times
    STREAMED_BYTES of a tensor (k, or q) of shape [batch, heads, seq, dim] and its companion (v, or dout)."""
    bytes_a_head = 2 * math.prod(streamed) * itemsize / all_heads
    return min(all_heads, max(1, int(share * STREAMED_BYTES / max(1.0, bytes_a_head))))


def row_statistics(lse: Tensor, delta: Tensor) -> Tensor:
    """-lse in base 2 and delta side by side, float32 [batch, num_heads, padded seq, 2]: what the backward kernels load
    for each block of queries, in one aligned piece and in the form in which they use it."""
    batch, num_heads, seq = lse.shape
    padded = -(-seq // STATISTICS_ROWS) * STATISTICS_ROWS
    statistics = lse.new_zeros(batch, num_heads, padded, 2, dtype=torch.float32)
    torch.mul(lse, -math.log2(math.e), out=statistics[:, :, :seq, 0])
    statistics[:, :, :seq, 1] = delta
    return statistics
