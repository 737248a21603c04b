"""The scripts as a person runs them find each other beside themselves; so do their tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import build
from flashtrain.training.run import run as train

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


def train_run(runs_dir: Path, run_id: str, *changes: str) -> Path:
    """The folder of a run that is trained in this process; of several values for a key the last one holds."""
    overrides = {text.split("=")[0]: text for text in (*changes, f"runs_dir={runs_dir}", f"run_id={run_id}")}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", list(overrides.values()))
    assert train(build(OmegaConf.to_container(composed, resolve=True)), []) == 0
    return runs_dir / run_id
