"""What a longer context is worth: runs that differ in it alone, on the same held-out tokens; and the recipes for it."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import compare_contexts
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from measuring.contexts import windows
from measuring.runs import flat
from omegaconf import OmegaConf

from flashtrain.config import build
from flashtrain.data.batch import IGNORE
from tests.scripts.conftest import ROOT, train_run

TINY = (
    "model=tiny", "model.num_layers=1", "model.num_heads=2", "model.hidden_size=32", "logger=csv", "data=text",
    "data.min_document_tokens=200", "data.val_fraction=0.3", "trainer.accelerator=cpu", "trainer.batch_tokens=256",
    "trainer.micro_batch_tokens=256", "trainer.max_steps=3", "trainer.val_tokens=256",
    "trainer.checkpoint_every_n_steps=3", "schedule.first_length=16", "schedule.length_steps=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A folder, and the changes that train a tiny model on its documents."""
    folder = tmp_path_factory.mktemp("contexts")
    (folder / "text").mkdir()
    for number in range(12):
        (folder / "text" / f"{number}.txt").write_text(f"document {number} goes on and on. " * (10 + 3 * number))
    return folder, (f"data.path={folder / 'text'}", f"data.prepared_dir={folder / 'prepared'}")


@pytest.fixture(scope="module")
def runs(text: tuple[Path, tuple[str, ...]]) -> list[Path]:
    folder, data = text
    names = ("experiment=longer_context", *TINY, *data)
    return [train_run(folder / "runs", f"at-{n}", *names, f"seq_len={n}") for n in (64, 256)]


def test_runs_are_judged_on_the_same_tokens_and_become_a_json_and_a_picture(runs, tmp_path, capsys):
    out, plot = tmp_path / "result.json", tmp_path / "new" / "contexts.png"
    folders = [str(run) for run in runs]
    assert compare_contexts.main([*folders, "--device", "cpu", "--out", str(out), "--plot", str(plot)]) == 0
    result = json.loads(out.read_text())
    assert result["command"].startswith("python scripts/compare_contexts.py")
    assert str(tmp_path) not in out.read_text()
    short, long = result["rows"]
    assert (short["seq_len"], long["seq_len"], short["stride"]) == (64, 256, 32)
    counts = [[each["targets"] for each in row["by_position"]] for row in (short, long)]
    assert counts[0] == counts[1] and sum(counts[0]) == result["settings"]["held_out"]["targets"]
    # Up to the end of the short context both may see the whole document; behind it, 64 tokens at most and all.
    assert min(counts[0]) > 0 and long["by_position"][-1]["last"] == 255
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "tokens before" in capsys.readouterr().out
    again = tmp_path / "again.png"
    assert compare_contexts.main([str(out), "--plot", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")


def test_runs_that_saw_other_tokens_are_refused(runs, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(runs[0], other)
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**summary, "run_id": "other", "tokens": 1}))
    with pytest.raises(SystemExit):
        compare_contexts.main([str(runs[0]), str(other), "--out", str(tmp_path / "x.json")])
    assert "tokens is 768 in at-64 and 1 in other: take runs that differ in seq_len alone" in capsys.readouterr().err


@pytest.mark.parametrize("count", [5, 8, 9, 40, 43])
@pytest.mark.parametrize(("context", "stride"), [(8, 4), (8, 8), (8, 1), (64, 32)])
def test_windows_score_every_token_of_a_document_once_with_the_most_before_it(count, context, stride):
    document = np.arange(100, 101 + count)
    scored: dict[int, int] = {}
    for tokens, targets, positions in windows(document, context, stride):
        assert len(tokens) == len(targets) == len(positions) == min(context, count)
        for index in np.flatnonzero(targets != IGNORE):
            place = int(positions[index])
            assert place not in scored
            assert tokens[index] == document[place] and targets[index] == document[place + 1]
            scored[place] = int(index)
    assert sorted(scored) == list(range(count))
    assert all(before >= min(place, context - stride) for place, before in scored.items())


def _config(*overrides: str):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(OmegaConf.to_container(compose("config", list(overrides)), resolve=True))


def test_the_lengths_of_the_experiment_share_the_tokens_of_a_step_and_of_a_validation():
    configs = [_config("experiment=longer_context", f"seq_len={n}") for n in ("1k", "4k", "16k", "64k")]
    assert {config.sequences_per_step * config.seq_len for config in configs} == {65536}
    assert all(config.trainer.val_tokens % config.seq_len == 0 for config in configs)
    assert configs[0].model.positions == "rope" and configs[0].data.min_document_tokens == 16384


def test_a_million_tokens_is_three_steps_of_one_sequence_and_the_sparse_ones_differ_in_attention_alone():
    dense = _config("experiment=million_tokens")
    assert (dense.seq_len, dense.sequences_per_step, dense.trainer.max_steps) == (2**20, 1, 3)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        names = ("million_tokens", "million_tokens_sparse")
        trees = [dict(flat(OmegaConf.to_container(compose("config", [f"experiment={name}"])))) for name in names]
    dense_rest, sparse_rest = ({k: v for k, v in tree.items() if not k.startswith("attention.")} for tree in trees)
    assert dense_rest == sparse_rest
    assert trees[1]["attention.layout.name"] == "window_sinks"


@pytest.mark.parametrize("experiment", ["million_tokens", "million_tokens_sparse"])
def test_the_steps_of_a_million_tokens_may_be_runs_of_their_own_and_the_loss_falls(text, experiment):
    folder, data = text
    tiny = [change for change in TINY if not change.startswith(("trainer.max_steps", "trainer.checkpoint", "data.v"))]
    own = ("seq_len=256", *tiny, *data, f"experiment={experiment}", "data.val_fraction=0.3")
    whole = train_run(folder / "whole", experiment, *own)
    parts = train_run(folder / "parts", experiment, *own, "trainer.max_steps=1")
    for steps in (2, 3):
        train_run(folder / "parts", "null", *own, f"trainer.max_steps={steps}", f"resume={experiment}")
    losses = [[row["train_loss"] for row in _rows(run) if row["train_loss"]] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert float(losses[0][2]) < float(losses[0][1]) < float(losses[0][0])


def _rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
