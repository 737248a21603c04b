"""From tensors to a launch: what fits TMA, and a kernel that is compiled once and then launched directly."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtrain.attention.hopper.driver import Launcher, UnknownLayout, tma_strides

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_Shape = tuple[int, ...]
_log = logging.getLogger(__name__)


def fits_tma(tensor: Tensor) -> bool:
    """Whether TMA can address a [batch, heads, seq, head_dim] tensor of 16-bit numbers as it lies: rows of neighbouring
    numbers, and everything aligned to 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and strides_fit(tensor.shape, tensor.stride())


def strides_fit(shape: _Shape, stride: _Shape) -> bool:
    steps = zip(shape[:-1], stride[:-1], strict=True)
    return stride[-1] == 1 and all(size == 1 or (step > 0 and step % 8 == 0) for size, step in steps)


def aligned(*tensors: Tensor) -> bool:
    """Whether all begin at a multiple of 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0


def for_tma(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where TMA cannot address it."""
    if fits_tma(tensor):
        return tensor
    _say_copy(tensor.shape, tensor.stride())
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=64)
def _say_copy(shape: _Shape, stride: _Shape) -> None:
    _log.info(
        f"attention copies a tensor of shape {tuple(shape)} and strides {tuple(stride)} at every call: TMA takes "
        "neighbouring numbers along head_dim and everything else aligned to 16 bytes"
    )


class Setup:
    """What a launch needs beside tensors: how many programs, the boxes of its descriptors, numbers and constants in
    order; and, once it has run, what launches it again for each dtype and device."""

    __slots__ = ("boxes", "constants", "max_registers", "numbers", "programs", "ready")

    def __init__(
        self,
        programs: int,
        boxes: tuple[_Shape, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        max_registers: int | None = None,
    ) -> None:
        self.programs = programs
        self.boxes = boxes
        self.numbers = numbers
        self.constants = constants
        self.max_registers = max_registers
        self.ready: dict[tuple[torch.dtype, torch.device], Any] = {}


def launch(kernel: Any, q: Tensor, setup: Setup, described: Sequence[Tensor], pointers: Sequence[Tensor]) -> None:
    """Launch `kernel` on the current device: its descriptors of the tensors `described`, then `pointers`, then the
    setup's numbers and constants.

    What a kernel is compiled for follows from the setup, which belongs to one kernel, and from dtype and device of q.
    Pointers that may be aligned one time and not the next are not specialised on.
    """
    ready = setup.ready.get((q.dtype, q.device))
    if ready is None:
        setup.ready[q.dtype, q.device] = _first_launch(kernel, setup, described, pointers)
    else:
        ready(q.device.index, described, pointers)


def _first_launch(kernel: Any, setup: Setup, described: Sequence[Tensor], pointers: Sequence[Tensor]) -> Any:
    descriptors = [_descriptor(tensor, box) for tensor, box in zip(described, setup.boxes, strict=True)]
    arguments = [*descriptors, *pointers, *setup.numbers]
    options = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": setup.max_registers}
    compiled = kernel[(setup.programs,)](*arguments, **setup.constants, **options)
    try:
        return Launcher(compiled, setup.programs, arguments)
    except UnknownLayout:
        _log.warning("this version of Triton lays out parameters in another way: launches go through its own launcher")
        return functools.partial(_by_triton, compiled, setup)


def _by_triton(
    compiled: Any, setup: Setup, _device: int, described: Sequence[Tensor], pointers: Sequence[Tensor]
) -> None:
    descriptors = [_descriptor(tensor, box) for tensor, box in zip(described, setup.boxes, strict=True)]
    compiled[(setup.programs, 1, 1)](*descriptors, *pointers, *setup.numbers, *setup.constants.values())


def _descriptor(tensor: Tensor, box: _Shape) -> TensorDescriptor:
    strides = tma_strides(tensor.shape, tensor.stride())
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _TYPES[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(box), layout)
