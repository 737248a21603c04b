"""The scripts as a person runs them find each other beside themselves; so do their tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture
def dry_run(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs a benchmark's main in its tiny mode on the CPU; the exit code and the JSON."""

    def run(main: Callable[[list[str]], int], *arguments: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "result.json"
        code = main(["--dry-run", "--device", "cpu", "--out", str(out), *arguments])
        return code, json.loads(out.read_text())

    return run


def check_facts(result: dict[str, Any]) -> None:
    """What every result must say about itself."""
    assert result["commit"] is None or len(result["commit"].removesuffix("+changes")) == 40
    assert result["gpu"] == "none: cpu"
    assert {"torch", "triton", "cuda", "cudnn", "driver", "python"} <= set(result["versions"])
    assert result["command"].startswith("python scripts/benchmark_")
    assert "--out" not in result["command"]
    assert "quartiles" in result["spread"]
    assert result["dry_run"] is True
    assert result["rows"]
