"""A run on several GPUs has the losses of the run on one, as far as one GPU's own runs have the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import benchmark_scaling
import pytest
from measuring import scaling_losses
from measuring.scaling_losses import compare, runs_to_compare
from measuring.scaling_meshes import Mesh

from tests.scripts.conftest import ROOT


def _losses(name: str, *losses: float) -> dict:
    return {"name": name, "failed": None, "losses": list(losses)}


def test_a_loss_is_the_same_where_one_gpus_own_runs_differ_about_as_much():
    runs = [
        _losses("1", 5.0, 4.0, 3.0),
        _losses("1 again", 5.0, 4.001, 3.0),
        _losses("1 with other kernels", 5.0, 4.0, 2.998),
        _losses("ddp:2", 5.00004, 4.0015, 3.003),
        _losses("fsdp:2", 5.001, 4.0, 3.0),  # before any of one GPU's differ
        _losses("context:2:ring", 5.0, 4.0, 3.005),
    ]
    compare(runs)
    assert [run.get("same") for run in runs] == [None, None, None, True, False, False]
    assert runs[5]["largest_difference"] == pytest.approx(0.005) and runs[5]["worst_step"] == 3
    assert runs[4]["worst_step"] == 1


def test_without_a_second_run_on_one_gpu_nothing_is_said_to_be_the_same():
    runs = [_losses("1", 5.0), _losses("ddp:2", 5.0)]
    compare(runs)
    assert all("same" not in run for run in runs)


def _train(losses: dict[str, list[float]], failed: dict[str, str]):
    """A `run_all` that leaves behind what train.py would."""

    def run(jobs, gpus, side_by_side, limit, done):
        for number, job in enumerate(jobs):
            keys = dict(each.split("=", 1) for each in job.command[2:])
            folder = Path(keys["runs_dir"]) / keys["run_id"]
            folder.mkdir()
            rows = losses.get(keys["run_id"], [5.0, 4.0, 3.0, 2.0])
            lines = [f"{step},{loss}," for step, loss in enumerate(rows, 1)]
            (folder / "metrics.csv").write_text("\n".join(["step,train_loss,val_loss", *lines, "4,,2.0"]))
            done(number, {"seconds": 1.0, **({"failed": failed[keys["run_id"]]} if keys["run_id"] in failed else {})})

    return run


@pytest.mark.parametrize(
    ("losses", "failed", "verdict"),
    [
        ({}, {}, [None, None, None, True, True]),
        ({"run-ddp-2": [5.0, 4.0, 3.0, 2.1]}, {}, [None, None, None, False, True]),
        ({"run-ddp-2": [5.0]}, {"run-ddp-2": "rank 1 of 2: lost"}, [None, None, None, "rank 1 of 2: lost", True]),
        ({}, {"run-ddp-2": "lost at the end"}, [None, None, None, "lost at the end", True]),
    ],
)
def test_the_same_run_on_each_mesh_is_compared_and_decides_the_exit_code(dry_run, monkeypatch, losses, failed, verdict):
    monkeypatch.setattr(scaling_losses, "run_all", _train(losses, failed))
    code, result = dry_run(benchmark_scaling.main, "--meshes", "1,ddp:2,context:2:ring", "--same-loss", "4")
    assert code == (0 if verdict[3] is True else 1)
    runs = result["same_loss"]["runs"]
    assert [run.get("same") for run in runs] == [one if not isinstance(one, str) else None for one in verdict]
    if isinstance(verdict[3], str):
        assert runs[3]["failed"] == f"{verdict[3]}, after {len(losses.get('run-ddp-2', 'four'))} steps"
    assert "runs_dir" not in result["same_loss"]["run"] and str(ROOT) not in json.dumps(result["same_loss"])


def test_all_runs_of_a_comparison_take_the_same_sequences_in_a_step():
    arguments = benchmark_scaling.parse(["--same-loss", "50", "--override", "model.num_layers=4", "--device", "cpu"])
    runs = runs_to_compare([Mesh.parse(text) for text in ("ddp:2", "2x2", "ddp:4")], on_cpu=True)
    for run in runs:
        told = dict(each.split("=", 1) for each in scaling_losses.command(run, 4, arguments, Path("/runs"))[2:])
        assert (told["trainer.batch_tokens"], told["trainer.max_steps"]) == (str(4 * 16384), "50")
        assert told["model.num_layers"] == "4" and told["trainer.devices"] == str(run.mesh.devices)
        assert int(told["trainer.micro_batch_tokens"]) * run.mesh.context == 16384
