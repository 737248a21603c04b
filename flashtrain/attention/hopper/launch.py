"""From tensors to a launch: TMA descriptors, and a kernel that is compiled once and then launched directly.

Triton's own launcher looks at every argument of every call to see whether it must compile again, which takes longer
than attention over a thousand tokens. Here a setup remembers it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Box:
    """What a launch reads of a TMA descriptor. Triton's own checks it anew each time; here `fits_tma` has done so."""

    __slots__ = ("base", "block_shape", "layout", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: tuple[int, ...]) -> None:
        self.base = base
        self.shape, self.strides, self.block_shape, self.layout = _geometry(
            base.shape, base.stride(), base.dtype, block_shape
        )
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    def descriptor(self) -> TensorDescriptor:
        """The same as Triton's own, to compile for."""
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


@functools.lru_cache(maxsize=1024)
def _geometry(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, block_shape: tuple[int, ...]
) -> tuple[list[int], list[int], list[int], gl.NVMMASharedLayout]:
    # The stride of a dimension of one is never used, and need not be one that TMA takes.
    strides = [step if size > 1 else shape[-1] for size, step in zip(shape[:-1], stride[:-1], strict=True)]
    layout = gl.NVMMASharedLayout.get_default_for(list(block_shape), _TYPES[dtype])
    return list(shape), [*strides, 1], list(block_shape), layout


def fits_tma(tensor: Tensor) -> bool:
    """Whether TMA can address a [batch, heads, seq, head_dim] tensor as it lies: rows of neighbouring numbers, and
    everything aligned to 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and _strides_fit(tensor.shape, tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=1024)
def _strides_fit(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> bool:
    steps = zip(shape[:-1], stride[:-1], strict=True)
    return stride[-1] == 1 and all(size == 1 or (step > 0 and step * itemsize % 16 == 0) for size, step in steps)


def for_tma(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where TMA cannot address it."""
    return tensor if fits_tma(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def writable(result: Tensor) -> Tensor:
    """The result, or memory to copy it from where the kernel cannot write into it as it lies."""
    return result if fits_tma(result) else torch.empty(result.shape, dtype=result.dtype, device=result.device)


class Setup:
    """What a launch needs beside tensors: how many programs, integers in order, and constants in order; and, once it
    has run, the compiled kernel for each dtype and device."""

    __slots__ = ("compiled", "constants", "max_registers", "numbers", "programs", "values")

    def __init__(
        self, programs: int, numbers: tuple[int, ...], constants: dict[str, Any], max_registers: int | None = None
    ) -> None:
        self.programs = programs
        self.numbers = numbers
        self.constants = constants
        self.max_registers = max_registers
        self.values = tuple(constants.values())
        self.compiled: dict[tuple[torch.dtype, torch.device], Any] = {}


def launch(kernel: Any, q: Tensor, setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch `kernel` on the current device with `arguments` in order and the setup's constants.

    What a kernel is compiled for follows from the setup, which belongs to one kernel and one set of integers, and from
    dtype and device of q. Pointers that may be aligned one time and not the next are not specialised on.
    """
    compiled = setup.compiled.get((q.dtype, q.device))
    if compiled is not None:
        compiled[(setup.programs, 1, 1)](*arguments, *setup.values)
        return
    whole = [argument.descriptor() if isinstance(argument, Box) else argument for argument in arguments]
    options = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": setup.max_registers}
    setup.compiled[q.dtype, q.device] = kernel[(setup.programs,)](*whole, **setup.constants, **options)
