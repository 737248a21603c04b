"""Runs are compared where they saw equal tokens of the same text, and by what they learned in which time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_runs
import pytest
import yaml
from hydra import compose, initialize_config_dir
from measuring.runs import Run, flat, require_comparable
from omegaconf import OmegaConf

from tests.scripts.conftest import ROOT

CONFIG = {"seq_len": 256, "seed": 1, "attention": {"layout": None}, "model": {"num_layers": 4}, "trainer": {"lr": 1.0}}
SUMMARY = {
    "status": "finished", "steps": 4, "tokens": 4000, "seq_len": 256, "model": "gpt2", "tokenizer": "gpt2",
    "corpus": {"fingerprint": "abc", "text_fingerprint": "def"}, "device": "NVIDIA H200", "precision": "bf16-mixed",
    "attention_density": 257 / 512, "attention_backend": "hopper", "git_commit": "1f",
    "mfu": 0.4, "peak_memory_gib": 9.0,
}  # fmt: skip
SINKS = [{"layout": "window_sinks", "block": 128, "layers": [1, 2, 3], "density": 0.1}]
DENSE = [{"layout": "dense", "block": None, "layers": [4], "density": 0.5}]


def _run(folder: Path, rates: tuple[float, ...], held_out: tuple[float, ...], **changes: Any) -> Path:
    """A run of four logged steps of 1,000 tokens, the first of which takes its time."""
    folder.mkdir(parents=True)
    config, summary = json.loads(json.dumps(CONFIG)), {**SUMMARY, "run_id": f"sweep/{folder.name}"}
    for key, value in changes.items():
        target, name = (config, key) if key in config else (summary, key)
        target[name] = value
    lines = ["step,tokens,train_loss,val_loss,tokens_per_second"]
    for step, (rate, loss) in enumerate(zip(rates, held_out, strict=True), 1):
        lines += [f"{step},{1000 * step},{loss + 0.1},,{rate}", f"{step},{1000 * step},,{loss},"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A dense run, and a sparse one of twice its speed that needs more tokens."""
    _run(tmp_path / "sweep" / "0", (10, 100, 100, 100), (5.0, 4.0, 3.5, 3.0))
    sparse = {"attention": {"layout": "window_sinks"}, "attention_layers": SINKS + DENSE, "attention_density": 0.2}
    _run(tmp_path / "sweep" / "1", (20, 200, 200, 200), (5.0, 4.2, 3.6, 2.8), **sparse)
    (tmp_path / "sweep" / "conf").mkdir()
    return tmp_path / "sweep"


def test_a_sweep_becomes_a_table_a_json_and_a_picture(sweep, tmp_path, capsys):
    out, plot = tmp_path / "result.json", tmp_path / "new" / "loss.png"
    assert compare_runs.main([str(sweep), "--out", str(out), "--plot", str(plot)]) == 0
    result = json.loads(out.read_text())
    assert (result["gpu"], result["commit"], result["corpus"]["fingerprint"]) == ("NVIDIA H200", "1f", "abc")
    assert str(tmp_path) not in out.read_text()
    dense, sparse = result["rows"]
    assert (dense["label"], sparse["label"]) == ("dense", "window_sinks + dense")
    assert (dense["tokens_per_second"], sparse["tokens_per_second"]) == (100, 200)
    assert (dense["val_loss"], sparse["val_loss"]) == (3.0, 2.8)
    assert (dense["of_causal"], sparse["of_causal"]) == (1.0, pytest.approx(0.4 * 256 / 257, rel=1e-5))
    assert (dense["seconds"], sparse["seconds"]) == (40, 20)
    # Between 3.6 after 15 seconds and 2.8 after 20.
    assert sparse["seconds_to_loss_of"] == {"dense": pytest.approx(18.75)}
    assert dense["seconds_to_loss_of"] == {"window_sinks + dense": None}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "18.8" in capsys.readouterr().out


def test_seconds_count_training_alone_without_the_time_to_compile(sweep):
    run = Run.read(sweep / "0")
    assert [seconds for _, seconds, _ in run.losses("val_loss")] == [10, 20, 30, 40]
    assert run.seconds_to(9.0) == 10 and run.seconds_to(2.0) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": 5000}, "tokens is 4000 in sweep/0 and 5000 in sweep/2"),
        ({"corpus": {"fingerprint": "other"}}, "corpus.fingerprint is abc in sweep/0 and other in sweep/2"),
        ({"tokenizer": "bytes"}, "tokenizer is gpt2"),
        ({"seed": 2}, "seed is 1 in sweep/0 and 2"),
        ({"trainer": {"lr": 2.0}}, "trainer.lr is 1.0"),
        ({"model": {"num_layers": 4, "dropout": 0.1}}, "model.dropout is None in sweep/0 and 0.1"),
        ({"device": "NVIDIA H100"}, "device is NVIDIA H200"),
        ({"status": "stopped"}, "'stopped', not finished"),
    ],
)
def test_runs_that_differ_in_more_than_attention_are_refused(sweep, changes, told, capsys):
    _run(sweep / "2", (10, 100, 100, 100), (5.0, 4.0, 3.5, 3.0), **changes)
    with pytest.raises(SystemExit):
        compare_runs.main([str(sweep), "--out", str(sweep / "x.json")])
    assert told in capsys.readouterr().err
    assert not (sweep / "x.json").exists()


def test_names_and_places_may_differ(sweep):
    changes = {"attention": {"layout": "butterfly"}}
    folder = _run(sweep / "7", (10, 100, 100, 100), (5.0, 4.0, 3.5, 3.0), **changes)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "run_id": "a", "logger": {"name": "csv"}}))
    require_comparable([Run.read(sweep / "0"), Run.read(folder)])


def test_runs_with_the_same_layouts_keep_names_of_their_own(sweep, capsys):
    _run(sweep / "2", (10, 100, 100, 100), (5.0, 4.0, 3.5, 3.0))
    labels = compare_runs.labels_of([Run.read(path) for path in compare_runs.jobs([sweep])])
    assert labels == ["dense (sweep/0)", "window_sinks + dense", "dense (sweep/2)"]


def test_the_experiments_on_sparse_text_differ_in_attention_alone():
    names = ("sparse_text", "sparse_text_sinks", "sparse_text_butterfly", "sparse_text_strided")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        trees = [OmegaConf.to_container(compose("config", [f"experiment={name}"])) for name in names]
    configs = [dict(flat(tree)) for tree in trees]
    assert configs[0]["model.name"] == "gpt2" and configs[0]["seq_len"] == "16k"
    shared = [{key: value for key, value in each.items() if not key.startswith("attention.")} for each in configs]
    assert shared[0] == shared[1] == shared[2] == shared[3]
    layouts = [each.get("attention.layout.name") for each in configs]
    assert layouts == [None, "window_sinks", "butterfly", "strided"]
