"""Writes the record of a GPU run where FLASHTRAIN_GPU_RECORD names a file."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

from tests.attention.record import attention_hash


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    target = os.environ.get("FLASHTRAIN_GPU_RECORD")
    if not target or not torch.cuda.is_available():
        return
    import triton

    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    record = {
        "attention_hash": attention_hash(),
        **counts,
        "failed_tests": [report.nodeid for report in terminalreporter.stats.get("failed", [])],
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": shlex.join(["python", "-m", "pytest", *terminalreporter.config.invocation_params.args]),
    }
    Path(target).write_text(json.dumps(record, indent=2) + "\n")
