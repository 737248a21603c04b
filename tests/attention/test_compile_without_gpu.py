"""The kernels compile for GPUs that are not here, fit their shared memory and stay in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Kernel, compute capability, head dim, dtype, documents, the blocks of a layout if there is one, and the spilled bytes
# a thread that are still harmless.
ENTRIES = [
    ("forward", 90, 64, "bfloat16", False, (), 0),
    ("dq", 90, 64, "bfloat16", False, (), 0),
    ("dkdv", 90, 64, "bfloat16", False, (), 0),
    ("forward", 90, 128, "bfloat16", False, (), 32),
    ("dq", 90, 128, "bfloat16", False, (), 32),
    ("dkdv", 90, 128, "bfloat16", True, (), 128),
    ("forward", 90, 96, "float16", True, (), 64),
    ("dkdv", 90, 256, "bfloat16", False, (), 512),
    ("dkdv", 80, 128, "float16", False, (), 64),
    ("dq", 86, 256, "bfloat16", False, (), 64),
    ("dkdv", 100, 256, "bfloat16", False, (), 64),
    ("dq", 86, 256, "float32", False, (), 64),
    ("forward", 90, 64, "bfloat16", False, (128, 128), 0),
    ("dq", 90, 128, "bfloat16", True, (64, 64), 32),
    ("dkdv", 90, 64, "bfloat16", False, (128, 64), 0),
    ("dkdv", 90, 128, "bfloat16", False, (128, 128), 64),
]
PROGRAM = """
import dataclasses, json, sys, torch
from flashtrain.attention.portable.configs import generation_of, table_entry
from flashtrain.attention.portable.offline import SHARED_LIMIT, compile_kernel
for kernel, capability, head_dim, dtype, documents, blocks, _ in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    config = getattr(table_entry(generation_of(*divmod(capability, 10)), head_dim, dtype.itemsize), kernel)
    options = {"group": 2, "documents": documents, "blocks": tuple(blocks)}
    resources = compile_kernel(kernel, capability, head_dim, dtype, config, **options)
    print(json.dumps(dataclasses.asdict(resources) | {"limit": SHARED_LIMIT[capability]}), flush=True)
"""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, int]]:
    """In a process of its own: this one may have told Triton to interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(ENTRIES)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("number", range(len(ENTRIES)), ids=["-".join(map(str, e[:-1])) for e in ENTRIES])
def test_a_kernel_of_the_table_fits_its_gpu(compiled: list[dict[str, int]], number: int) -> None:
    resources, allowed = compiled[number], ENTRIES[number][-1]
    assert resources["shared_bytes"] <= resources["limit"], resources
    assert resources["spilled_bytes"] <= allowed, resources
    # Fewer means that the assembler gave up on allocating registers.
    assert resources["registers"] > 32, resources
    assert not resources["serialized"], resources
