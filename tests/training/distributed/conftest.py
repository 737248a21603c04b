"""Processes that train together, and the command lines of runs that start some."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtrain.config import Config
from flashtrain.training.checkpoints import load

from ...parallel.ranks import Ranks
from ..conftest import ROOT, changed, metrics, summary


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """So many processes, joined by gloo: started once for all tests."""
    groups: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in groups:
            groups[size] = Ranks(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return groups[size]

    yield of
    for group in groups.values():
        group.close()


def train(rank: int, size: int, config: Config, told: list[str], dtype: torch.dtype = torch.float64) -> int:
    """Run a configuration as one of several processes; returns its exit code."""
    import torch.distributed as dist

    from flashtrain.training import run as run_module
    from flashtrain.training.distributed.processes import Processes

    class Together(Processes):
        def leave(self, together: bool) -> None:
            assert together

    torch.set_default_dtype(dtype)
    store = dist.PrefixStore(config.run_id or "", dist.distributed_c10d._get_default_store())
    processes = Together(rank, size, rank, config.trainer.context, 60.0, store)
    run_module.join = lambda _: processes
    return run_module.run(config, told)


@pytest.fixture
def float64() -> Iterator[None]:
    """Runs of this process are in float64 too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def command(overrides: list[str]) -> Callable[..., subprocess.Popen]:
    """Start train.py, or a script in its place, with a small run's command line, `by` torchrun where that is given."""

    def start(
        *arguments: str, by: tuple[str, ...] = (), script: str = "train.py", **environment: str
    ) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        flags = [text for text in arguments if text.startswith("-")]
        keys = changed(
            changed(overrides, "attention.backend=sdpa", "trainer.sample_tokens=0", "trainer.devices=2"),
            *(text for text in arguments if not text.startswith("-")),
        )
        return subprocess.Popen(
            [sys.executable, *by, script, *flags, *keys],
            cwd=ROOT,
            env={**kept, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def check_equal(alone: Path, together: Path, step: int, tolerance: float = 1e-9) -> None:
    """Two runs have the same figures, and the same weights after that step."""
    rows = zip(metrics(alone), metrics(together), strict=True)
    for one, other in rows:
        assert (one["step"], one["tokens"]) == (other["step"], other["tokens"])
        losses = [name for name in one if "loss" in name or "recall" in name or name == "grad_norm"]
        for name in losses:
            expected = one[name] and pytest.approx(float(one[name]), rel=tolerance)
            assert (other[name] and float(other[name])) == expected, name
    expected, found = weights(alone, step), weights(together, step)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)
    assert summary(together)["val_loss"] == pytest.approx(summary(alone)["val_loss"], rel=tolerance)


def weights(folder: Path, step: int) -> dict[str, Any]:
    """The model's weights in a run's checkpoint."""
    weights: dict[str, Any] = load(folder / "checkpoints" / f"step-{step:08d}.ckpt")["state_dict"]
    return weights
