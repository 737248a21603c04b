"""Where Gluon differs between the Triton versions that are supported: all of it, and nothing else, is here."""

from __future__ import annotations

from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 has the first names, 3.8 both, 3.9 the second.
box_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
box_to_global = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@builtin
def as_box(buffer, descriptor, _semantic=None):
    """A tile in shared memory as the box of a tensor descriptor, which has leading dimensions of one."""
    # The public name is _reinterpret up to Triton 3.8 and reinterpret from 3.9.
    shape = [_unwrap_if_constexpr(size) for size in descriptor.block_shape]
    return _semantic.memdesc_reinterpret(buffer, descriptor.dtype, shape, descriptor.layout)
