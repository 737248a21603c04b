"""Plant known faults in the attention kernels, one at a time, and see that the tests turn red.

    python scripts/planted_faults.py            # all, about ten minutes on two cores
    python scripts/planted_faults.py rescale    # those whose name contains a word

Each fault is one replacement in a temporary copy of the package; the repository itself is not touched. Exit code 1 if
a fault survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORTABLE = "flashtrain/attention/portable"
TESTS = ["test_closed_form.py", "test_edge_lengths.py", "test_accuracy.py", "test_memory_layouts.py"]


@dataclass(frozen=True)
class Fault:
    """Replace `right` by `wrong` in a file of the kernels. `first` are the tests most likely to see it."""

    name: str
    file: str
    right: str
    wrong: str
    first: str = TESTS[0]


LAYOUTS, ACCURACY = "test_memory_layouts.py", "test_accuracy.py"
FAULTS = [
    # Which keys a query sees.
    Fault("causal aligned at the start", "tiles.py", "shift = num_cols - num_rows", "shift = 0"),
    Fault("no mask on the last block", "tiles.py", "hi_min // BLOCK_COLS, end)", "tl.cdiv(hi_min, BLOCK_COLS), end)"),
    Fault("no mask on the first block", "tiles.py", "tl.cdiv(lo_max, BLOCK_COLS)", "lo_max // BLOCK_COLS", ACCURACY),
    Fault("partial blocks on the right left out", "tiles.py", "- begin) + (end - full_end)", "- begin)"),
    Fault("empty rows count as full", "tiles.py", "tl.where(real, 0, num_cols)", "num_cols", ACCURACY),
    Fault("hi is inclusive", "tiles.py", "(col < hi[:, None])", "(col <= hi[:, None])"),
    Fault("left and right not exchanged", "dkdv.py", "right, left, BLOCK_N", "left, right, BLOCK_N"),
    Fault("no mask in dkdv", "dkdv.py", "p = tl.where(tiles.between(lo, hi, first, BLOCK_M), p, 0.0)", "p = p"),
    Fault(
        "one row of documents for the batch", "launch.py", "table.stride(0) if table.shape[0] > 1 else 0", "0", ACCURACY
    ),
    # What is read, and where.
    Fault(
        "padding of head_dim is read", "tiles.py", "num_rows) & (dim < HEAD_DIM), other", "num_rows), other", ACCURACY
    ),
    Fault("rows past the end are read", "tiles.py", "row < num_rows, other", "row < num_rows + BLOCK, other"),
    Fault("row offsets in 32 bits", "tiles.py", "base + first_row.to(tl.int64) *", "base + first_row *", LAYOUTS),
    Fault("head offsets in 32 bits", "tiles.py", "head.to(tl.int64) * stride_head", "head * stride_head", LAYOUTS),
    Fault("batch offsets in 32 bits", "tiles.py", "ptr + batch.to(tl.int64) *", "ptr + batch *", LAYOUTS),
    Fault("a tile may pass 32 bits", "launch.py", "reach < _INT32_LIMIT", "True", LAYOUTS),
    Fault(
        "last odd heads left out", "tiles.py", "tl.minimum(heads_together, num_heads - first_head)", "heads_together"
    ),
    Fault("strides of dout taken from q", "dq.py", "*dout.stride()", "*q.stride()", LAYOUTS),
    # Grouped heads.
    Fault(
        "wrong key head of a group", "forward.py", "batch, head // group, k", "batch, head % (num_heads // group), k"
    ),
    Fault("group of heads not summed", "dkdv.py", "range(num_blocks * GROUP)", "range(num_blocks)"),
    # The running softmax and its gradient.
    Fault("output not rescaled", "forward.py", "acc * rescale[:, None]", "acc", ACCURACY),
    Fault("sum of weights not rescaled", "forward.py", "l * rescale + tl.sum(p, 1)", "l + tl.sum(p, 1)", ACCURACY),
    Fault("-inf minus -inf", "forward.py", "0.0, m_new) if MASKED else m_new", "m_new, m_new)"),
    Fault("0 / 0 in empty rows", "forward.py", "tl.where(l == 0, 1.0, l)", "l"),
    Fault("lse half in base 2", "forward.py", "tl.log2(total) * LN_2", "tl.log2(total)"),
    Fault("lse not in base 2 backward", "launch.py", "-math.log2(math.e)", "-1.0"),
    Fault("dk not scaled", "dkdv.py", "dk * scale", "dk", ACCURACY),
    Fault("gradient of lse ignored", "backward.py", "if dlse_ptr is not None:", "if False:", ACCURACY),
    Fault("delta left out of dq", "dq.py", "p * (dp - delta[:, None])", "p * dp"),
    Fault("negative scale ignored", "backward.py", "dq if sign == 1.0 else dq * sign", "dq", ACCURACY),
]


def survives(fault: Fault) -> tuple[bool, str]:
    """Whether the tests stay green with the fault, and the first test that did not."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("flashtrain/attention", "tests/attention"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("flashtrain/__init__.py", "tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / part, copy / part)
        path = copy / PORTABLE / fault.file
        source = path.read_text()
        if source.count(fault.right) == 0:
            raise SystemExit(f"{fault.file} no longer contains {fault.right!r}: bring {__file__} up to date")
        path.write_text(source.replace(fault.right, fault.wrong))
        tests = [f"tests/attention/{name}" for name in dict.fromkeys((fault.first, *TESTS))]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode < 0:
        return False, f"the process died of signal {-result.returncode}"
    red = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode > 1 or (result.returncode == 1 and not red):
        raise SystemExit(f"{fault.name}: pytest ended with {result.returncode}\n{result.stdout}{result.stderr}")
    return result.returncode == 0, red[0].split("::", 1)[-1].split(" - ")[0] if red else ""


def main() -> int:
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    survivors = []
    for fault in chosen:
        start = time.monotonic()
        alive, test = survives(fault)
        if alive:
            survivors.append(fault.name)
        seconds = time.monotonic() - start
        print(f"{'SURVIVES' if alive else 'found':8}  {fault.name:36} {seconds:4.0f} s  {test}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
