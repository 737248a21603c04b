"""The Hopper kernels compile for a GPU that is not here, fit its shared memory, stay in registers, and keep their
tensor-core products asynchronous; with the Triton that is installed, and with another where one is named."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

FULL = {"LOWER": False, "LATER": False, "TABLE": False, "LIST_M": 0, "LIST_N": 0}
CAUSAL = {"LOWER": False, "LATER": True, "TABLE": False, "LIST_M": 0, "LIST_N": 0}
WINDOW = {"LOWER": True, "LATER": True, "TABLE": False, "LIST_M": 0, "LIST_N": 0}
DOCUMENTS = {"LOWER": True, "LATER": True, "TABLE": True, "LIST_M": 0, "LIST_N": 0}
B_FULL = {"AFTER": False, "BEFORE": False, "EDGE": False, "TABLE": False, "LIST_M": 0}
B_CAUSAL = {"AFTER": True, "BEFORE": False, "EDGE": False, "TABLE": False, "LIST_M": 0}
B_WINDOW = {"AFTER": True, "BEFORE": True, "EDGE": False, "TABLE": False, "LIST_M": 0}
B_DOCUMENTS = {"AFTER": True, "BEFORE": True, "EDGE": False, "TABLE": True, "LIST_M": 0}
BLOCKS, TALL, SMALL = (
    {"LOWER": False, "LATER": True, "TABLE": False, "LIST_M": queries, "LIST_N": keys}
    for queries, keys in ((128, 128), (128, 64), (64, 64))
)
B_BLOCKS, B_SMALL = ({**B_CAUSAL, "LIST_M": queries} for queries in (128, 64))
B_EDGE = {**B_FULL, "EDGE": True}
# Pass, head dim, dtype, short sequence, query heads a key head, mask, and the spilled bytes a thread with which the
# kernels were measured.
ENTRIES = [
    *[("forward", 64, "bfloat16", False, 1, mask, 0) for mask in (FULL, CAUSAL, WINDOW)],
    *[("forward", 64, "bfloat16", True, 1, mask, 0) for mask in (FULL, CAUSAL, DOCUMENTS)],
    *[("forward", 128, "bfloat16", False, 1, mask, 0) for mask in (FULL, CAUSAL, WINDOW, DOCUMENTS)],
    *[("forward", 256, "bfloat16", False, 1, mask, 0) for mask in (FULL, CAUSAL, DOCUMENTS)],
    ("forward", 128, "float16", False, 1, CAUSAL, 0),
    ("backward", 96, "bfloat16", False, 1, B_CAUSAL, 96),
    *[("backward", 64, "bfloat16", False, 1, mask, 288) for mask in (B_FULL, B_CAUSAL, B_WINDOW, B_DOCUMENTS)],
    *[("backward", 128, "bfloat16", False, 1, mask, 96) for mask in (B_FULL, B_CAUSAL, B_WINDOW, B_DOCUMENTS)],
    *[
        ("ordered", head_dim, "bfloat16", False, 1, mask, allowed)
        for head_dim, all_allowed in ((64, (80, 160, 320)), (128, (40, 96, 216)))
        for mask, allowed in zip((B_FULL, B_CAUSAL, B_DOCUMENTS), all_allowed, strict=True)
    ],
    *[
        ("forward", head_dim, "bfloat16", short, 1, BLOCKS, 0)
        for head_dim, short in ((64, True), (64, False), (128, False))
    ],
    *[("backward", head_dim, "bfloat16", False, 1, B_BLOCKS, 16) for head_dim in (64, 128)],
    *[("forward", head_dim, "bfloat16", False, 1, mask, 0) for head_dim in (64, 128) for mask in (TALL, SMALL)],
    *[("small", 64, "bfloat16", False, 1, mask, 0) for mask in (B_BLOCKS, B_SMALL)],
    *[("small", 128, "bfloat16", False, 1, mask, 20) for mask in (B_BLOCKS, B_SMALL)],
    *[("backward", head_dim, "bfloat16", False, 1, B_EDGE, 16) for head_dim in (64, 128)],
    *[("backward", 256, "bfloat16", False, 1, mask, 0) for mask in (B_FULL, B_CAUSAL, B_WINDOW)],
    ("backward", 256, "bfloat16", False, 1, B_DOCUMENTS, 80),
    ("backward", 136, "float16", False, 4, {**B_DOCUMENTS, "EDGE": True}, 80),
    ("backward", 192, "bfloat16", False, 4, B_EDGE, 20),
    ("backward", 64, "bfloat16", False, 4, B_CAUSAL, 128),
    ("backward", 128, "float16", False, 4, B_CAUSAL, 96),
]
PROGRAM = """
import dataclasses, json, sys, torch, triton
from flashtrain.attention.hopper.configs import backward_config, forward_config
from flashtrain.attention.hopper.offline import compile_backward, compile_forward
print(triton.__version__)
for name, head_dim, dtype, short, group, mask, _ in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    if name == "forward":
        blocks = (mask["LIST_M"], mask["LIST_N"]) if mask["LIST_M"] else ()
        config = forward_config(head_dim, 1024 if short else 65536, False, mask["TABLE"], blocks, 8 if short else 512)
        resources = compile_forward(head_dim, dtype, config, **mask)
    else:
        config = backward_config(head_dim, (mask["LIST_M"], 64 if name == "small" else 128) if mask["LIST_M"] else ())
        resources = compile_backward(head_dim, dtype, config, group, name == "ordered", **mask)
    print(json.dumps(dataclasses.asdict(resources)), flush=True)
"""
# What `calls` would launch, on CPU tensors, without launching it.
LAUNCHES = """
import itertools, sys
import torch
from flashtrain.attention import Causal, Documents, layouts, lower
from flashtrain.attention.backends import portable_backward
from flashtrain.attention.hopper import calls

def launch(kernel, q, setup, described, pointers):
    names = kernel.arg_names
    given = [*described, *pointers, *setup.numbers]
    assert len(described) == len(setup.boxes), kernel
    assert len(given) + len(setup.constants) == len(names), (kernel, len(given), len(names))
    assert list(setup.constants) == names[len(given):], kernel
    for name, value in zip(names, given):
        kind = name.rpartition("_")[2]
        assert (kind == "desc") == any(value is tensor for tensor in described), (kernel, name)
        assert (kind in ("ptr", "desc")) == isinstance(value, torch.Tensor), (kernel, name, value)
        assert isinstance(value, float) == name.startswith("scale"), (kernel, name, value)
        integers = name in ("rows_ptr", "columns_ptr", "lists_ptr", "turns_ptr")
        assert not isinstance(value, torch.Tensor) or (value.dtype == torch.int32) == integers, (kernel, name)
    print(kernel.fn.__name__ if hasattr(kernel, "fn") else kernel.__name__)

calls.launch = launch
masks = (None, Causal(), Documents(((100, 200),)), layouts.butterfly(300) & Causal(), layouts.butterfly(300, 64))
for mask, head_dim in itertools.product(masks, (64, 192)):
    q = torch.randn(2, 4, 300, head_dim, dtype=torch.bfloat16)
    k = torch.randn(2, 2, 300, head_dim, dtype=torch.bfloat16)
    limits = lower(mask, 2, 300, 300, "cpu").limits
    if limits.blocks and head_dim > 128:
        continue  # the portable kernels', which is decided before
    for deterministic in (False, True):
        if portable_backward(head_dim, limits.blocks, deterministic):
            continue
        out, lse = calls.forward(q, k, k, limits, 0.125)
        calls.gradients(q, q, k, k, out, lse, None, limits, 0.125, deterministic)
        delta = calls.delta(out, q, None)
        calls.backward(q, q, k, k, lse, delta, limits, 0.125, deterministic)
"""
# A folder with another Triton, such as one filled by pip install --target.
OTHER_TRITON = os.environ.get("FLASHTRAIN_OTHER_TRITON")


@pytest.fixture(scope="module", params=["installed", "other"] if OTHER_TRITON else ["installed"])
def compiled(request: pytest.FixtureRequest) -> list[dict[str, int]]:
    """In a process of its own: this one may have told Triton to interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if request.param == "other":
        environment["PYTHONPATH"] = str(Path(str(OTHER_TRITON)).resolve())
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(ENTRIES)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    # Or the other folder was not what got imported, and the same Triton would have been tried twice.
    assert (result.stdout.splitlines()[0] == version("triton")) == (request.param == "installed")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("number", range(len(ENTRIES)))
def test_a_hopper_kernel_fits_its_gpu(compiled: list[dict[str, int]], number: int) -> None:
    resources, allowed = compiled[number], ENTRIES[number][-1]
    assert resources["shared_bytes"] <= 232_448, resources
    assert resources["spilled_bytes"] <= allowed, resources
    assert resources["registers"] > 32, resources
    assert not resources["serialized"], resources


def test_every_launch_hands_its_kernel_what_it_takes() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", LAUNCHES]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert set(result.stdout.split()) == {
        "forward_kernel", "prepare_kernel", "backward_kernel", "backward_wide_kernel", "finish_kernel", "delta_kernel",
    }  # fmt: skip
