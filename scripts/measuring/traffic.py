"""Traffic of forward and backward passes, by Nsight Compute's counters.

The script under measurement runs itself once more below the profiler, and there makes each call once inside the
profiled range. A kernel that does nothing but wait stands behind every pass, so that one run tells passes apart, and
the calls of many cases.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from measuring.attention import Case
from measuring.report import Unavailable, reason, say

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
# Pieces of 32 bytes that multiprocessors ask the L2 cache for: loads, stores and additions.
ASKED, _PIECE = "lts__t_sectors_srcunit_tex.sum", 32
BOTH = ("forward", "backward")
_BORDER = "spin_kernel"  # what torch.cuda._sleep launches
_TOLD = "profiled: "  # begins the line in which a profiled script tells what it has called
_NAME = 80  # letters of a kernel's name that are kept


class Kernel(NamedTuple):
    """Bytes read from and written to HBM, and between L2 and the multiprocessors where that was counted."""

    name: str
    read: float
    written: float
    asked: float | None = None


def measure(ncu: str, script: Path, arguments: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """GB read and written by the kernels of each pass, as `profiled_call` makes them in `script` with `arguments`.

    Raises:
        Unavailable: as `profile`.
    """
    return passes(profile(ncu, script, arguments, seconds)[0])


def measure_all(
    ncu: str, script: Path, arguments: Sequence[str], seconds: float, cache: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The same for all cases that `profiled_calls` goes through in `script`: what was counted, and why not, by case.

    cache: count what passes between L2 and the multiprocessors too.

    Raises:
        Unavailable: as `profile`.
    """
    kernels, printed = profile(ncu, script, arguments, seconds, cache)
    lines = [line.removeprefix(_TOLD) for line in printed.splitlines() if line.startswith(_TOLD)]
    return by_case(kernels, [json.loads(line) for line in lines])


def profile(
    ncu: str, script: Path, arguments: Sequence[str], seconds: float, cache: bool = False
) -> tuple[list[Kernel], str]:
    """All kernels in the profiled ranges of a script, and what it printed.

    Clocks are left alone; caches are emptied before each kernel, which is the profiler's default.

    Raises:
        Unavailable: no profiler, no right to read the counters, or no answer within `seconds`.
    """
    found = shutil.which(ncu)
    if found is None:
        raise Unavailable(f"{ncu} is not installed here")
    metrics = ",".join((READ, WRITTEN, ASKED) if cache else (READ, WRITTEN))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [found, "--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics]
        command += ["--csv", "--print-units", "base", "--log-file", str(log), sys.executable, str(script), *arguments]
        code, printed, errors = _run(command, seconds)
        text = log.read_text() if log.exists() else ""
    kernels = parse(text)
    if not kernels:
        said = [line for line in (text + printed + errors).splitlines() if "error" in line.lower()]
        raise Unavailable(f"the profiler counted nothing (exit code {code}): {' '.join(said)[-300:]}")
    return kernels, printed


def _run(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Exit code, output and errors. One that takes too long is ended together with what it has started."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Unavailable(f"the profiler took longer than {seconds:.0f} s") from None
    return process.returncode, printed, errors


def profiled_call(case: Case, wanted: Sequence[str] = BOTH, made: list[str] | None = None) -> None:
    """Warm up, then the wanted passes once inside the profiled range, a border behind each.

    wanted: ("forward",) or both. made: collects the passes that have a border, also where one of them fails.
    """
    made = [] if made is None else made
    with case.implementation.context():
        for _ in range(2):
            case.forward_backward()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        try:
            with _bordered("forward", made):
                out = case.forward()
            if "backward" in wanted:
                with _bordered("backward", made):
                    case.backward(out)
        finally:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


@contextlib.contextmanager
def _bordered(name: str, made: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        torch.cuda._sleep(1)
        made.append(name)


def profiled_calls(cases: Iterable[tuple[str, Sequence[str], Callable[[], Case]]], seconds: float) -> None:
    """`profiled_call` of each case: its name, the wanted passes, and what makes it. Tells `measure_all` what was done.

    A case that fails is left out; none begins after `seconds`.
    """
    deadline = time.monotonic() + seconds
    for name, wanted, make in cases:
        made: list[str] = []
        failed = None
        try:
            if time.monotonic() > deadline:
                raise Unavailable("not profiled: out of time")
            profiled_call(make(), wanted, made)
        except Exception as error:  # told, and the others go on
            failed = reason(error)
        say(_TOLD + json.dumps({"case": name, "passes": made, "failed": failed}))
        gc.collect()
        with contextlib.suppress(RuntimeError):  # where the GPU is lost
            torch.cuda.empty_cache()


def parse(text: str) -> list[Kernel]:
    """Kernels in launch order, from Nsight Compute's CSV in base units.

    Both of its layouts are read: a line for each kernel and metric, or a column for each metric.

    Raises:
        Unavailable: a kernel without a count of HBM's bytes.
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
        found = {name: _number(cells[name]) for name in (READ, WRITTEN, ASKED) if name in cells}
        counts.update({name: value for name, value in found.items() if value is not None})
    uncounted = [name for name, counts in kernels.values() if not {READ, WRITTEN} <= counts.keys()]
    if uncounted:
        raise Unavailable(f"the profiler did not count {uncounted[0][:_NAME]}")
    return [
        Kernel(name, counts[READ], counts[WRITTEN], _PIECE * counts[ASKED] if ASKED in counts else None)
        for name, counts in kernels.values()
    ]


def _number(text: str) -> float | None:
    """None where the profiler has no value for a metric."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def passes(kernels: Sequence[Kernel]) -> dict[str, dict[str, Any]]:
    """GB read and written before and after the border kernel.

    Raises:
        Unavailable: the border is not there, so the passes cannot be told apart.
    """
    parts = _parts(kernels)
    if len(parts) < 2:
        raise Unavailable(f"{_BORDER} is not among the {len(kernels)} profiled kernels")
    return _sums(dict(zip(BOTH, parts, strict=False)))


def by_case(
    kernels: Sequence[Kernel], told: Sequence[dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What each pass of each case moved, with its kernels one by one; and the cases without figures, and why.

    told: case, passes and failed of each case in the order of the calls, as `profiled_calls` tells them.
    """
    parts = _parts(kernels)[:-1]  # what follows the last border belongs to nobody
    found, missing, place = {}, {}, 0
    for about in told:
        own = parts[place : place + len(about["passes"])]
        place += len(about["passes"])
        if about["failed"] is not None:
            missing[about["case"]] = about["failed"]
        elif len(own) < len(about["passes"]):
            missing[about["case"]] = "the profiler ended before it"
        else:
            by_pass = dict(zip(about["passes"], own, strict=True))
            found[about["case"]] = _sums(by_pass) | {"by_kernel": {name: _listed(p) for name, p in by_pass.items()}}
    return found, missing


def _parts(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels between borders, which are left out."""
    parts: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if _BORDER in kernel[0]:
            parts.append([])
        else:
            parts[-1].append(kernel)
    return parts


def _sums(by_pass: dict[str, list[Kernel]]) -> dict[str, dict[str, Any]]:
    by_pass = by_pass | {"both": [kernel for part in by_pass.values() for kernel in part]}
    return {name: _sum(part) for name, part in by_pass.items()}


def _sum(part: Sequence[Kernel]) -> dict[str, Any]:
    read, written = sum(kernel.read for kernel in part), sum(kernel.written for kernel in part)
    counts: dict[str, Any] = {"read_gb": read / 1e9, "written_gb": written / 1e9, "kernels": len(part)}
    asked = [kernel.asked for kernel in part if kernel.asked is not None]
    if asked and len(asked) == len(part):
        counts["asked_gb"] = sum(asked) / 1e9
    return counts


def _listed(part: Sequence[Kernel]) -> list[dict[str, Any]]:
    return [{"name": k.name[:_NAME], "read_gb": k.read / 1e9, "written_gb": k.written / 1e9} for k in part]
