"""What a run of the tests on a GPU leaves behind, so that machines without one can tell whether it still holds."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "gpu_tests.json"
COMMAND = f"FLASHTRAIN_GPU_RECORD={RECORD.relative_to(ROOT)} python -m pytest tests/attention"
OUTCOMES = ("passed", "failed", "error", "skipped")
# Files of tests/attention that run nothing on a GPU; the last one compares the record of the run before.
_ELSEWHERE = ("_without_gpu.py", "test_gpu_record.py")


def attention_hash() -> str:
    """SHA-256 over the attention package: names and lines of its files, blank lines and comment lines left out."""
    folder = ROOT / "flashtrain" / "attention"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        lines = (line.rstrip() for line in path.read_text().splitlines())
        code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
        digest.update(f"{path.relative_to(folder).as_posix()}\n{code}\n".encode())
    return digest.hexdigest()


def write_record(reporter: pytest.TerminalReporter, target: Path) -> None:
    """Counts of the attention tests among those that ran, whatever else did."""
    import triton

    tests = {
        name: [report.nodeid for report in reporter.stats.get(name, []) if counts(report.nodeid)] for name in OUTCOMES
    }
    record = {
        "attention_hash": attention_hash(),
        **{name: len(tests[name]) for name in OUTCOMES},
        "failed_tests": tests["failed"] + tests["error"],
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": shlex.join(["python", "-m", "pytest", *reporter.config.invocation_params.args]),
    }
    target.write_text(json.dumps(record, indent=2) + "\n")


def counts(test: str) -> bool:
    """Whether the test of this name is one of the attention code on a GPU."""
    path = test.split("::")[0]
    return path.startswith("tests/attention/") and not path.endswith(_ELSEWHERE)
