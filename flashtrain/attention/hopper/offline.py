"""Compile the Hopper kernels where there is no GPU, and say what they take of one.

Only in a process without TRITON_INTERPRET. The compiler and the assembler come with Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flashtrain.attention.hopper.backward import backward_kernel
from flashtrain.attention.hopper.backward_wide import backward_wide_kernel
from flashtrain.attention.hopper.configs import BackwardConfig, ForwardConfig, tile_width
from flashtrain.attention.hopper.driver import check_layout
from flashtrain.attention.hopper.forward import forward_kernel
from flashtrain.attention.portable.offline import Resources, assemble

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def compile_forward(head_dim: int, dtype: torch.dtype, config: ForwardConfig, **mask: bool | int) -> Resources:
    """Compile the forward kernel. mask: the constants LOWER, LATER, TABLE, LIST_M and LIST_N."""
    width = tile_width(head_dim)
    keys, queries = (1, 1, config.block_n, width), (1, 1, 64, width)
    boxes = {"q_desc": queries, "k_desc": keys, "v_desc": keys, "out_desc": queries}
    types = {name: _descriptor(dtype, box) for name, box in boxes.items()}
    types |= {"lse_ptr": "*fp32", "rows_ptr": "*i32", "lists_ptr": "*i32", "scale_log2": "fp32"}
    constants = {
        "CONSUMERS": config.consumers, "BLOCK_N": config.block_n, "HEAD_DIM": width, "STAGES": config.stages, **mask,
    }  # fmt: skip
    return _compile(forward_kernel, types, constants, config.max_registers)


def compile_backward(
    head_dim: int, dtype: torch.dtype, config: BackwardConfig, group: int = 1, ordered: bool = False, **mask: bool | int
) -> Resources:
    """Compile the backward kernel. mask: the constants AFTER, BEFORE, EDGE, TABLE and LIST_M."""
    width = tile_width(head_dim)
    keys, queries = (1, 1, config.block_n, width), (1, 1, config.block_m, width)
    boxes = {"q_desc": queries, "k_desc": keys, "v_desc": keys, "dout_desc": queries}
    types = {name: _descriptor(dtype, box) for name, box in boxes.items()}
    types |= dict.fromkeys(("dk_ptr", "dv_ptr"), f"*{_NAMES[dtype]}")
    types |= dict.fromkeys(("dq_ptr", "lse_ptr", "delta_ptr"), "*fp32")
    types |= dict.fromkeys(("turns_ptr", "columns_ptr", "lists_ptr"), "*i32")
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    constants = {
        "CONSUMERS": config.consumers, "GROUP": group, "BLOCK_M": config.block_m, "HEAD_DIM": width,
        "COLUMNS": head_dim, "STAGES": config.stages, "AHEAD": config.ahead, "ORDERED": ordered, **mask,
    }  # fmt: skip
    kernel = backward_wide_kernel if config.wide else backward_kernel
    return _compile(kernel, types, constants, config.max_registers)


def _descriptor(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _TYPES[dtype])
    return f"tensordesc<{_NAMES[dtype]}[{','.join(map(str, box))}],{layout!r}>"


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any], max_registers: int | None) -> Resources:
    """Also checks that the kernel can be launched as `driver` does it."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") and name not in ("rows_ptr", "columns_ptr", "lists_ptr", "turns_ptr")
    }
    source = GluonASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    check_layout(signature, compiled.asm["ptx"])
    return assemble(compiled.asm["ptx"], 90, compiled.metadata.shared)
