"""Compile a kernel for a GPU that is not here, and say what it takes of it: how tile sizes are checked without one.

Only in a process without TRITON_INTERPRET. The compiler and the assembler come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from flashtrain.attention.portable.configs import Config, fit_blocks, kernel_constants
from flashtrain.attention.portable.dkdv import _dkdv_kernel
from flashtrain.attention.portable.dq import _dq_kernel
from flashtrain.attention.portable.forward import _forward_kernel

KERNELS = {"forward": _forward_kernel, "dq": _dq_kernel, "dkdv": _dkdv_kernel}
# Bytes of shared memory that one program can have, by compute capability.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
_TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes spilled a thread, bytes of shared memory a program, and
    whether the assembler gave up on running tensor-core products asynchronously."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    serialized: bool


def compile_kernel(
    kernel: str,
    capability: int,
    head_dim: int,
    dtype: torch.dtype,
    config: Config,
    group: int = 1,
    documents: bool = False,
    precision: str = "ieee",
    blocks: tuple[int, ...] = (),
) -> Resources:
    """Compile the kernel "forward", "dq" or "dkdv" as a call with contiguous tensors would.

    capability: 90 for compute capability 9.0. documents: with the tables of a plan instead of the window formula.
    blocks: queries and keys a block, for the walk over the lists of a block layout.

    Raises whatever the compiler raises.
    """
    function = KERNELS[kernel]
    config = fit_blocks(config, blocks)
    constants: dict[str, object] = {**kernel_constants(config, blocks, head_dim, precision), "GROUP": group}
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if name.endswith("_dim"):
            constants[name] = 1
        if (name in ("rows_ptr", "columns_ptr") and not documents) or (name == "lists_ptr" and not blocks):
            constants[name] = None
        if name in constants:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = _type_of(name, dtype)
        if not parameter.do_not_specialize and name != "scale":
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {key: value for key, value in config.launch_options().items() if value is not None}
    source = ASTSource(function, signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return assemble(compiled.asm["ptx"], capability, compiled.metadata.shared)


def _type_of(name: str, dtype: torch.dtype) -> str:
    if name in ("rows_ptr", "columns_ptr", "lists_ptr"):
        return "*i32"
    if name in ("lse_ptr", "statistics_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return _TYPES[dtype]
    return "fp32" if name == "scale" else "i32"


def assemble(ptx: str, capability: int, shared_bytes: int) -> Resources:
    """Run the assembler once more for its own account of registers and spills."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arch = sm_arch_from_capability(capability)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", str(source), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert registers and spills, log
    return Resources(int(registers[1]), int(spills[1]), shared_bytes, "wgmma" in log and "serialized" in log)
