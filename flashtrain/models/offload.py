"""Tensors that autograd keeps, in host memory: copied out and back on a stream of their own while the GPU computes.

PyTorch's `save_on_cpu` makes the host wait for each copy. Here a copy out has the time of one whole block, and a copy
back is begun one block before it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Offload:
    """Takes the inputs of a model's blocks to host memory, in the order of the forward pass; made anew for each pass.

    At most two of them are on the device at once, in either pass. On the CPU they stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _copy_stream(device) if device.type == "cuda" else None
        self._newest: _Parked | None = None

    @contextmanager
    def of(self, x: Tensor) -> Iterator[None]:
        """Inside, whoever saves x for the backward pass keeps it in host memory; all else is saved as ever."""
        # Autograd holds on to `pack` as long as to what it packed, so x itself must not be in it.
        is_x = (x.data_ptr(), x.shape, x.dtype)

        def pack(tensor: Tensor) -> Any:
            same = (tensor.data_ptr(), tensor.shape, tensor.dtype) == is_x
            return self._park(tensor) if same and self.stream is not None else tensor

        def unpack(kept: Any) -> Tensor:
            return kept.take() if isinstance(kept, _Parked) else kept

        with saved_tensors_hooks(pack, unpack):
            yield

    def finish(self) -> None:
        """After the last block: give the device memory of what was parked last free."""
        if self._newest is not None:
            self._newest.release()

    def _park(self, tensor: Tensor) -> _Parked:
        assert self.stream is not None
        self.finish()
        self._newest = _Parked(tensor, self._newest, self.stream)
        return self._newest


class _Parked:
    """One tensor on its way to pinned host memory, or back.

    No block of memory is ever given up to another stream: the main stream waits for a copy before it lets go of what
    was copied. So memory is used again in the order of the main stream, however far the host runs ahead of the device.
    """

    def __init__(self, tensor: Tensor, before: _Parked | None, stream: torch.cuda.Stream) -> None:
        self.before, self.stream = before, stream
        self.on_device: Tensor | None = tensor.detach()
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.copied = self._copy(self.host, self.on_device)

    def release(self) -> None:
        """Let go of the device's copy, once it is on the host."""
        if self.on_device is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.on_device = None

    def fetch(self) -> None:
        """Begin to copy back, unless that has begun."""
        if self.on_device is None:
            device = self.stream.device
            self.on_device = torch.empty(self.host.shape, dtype=self.host.dtype, device=device)
            self.copied = self._copy(self.on_device, self.host)

    def take(self) -> Tensor:
        """The tensor on the device. The one that was parked before it, which is needed next, begins to come back."""
        self.fetch()
        if self.before is not None:
            self.before.fetch()
            self.before = None
        torch.cuda.current_stream().wait_event(self.copied)
        assert self.on_device is not None
        tensor, self.on_device = self.on_device, None
        return tensor

    def _copy(self, to: Tensor, source: Tensor) -> torch.cuda.Event:
        # Behind all that the main stream has got so far: the source's kernels, and the last use of `to`'s memory.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
