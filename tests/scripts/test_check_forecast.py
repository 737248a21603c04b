"""The forecast is checked by real steps, each run in a process of its own."""

from __future__ import annotations

import json

import check_forecast

from flashtrain.models.recompute import Recompute
from flashtrain.training.forecast.choose import candidates


def test_a_row_holds_forecast_and_measured_figures(dry_run):
    code, result = dry_run(check_forecast.main, "--run", "gpt2 64 x 2")
    assert code == 0
    assert result["command"].startswith("python scripts/check_forecast.py")
    (row,) = result["rows"]
    assert row["forecast_gib"] > 0
    assert row["step_ms"]["median"] > 0


def test_a_run_that_cannot_be_is_a_row_that_says_why_and_fails_the_script(dry_run):
    code, result = dry_run(check_forecast.main, "--run", "gpt2 64 x 2 memory.loss=liger")
    assert code == 1
    assert "needs an NVIDIA GPU" in result["rows"][0]["failed"]


def test_there_are_24_runs_and_more_and_each_is_a_configuration_with_the_memory_it_names():
    configs = [check_forecast.config_of(run, dry_run=False) for run in check_forecast.RUNS]
    assert len(configs) == len(set(check_forecast.RUNS)) >= 24
    assert all(config.sequences_per_micro_batch == config.sequences_per_step for config in configs)
    offloaded = check_forecast.config_of("gpt2_rope 64k x 1 memory=offload", dry_run=False)
    assert list(candidates(offloaded.memory)) == [Recompute("full", True, 16384)]
    assert {run.split()[0] for run in check_forecast.RUNS} >= {"gpt2", "gpt2_rope", "gpt2_medium", "modern", "gpt2_xl"}


def test_a_call_goes_on_from_an_earlier_one_with_what_is_missing_or_failed_there(dry_run, tmp_path, monkeypatch):
    earlier = tmp_path / "earlier.json"
    _, result = dry_run(check_forecast.main, "--run", "gpt2 64 x 2")
    done = result["rows"][0]
    earlier.write_text(json.dumps({"rows": [done, {"run": "modern 64 x 2", "failed": "not run: out of time"}]}))
    measured: list[str] = []
    monkeypatch.setattr(check_forecast, "run_row", lambda run, *_: measured.append(run) or {**done, "run": run})
    runs = ("--run", "gpt2 64 x 2", "--run", "modern 64 x 2", "--run", "gpt2 32 x 2")
    code, result = dry_run(check_forecast.main, "--also", str(earlier), *runs)
    assert code == 0
    assert measured == ["modern 64 x 2", "gpt2 32 x 2"]
    assert [row["run"] for row in result["rows"]] == ["gpt2 64 x 2", *measured]
