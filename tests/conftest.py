"""Where there is no GPU, Triton's kernels run in its interpreter on the CPU: the same tests, the same source.

The interpreter is chosen when a kernel is defined, so the choice comes before anything imports triton.
"""

import os
from pathlib import Path

# numpy's and torch's threads fight each other over small tiles.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.attention.record import write_record

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Where tests start several processes or compile for a GPU. Their files come first, in this order, so that with
# several workers, each of which takes a file at a time, none is left with a long one while the others are done.
LONG = (
    "training/distributed/test_starting.py",
    "training/test_memory.py",
    "training/test_on_gpu.py",
    "attention/test_",
    "training/distributed/",
    "training/test_sweeps.py",
    "parallel/",
    "training/test_resume.py",
    "scripts/test_benchmark_",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # xdist's own order puts files with few tests last
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((n for n, part in enumerate(LONG) if part in item.path.as_posix()), len(LONG)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The record of a run on a GPU, where FLASHTRAIN_GPU_RECORD names a file: by the process that has all results."""
    target = os.environ.get("FLASHTRAIN_GPU_RECORD")
    if target and torch.cuda.is_available() and not hasattr(terminalreporter.config, "workerinput"):
        write_record(terminalreporter, Path(target))


@pytest.fixture
def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
