"""Pictures are drawn from what runs and benchmarks leave behind, and say when there is nothing to draw."""

from __future__ import annotations

import json
from pathlib import Path

import plot_benchmarks
import plot_curves
import pytest

METRICS = """step,tokens,train_loss,val_loss,tokens_per_second
10,1000,5.0,,100
20,2000,4.0,,50
20,2000,,4.5,
30,3000,3.0,3.5,50
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "metrics.csv").write_text(METRICS)
    (folder / "summary.json").write_text(json.dumps({"model": "gpt2", "seq_len": 16384, "device": "cpu"}))
    return folder


def _is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_curves_of_runs_become_a_picture(run_folder, tmp_path):
    out = tmp_path / "new" / "loss.png"
    assert plot_curves.main([str(run_folder), str(run_folder / "metrics.csv"), "--out", str(out)]) == 0
    assert _is_picture(out)


def test_minutes_are_those_in_which_the_run_trained(run_folder):
    curve = plot_curves.read(run_folder, "minutes")
    assert [x for x, _ in curve.train] == pytest.approx([10 / 60, 30 / 60, 50 / 60])
    assert curve.held_out == [(pytest.approx(0.5), 4.5), (pytest.approx(50 / 60), 3.5)]
    assert plot_curves.read(run_folder, "tokens").train[0] == (0.001, 5.0)


def test_a_run_without_losses_is_told(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text(METRICS.splitlines()[0] + "\n")
    with pytest.raises(SystemExit):
        plot_curves.main([str(tmp_path), "--out", str(tmp_path / "x.png")])
    assert "holds no training loss" in capsys.readouterr().err


def _result(benchmark: str) -> dict:
    speed = {"head_dim": 64, "causal": True, "tflops": {"both": 300.0}, "peak_gib": 2.0, "tokens_per_second": 1e5}
    speed |= {"batch": 64, "num_heads": 16, "density": 1.0, "density_asked": None, "ms": {"both": {"median": 2.0}}}
    ours = {"implementation": "portable", "model": "ours", "failed": None, **speed}
    rows = [{**ours, "seq_len": 1024}, {**ours, "seq_len": 4096}]
    rows.append({**ours, "implementation": "standard", "seq_len": 1024})
    rows.append({**ours, "seq_len": 1024, "density": 0.5, "density_asked": 0.5})
    rows.append({"implementation": "standard", "model": "peer", "seq_len": 4096, "failed": "out of memory"})
    about = {"gpu": "NVIDIA H200", "gpu_memory_gib": 139.8, "settings": {"dtype": "bfloat16", "shape": "12 heads x 64"}}
    return {"benchmark": benchmark, "rows": rows, **about}


@pytest.mark.parametrize("name", sorted(plot_benchmarks.DRAWINGS))
def test_results_of_a_benchmark_become_a_picture(name, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(_result(name)))
    out = tmp_path / "picture.png"
    assert plot_benchmarks.main([str(tmp_path / "result.json"), "--out", str(out)]) == 0
    assert _is_picture(out)


def test_a_benchmark_without_results_is_not_drawn(tmp_path):
    result = _result("memory")
    result["rows"] = result["rows"][-1:]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_benchmarks.plot(result, tmp_path / "x.png")
    with pytest.raises(ValueError, match="no picture"):
        plot_benchmarks.plot(_result("paper_table"), tmp_path / "x.png")
