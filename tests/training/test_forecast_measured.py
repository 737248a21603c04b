"""The forecast gives what was measured on H200s, within 10 % of the memory and 15 % of the time."""

from __future__ import annotations

import csv
import json
import statistics
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import build
from flashtrain.models.recompute import Recompute
from flashtrain.training.forecast.memory import step_memory
from flashtrain.training.forecast.mesh import ring_seconds
from flashtrain.training.forecast.time import step_time
from flashtrain.training.memory import plan

from .conftest import ROOT
from .test_forecast import case_of


def measured_steps() -> list[Any]:
    found = []
    for backend, name in (("hopper", "training"), ("portable", "training_portable")):
        rows = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())["rows"]
        found += [
            pytest.param(backend, row, id=f"{backend}-{row['seq_len']}") for row in rows if row["model"] == "ours"
        ]
    return found


@pytest.mark.parametrize(("backend", "row"), measured_steps())
def test_steps_of_gpt2_on_one_gpu(backend, row):
    case = case_of("model=gpt2", f"seq_len={row['seq_len']}", sequences=row["batch"], backend=backend)
    time = step_time(case)
    assert time is not None
    assert step_memory(case).peak / 2**30 == pytest.approx(row["peak_gib"], rel=0.1)
    assert 1000 * time.step == pytest.approx(row["step_ms"]["median"], rel=0.15)


def measured_runs() -> list[Any]:
    """(experiment, tokens/s, GiB) of runs on an H200: the median of logged intervals, and the most that was held."""
    found = []
    for experiment, name in (
        ("path_x", "path-x"),
        ("path_256", "path-256"),
        ("million_tokens", "million-tokens"),
        ("million_tokens_sparse", "million-tokens-sparse"),
    ):
        with (ROOT / "benchmarks" / "runs" / name / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["tokens_per_second"]]
        rate = statistics.median(float(row["tokens_per_second"]) for row in rows[1:])
        found.append((experiment, rate, max(float(row["peak_memory_gib"]) for row in rows)))
    names = ("sparse_text", "sparse_text_sinks", "sparse_text_butterfly", "sparse_text_strided")
    rows = json.loads((ROOT / "benchmarks" / "sparse_text.json").read_text())["rows"]
    found += [(n, row["tokens_per_second"], row["peak_memory_gib"]) for n, row in zip(names, rows, strict=True)]
    return [pytest.param(*each, id=each[0]) for each in found]


@pytest.mark.parametrize(("experiment", "tokens_per_second", "gib"), measured_runs())
def test_whole_runs(experiment, tokens_per_second, gib):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", [f"experiment={experiment}", "plan.gpu=h200"])
    found = plan(build(OmegaConf.to_container(config, resolve=True)))  # type: ignore[arg-type]
    assert found.tokens_per_second is not None
    assert found.memory.peak / 2**30 == pytest.approx(gib, rel=0.1)
    assert found.tokens_per_second == pytest.approx(tokens_per_second, rel=0.15)


def measured_meshes() -> list[Any]:
    rows = json.loads((ROOT / "benchmarks" / "scaling.json").read_text())["rows"]
    return [
        pytest.param(row, id=f"{row['model']}-{row['seq_len'] // 1024}k-{row['mesh']}")
        for row in rows
        if row["failed"] is None
    ]


@pytest.mark.parametrize("row", measured_meshes())
def test_steps_on_one_gpu_and_two(row):
    layers, heads, hidden = {"gpt2": (12, 12, 768), "gpt_1.3b": (24, 16, 2048)}[row["model"]]
    case = case_of(
        f"seq_len={row['seq_len']}", f"trainer.batch_tokens={row['sequences'] * row['seq_len']}",
        f"trainer.devices={row['devices']}",
        f"trainer.context={row['context']}", f"trainer.strategy={row['strategy']}",
        f"trainer.context_method={row['method'] or 'ring'}", "model=gpt2_rope", f"model.num_layers={layers}",
        f"model.num_heads={heads}", f"model.hidden_size={hidden}", compiled=False, backend="hopper",
        how=Recompute("selective"), sequences=row["sequences"],
    )  # fmt: skip
    time = step_time(case)
    assert time is not None
    assert step_memory(case).peak / 2**30 == pytest.approx(row["peak_gib"], rel=0.1)
    assert 1000 * time.step == pytest.approx(row["step_ms"]["median"], rel=0.15)


def measured_ranks() -> list[Any]:
    """The slowest rank of a ring, one after another on one GPU."""
    names = ("context_parallel", "context_parallel_1m")
    rows = [row for n in names for row in json.loads((ROOT / "benchmarks" / f"{n}.json").read_text())["rows"]]
    return [pytest.param(row, id=f"{row['seq_len'] // 1024}k-{row['ranks']}") for row in rows]


@pytest.mark.parametrize("row", measured_ranks())
def test_what_a_ring_adds_to_a_share_of_the_whole(row):
    size = row["ranks"]
    case = case_of(
        f"seq_len={row['seq_len']}", f"trainer.batch_tokens={row['seq_len']}", f"trainer.devices={size}",
        f"trainer.context={size}", "trainer.strategy=fsdp", "model=gpt2_rope", "model.num_layers=1", backend="hopper",
        how=Recompute("selective"), sequences=1,
    )  # fmt: skip
    gpu = case.gpu
    assert gpu is not None
    share = row["whole"]["both_ms"]["median"] / size
    assert share + 1000 * ring_seconds(case, gpu) == pytest.approx(max(row["rank_ms"]), rel=0.05)
