"""What a GPU run of the attention tests leaves behind, so that machines without one can tell whether it still holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "gpu_tests.json"
COMMAND = f"FLASHTRAIN_GPU_RECORD={RECORD.relative_to(ROOT)} python -m pytest tests/attention"


def attention_hash() -> str:
    """SHA-256 over the attention package: names and lines of its files, blank lines and comment lines left out."""
    folder = ROOT / "flashtrain" / "attention"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        lines = (line.rstrip() for line in path.read_text().splitlines())
        code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
        digest.update(f"{path.relative_to(folder).as_posix()}\n{code}\n".encode())
    return digest.hexdigest()
