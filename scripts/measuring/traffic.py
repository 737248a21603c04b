"""HBM traffic of one forward and one backward pass, by Nsight Compute's counters.

The script under measurement runs itself once more below the profiler, and there makes exactly one call inside the
profiled range. A kernel that does nothing but wait stands between forward and backward, so that one run tells them
apart.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from measuring.attention import Case
from measuring.report import Unavailable

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_BORDER = "spin_kernel"  # what torch.cuda._sleep launches


def measure(ncu: str, script: Path, arguments: Sequence[str], seconds: float) -> dict[str, dict[str, float]]:
    """GB read and written by the kernels of each pass, as `profiled_call` makes them in `script` with `arguments`.

    Clocks are left alone; caches are emptied before each kernel, which is the profiler's default.

    Raises:
        Unavailable: no profiler, no right to read the counters, or no answer within `seconds`.
    """
    found = shutil.which(ncu)
    if found is None:
        raise Unavailable(f"{ncu} is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [found, "--clock-control", "none", "--profile-from-start", "off", "--metrics", f"{READ},{WRITTEN}"]
        command += ["--csv", "--print-units", "base", "--log-file", str(log), sys.executable, str(script), *arguments]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"the profiler took longer than {seconds:.0f} s") from None
        text = log.read_text() if log.exists() else ""
    kernels = parse(text)
    if not kernels:
        said = [line for line in (text + run.stdout + run.stderr).splitlines() if "error" in line.lower()]
        raise Unavailable(f"the profiler counted nothing (exit code {run.returncode}): {' '.join(said)[-300:]}")
    return passes(kernels)


def profiled_call(case: Case) -> None:
    """Warm up, then one forward and one backward pass inside the profiled range."""
    with case.implementation.context():
        for _ in range(2):
            case.forward_backward()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        out = case.forward()
        torch.cuda._sleep(1)
        case.backward(out)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parse(text: str) -> list[tuple[str, float, float]]:
    """Kernel name, bytes read and bytes written, in launch order, from Nsight Compute's CSV in base units.

    Both of its layouts are read: a line for each kernel and metric, or a column for each metric.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        if not row["ID"].isdigit():  # the line of units
            continue
        _, counts = kernels.setdefault(row["ID"], (row["Kernel Name"], {}))
        cells = {row["Metric Name"]: row["Metric Value"]} if "Metric Name" in row else row
        counts.update({name: _number(cells[name]) for name in (READ, WRITTEN) if name in cells})
    return [(name, counts[READ], counts[WRITTEN]) for name, counts in kernels.values() if len(counts) == 2]


def passes(kernels: Sequence[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """GB read and written before and after the border kernel.

    Raises:
        Unavailable: the border is not there, so the passes cannot be told apart.
    """
    border = next((i for i, (name, _, _) in enumerate(kernels) if _BORDER in name), None)
    if border is None:
        raise Unavailable(f"{_BORDER} is not among the {len(kernels)} profiled kernels")
    parts = {"forward": kernels[:border], "backward": kernels[border + 1 :]}
    parts["both"] = [*parts["forward"], *parts["backward"]]
    return {
        name: {
            "read_gb": sum(read for _, read, _ in part) / 1e9,
            "written_gb": sum(written for _, _, written in part) / 1e9,
            "kernels": len(part),
        }
        for name, part in parts.items()
    }


def _number(text: str) -> float:
    return float(text.replace(",", ""))
