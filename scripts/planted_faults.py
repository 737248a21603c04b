"""Plant known faults, one at a time, and see that the tests turn red.

    python scripts/planted_faults.py            # all, about seven minutes
    python scripts/planted_faults.py rescaled   # those whose name contains a word

They lie in the attention kernels and their work lists (`faults`), in models (`faults_models`), in training steps
(`faults_training`), and in what several processes do together (`faults_several_gpus`). Each is one replacement in a
temporary copy of the package; the repository itself is not touched. Exit code 1 if a fault survives: if one of the
tests that are named with it stays green.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faults
import faults_models
import faults_several_gpus
import faults_training
from faults import Fault

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = "flashtrain", "tests"
FAULTS = [*faults.FAULTS, *faults_models.FAULTS, *faults_training.FAULTS, *faults_several_gpus.FAULTS]


def survives(fault: Fault) -> tuple[bool, str]:
    """Whether a test that must turn red stays green with the fault; that test, or the first that did turn red."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in (PACKAGE, TESTS, "conf"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "train.py"):
            shutil.copy(ROOT / file, copy)
        path = copy / PACKAGE / fault.file
        source = path.read_text()
        if source.count(fault.right) == 0:
            raise SystemExit(f"{fault.file} no longer contains {fault.right!r}: bring {__file__} up to date")
        path.write_text(source.replace(fault.right, fault.wrong))
        red = [_first_red(fault, test, copy) for test in fault.tests]
    green = [test for test, found in zip(fault.tests, red, strict=True) if not found]
    return bool(green), (green or red)[0].split("::", 1)[-1]


def _first_red(fault: Fault, test: str, copy: Path) -> str:
    """The first test that turns red in the copy, of a test function's parameters; "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"{TESTS}/{test}"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment.pop("FLASHTRAIN_GPU_RECORD", None)  # of the tests as they are
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if result.returncode < 0:
        return f"the process died of signal {-result.returncode}"
    red = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode > 1 or (result.returncode == 1 and not red):
        raise SystemExit(f"{fault.name}: pytest ended with {result.returncode}\n{result.stdout}{result.stderr}")
    return red[0].split(" - ")[0] if red else ""


def main() -> int:
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    survivors = []
    for fault in chosen:
        start = time.monotonic()
        alive, test = survives(fault)
        if alive:
            survivors.append(fault.name)
        seconds = time.monotonic() - start
        print(f"{'SURVIVES' if alive else 'found':8}  {fault.name:48} {seconds:4.0f} s  {test}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
