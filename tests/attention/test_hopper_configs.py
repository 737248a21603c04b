"""Which tiles the Hopper kernels take, seen without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

# In a process of its own: this one may have told Triton to interpret, which Gluon does not take.
PROGRAM = """
import torch
from flashtrain.attention import layouts, lower
from flashtrain.attention.hopper import calls

def launch(kernel, q, setup, described, pointers):
    print(seq, density, q.shape[3], setup.constants["CONSUMERS"], setup.constants["BLOCK_N"], setup.max_registers)

calls.launch = launch
for seq, density in ((1024, 1.0), (16384, 0.4), (16384, 0.75), (65536, 0.0313), (65536, 0.1), (65536, 0.25)):
    limits = lower(layouts.random_blocks(seq, density=density), 1, seq, seq, "cpu").limits
    for head_dim in (64, 128):
        q = torch.empty(1, 1, seq, head_dim, dtype=torch.bfloat16)
        calls.forward(q, q, q, limits, 0.125)
"""


def test_long_lists_are_walked_in_large_tiles_and_short_ones_in_small() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    small, large = "1 64 80", "2 128 None"
    at_64 = {
        "1024 1.0": small, "16384 0.4": small, "16384 0.75": large, "65536 0.0313": small, "65536 0.1": small,
        "65536 0.25": large,
    }  # fmt: skip
    expected = [line for of, tiles in at_64.items() for line in (f"{of} 64 {tiles}", f"{of} 128 {large}")]
    assert result.stdout.splitlines() == expected
