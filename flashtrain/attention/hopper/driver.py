"""Launches and TMA descriptors through CUDA's driver API.

Triton's own launcher looks at every argument of every call and encodes every descriptor anew, in Python, which takes
longer than attention over a thousand tokens. What a kernel was compiled for does not change from call to call, so here
its parameters lie ready in the order that its PTX declares, and a call writes addresses into them.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

_Shape = tuple[int, ...]
_SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
# CUtensorMapDataType of 16-bit floats; the bytes of a CUtensorMap and how it has to be aligned.
_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_L2_PROMOTION_128B = 2
_MAPS_KEPT = 1024
_NOT_IN_CONTEXT = (201, 400)  # in none, or another: CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE


class UnknownLayout(Exception):
    """A kernel whose parameters do not lie as this module expects."""


def layout_of(signature: dict[str, str]) -> list[int]:
    """Bytes of each parameter of a kernel compiled for `signature` (argument name -> Triton's name of its type)."""
    sizes: list[int] = []
    for kind in signature.values():
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            rank = _rank(kind)
            sizes += [_MAP_BYTES, *[4] * rank, *[8] * rank]  # the map, shape and strides
        elif kind.startswith("*"):
            sizes.append(8)
        elif kind in _SCALARS:
            sizes.append(ctypes.sizeof(_SCALARS[kind]))
        else:
            raise UnknownLayout(kind)
    return [*sizes, 8, 8]  # scratch memory of the kernel and of a profiler, which no kernel here asks for


def _rank(kind: str) -> int:
    return kind[: kind.index("]")].count(",") + 1


def declared_layout(ptx: str) -> list[int]:
    """Bytes of each parameter as the kernel's PTX declares them."""
    head = ptx[ptx.index(".entry") :]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^\n\[]*(?:\[(\d+)\])?", head[: head.index("{")])
    return [int(bits) // 8 * int(length or 1) for bits, length in found]


def check_layout(signature: dict[str, str], ptx: str) -> None:
    """Raise UnknownLayout if a kernel's parameters do not lie as `layout_of` says."""
    expected, declared = layout_of(signature), declared_layout(ptx)
    if expected != declared:
        raise UnknownLayout(f"expected {expected}, declared {declared}")


class Launcher:
    """A compiled kernel, the number of its programs, and its parameters: all but addresses in place.

    Raises:
        UnknownLayout: its parameters lie in another way than here.
    """

    def __init__(self, compiled: Any, programs: int, arguments: Sequence[Any]) -> None:
        """arguments: those of the first launch, in the order of the kernel's signature."""
        signature, metadata = compiled.src.signature, compiled.metadata
        check_layout(signature, compiled.asm["ptx"])
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise UnknownLayout("scratch memory or clusters")
        kinds = list(signature.values())
        pointers = [at for at, kind in enumerate(kinds) if kind.startswith("*")]
        # No kernel here reads a descriptor's shape and strides, and scratch memory is of no size: they all are this.
        self._zero = ctypes.c_int64(0)
        self._addresses = (ctypes.c_uint64 * len(pointers))()
        self._scalars: list[Any] = []
        self._map_slots: list[int] = []
        slots: list[int] = []
        for at, kind in enumerate(kinds):
            if kind.startswith("tensordesc"):
                self._map_slots.append(len(slots))
                slots += [ctypes.addressof(self._zero)] * (1 + 2 * _rank(kind))
            elif kind.startswith("*"):
                slots.append(ctypes.addressof(self._addresses) + 8 * pointers.index(at))
            elif kind != "constexpr":
                self._scalars.append(_SCALARS[kind](arguments[at]))
                slots.append(ctypes.addressof(self._scalars[-1]))
        slots += [ctypes.addressof(self._zero)] * 2
        self._slots = (ctypes.c_void_p * len(slots))(*slots)
        self._boxes: Sequence[dict[str, Any]] = getattr(metadata, "tensordesc_meta", None) or ()
        self._maps: list[dict[int, TensorMap]] = [{} for _ in self._map_slots]  # by address
        self._compiled = compiled  # keeps the module loaded
        self._head = (
            ctypes.c_void_p(compiled.function),
            programs,
            1,
            1,
            32 * metadata.num_warps,
            1,
            1,
            metadata.shared,
        )
        self._lock = threading.Lock()
        # Looked up once: a launch takes the host as long as attention over a thousand tokens takes the device.
        self._launch, self._stream_of = _cuda().cuLaunchKernel, driver.active.get_current_stream

    def __call__(self, device: int, described: Sequence[Tensor], pointers: Sequence[Tensor]) -> None:
        """Launch on the current stream of `device`. described: what the descriptors are of, in order; shapes, strides
        and dtypes are those of the first launch. pointers: the other tensors, in order."""
        stream = ctypes.c_void_p(self._stream_of(device))
        with self._lock:  # the driver copies the parameters before it returns
            slots, addresses = self._slots, self._addresses
            for known, slot, tensor in zip(self._maps, self._map_slots, described, strict=True):
                slots[slot] = (known.get(tensor.data_ptr()) or self._encode(known, slot, tensor)).address
            for at, tensor in enumerate(pointers):
                addresses[at] = tensor.data_ptr()
            code = self._launch(*self._head, stream, slots, None)
            if code in _NOT_IN_CONTEXT:
                _enter_context(device)
                code = self._launch(*self._head, stream, slots, None)
        if code:
            raise RuntimeError(f"launching {self._compiled.name} failed: {_error(code)}")

    def _encode(self, known: dict[int, TensorMap], slot: int, tensor: Tensor) -> TensorMap:
        if len(known) == _MAPS_KEPT:
            known.clear()
        box = self._boxes[self._map_slots.index(slot)]
        known[tensor.data_ptr()] = result = TensorMap(tensor, box["swizzle"], box["block_size"])
        return result


class TensorMap:
    """TMA's descriptor of boxes of a 16-bit tensor: what is read past its end is zero, what is written there is lost.

    Attributes:
        address: where the 128 bytes lie, in memory of this object.
    """

    __slots__ = ("_memory", "address")

    def __init__(self, tensor: Tensor, swizzle: int, box: Sequence[int]) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        rank, steps = tensor.dim(), tma_strides(tensor.shape, tensor.stride())[:-1]
        code = _in_context(
            tensor.device.index, _cuda().cuTensorMapEncodeTiled,
            ctypes.c_void_p(self.address), _MAP_TYPES[tensor.dtype], rank, ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
            (ctypes.c_uint64 * (rank - 1))(*(2 * step for step in reversed(steps))),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0, swizzle, _L2_PROMOTION_128B, 0,
        )  # fmt: skip
        if code:
            shape = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, box {tuple(box)}"
            raise RuntimeError(f"no TMA descriptor for {shape}: {_error(code)}")


def tma_strides(shape: _Shape, stride: _Shape) -> list[int]:
    """Strides of a tensor as TMA takes them: that of a dimension of one is never used, and need not be one it takes."""
    return [*(step if size > 1 else shape[-1] for size, step in zip(shape[:-1], stride[:-1], strict=True)), 1]


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _in_context(device: int, function: Any, *arguments: Any) -> int:
    """The code of a call to the driver, once more in the context of `device` where it was made in none or in another:
    a thread that has not used the device yet, as autograd's own, has none."""
    code: int = function(*arguments)
    if code in _NOT_IN_CONTEXT:
        _enter_context(device)
        code = function(*arguments)
    return code


def _enter_context(device: int) -> None:
    """Make the context that PyTorch uses on `device` current in this thread."""
    context, cuda = ctypes.c_void_p(), _cuda()
    code = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or cuda.cuCtxSetCurrent(context)
    if code:
        raise RuntimeError(f"no CUDA context on device {device}: {_error(code)}")


def _error(code: int) -> str:
    name = ctypes.c_char_p()
    _cuda().cuGetErrorString(code, ctypes.byref(name))
    return (name.value or b"unknown error").decode()
