"""The judge of language models: its figures are those of the model, and a model that recalls is found to."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import evaluate
import numpy as np
import plot_evaluations
import pytest
import torch
import torch.nn.functional as F
import wandb
from measuring.language import Judge, passkey_grid, recall_rows, sliding_perplexity
from measuring.reading import load_reader

from flashtrain.data.recall import IGNORE, Example, induction

from ..training.wandb_file import read_offline_run
from .test_generate import fit

CPU = torch.device("cpu")
QUICK = ("--depths", "3", "--repeats", "2", "--tokens", "1500", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return fit(tmp_path_factory.mktemp("language"), "trained", "seq_len=256", "trainer.max_steps=12")


@pytest.fixture(scope="module")
def reader(trained):
    return load_reader(trained, None, None, CPU)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 257, 700)


def judged(tmp_path, *arguments):
    out = tmp_path / "result.json"
    assert evaluate.main([*map(str, arguments), *QUICK, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit):
        evaluate.main([*map(str, arguments), "--device", "cpu"])
    return capsys.readouterr().err


def test_a_run_gets_all_figures_with_how_they_were_made_and_a_picture(trained, tmp_path, capsys):
    result = judged(tmp_path, trained, "--plot", tmp_path / "picture.png")
    assert result["command"].startswith("python scripts/evaluate.py trained --depths 3")
    assert result["run"]["step"] == 12
    assert {"torch", "python"} <= set(result["versions"])
    assert "commit" in result
    assert result["text"]["of_the_run"] is True
    assert [row["length"] for row in result["induction"]] == [32, 64, 128, 256]
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    told = capsys.readouterr().out
    assert "passkeys found" in told
    assert f"{result['perplexity']['perplexity']:.4g}" in told


@pytest.mark.parametrize(("window", "stride"), [(64, 16), (64, 64), (100, 33), (256, 100), (256, 255)])
def test_each_target_is_scored_once_in_the_first_window_that_reaches_it(reader, text, window, stride):
    expected, scored = 0.0, 0
    for start in range(0, len(text), stride):
        end = min(start + window, len(text) - 1)
        if end <= scored:
            break
        with torch.no_grad():
            hidden = reader.model(torch.from_numpy(text[None, start:end]), reader.plan_for(end - start, end - start))
            logits = reader.model.logits(hidden)[0]
        targets = torch.from_numpy(text[start + 1 : end + 1])
        expected += float(F.cross_entropy(logits, targets, reduction="none")[scored - start :].sum())
        scored = end
    found = sliding_perplexity(Judge(reader, half=False), text, window, stride)
    assert found["tokens"] == scored == len(text) - 1
    assert found["loss"] == pytest.approx(expected / scored, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_a_stride_that_leaves_targets_out_is_refused(reader, text):
    with pytest.raises(ValueError, match="--stride 65"):
        sliding_perplexity(Judge(reader, half=False), text, 64, 65)


class Knowing(Judge):
    """Reads as a model that copies: the token that followed the newest earlier occurrence of the last two."""

    def read(self, tokens, targets):
        right = np.zeros(targets.shape, dtype=bool)
        for row, column in np.argwhere(targets != IGNORE):
            seen = tokens[row, : column + 1]
            for size in (6, 2, 1):
                before = [i for i in range(size, column + 1) if (seen[i - size : i] == seen[column + 1 - size :]).all()]
                if before:
                    right[row, column] = seen[before[-1]] == targets[row, column]
                    break
        return torch.where(torch.from_numpy(right), 0.1, 2.0), torch.from_numpy(right), torch.from_numpy(targets)


def test_a_model_that_copies_is_seen_to_find_passkeys_and_to_recall(reader):
    knowing = Knowing(reader, half=False)
    grid = passkey_grid(knowing, [200, 256], depths=3, repeats=2, seed=1)
    assert [(row["length"], row["depth"]) for row in grid] == [(n, d) for n in (200, 256) for d in (0.0, 0.5, 1.0)]
    assert all(row["found"] == row["of"] == 2 for row in grid)
    rows = recall_rows(knowing, [100], induction, 5000, 3, 1)
    assert rows[0]["accuracy"] > 0.95


def test_a_model_that_knows_nothing_finds_nothing(reader):
    grid = passkey_grid(Judge(reader, half=False), [256], depths=2, repeats=3, seed=1)
    assert [row["found"] for row in grid] == [0, 0]
    assert all(row["loss"] > 1 for row in grid)
    (row,) = recall_rows(Judge(reader, half=False), [128], induction, 257, 4, 1)
    assert row["accuracy"] < 0.1


def test_batches_and_single_sequences_give_the_same(reader):
    judge = Judge(reader, half=False)
    examples = [induction(257, 64, seed) for seed in range(5)]
    alone = [judge.examples([Example(*each)])[0] for each in examples]
    for one, other in zip(judge.examples(examples), alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_longer_contexts_are_read_as_chosen_and_refused_otherwise(trained, tmp_path, capsys):
    tasks = ("--tasks", "position,induction", "--context", "512")
    told = refusal(capsys, trained, *tasks)
    assert "the model's positions reach 256 tokens" in told
    assert "--extend (extrapolate, linear, ntk, yarn, llama3)" in told
    result = judged(tmp_path, trained, *tasks, "--extend", "yarn")
    assert (result["context"], result["extended"], result["trained_at"]) == (512, "yarn", 256)
    assert result["position"][-1]["last"] == 511
    assert "passkey" not in result
    plain = judged(tmp_path, trained, *tasks, "--extend", "extrapolate")
    assert plain["position"] != result["position"]


def test_tables_go_to_the_runs_own_wandb_run_if_asked_for(trained, tmp_path, monkeypatch, capsys):
    assert "--track: " in refusal(capsys, trained, "--track")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "tracked"
    shutil.copytree(trained, run)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("name: csv", "name: wandb"))
    (run / "wandb_id").write_text("abcd1234")
    result = judged(tmp_path, run, "--tasks", "perplexity,induction", "--track")
    wandb.teardown()  # as when the script ends: waits until the file is written
    written = read_offline_run(run)
    assert written.run_id == "abcd1234"
    (row,) = written.history
    assert row["evaluation_256/perplexity"] == pytest.approx(result["perplexity"]["perplexity"])
    assert "evaluation_256/induction" in row


def test_results_are_drawn_beside_each_other(trained, tmp_path, capsys):
    files = []
    for how in ("linear", "yarn"):
        result = judged(tmp_path, trained, "--tasks", "position,passkey", "--context", "512", "--extend", how)
        files.append(tmp_path / f"{how}.json")
        files[-1].write_text(json.dumps(result))
    assert plot_evaluations.main([*map(str, files), "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").stat().st_size > 10_000
    (tmp_path / "other.json").write_text("[]")
    for arguments, told in (
        ((files[0], "--labels", "a", "b"), "2 labels for 1 files"),
        ((tmp_path / "other.json",), "not what scripts/evaluate.py writes"),
    ):
        with pytest.raises(SystemExit):
            plot_evaluations.main([*map(str, arguments), "--out", str(tmp_path / "none.png")])
        assert told in capsys.readouterr().err


def test_wrong_arguments_are_named(trained, capsys, tmp_path):
    assert "--tasks cheese: there are perplexity" in refusal(capsys, trained, "--tasks", "cheese")
    assert "--lengths 300: longer than the context of 256" in refusal(capsys, trained, "--lengths", "300")
    assert "--count: is for image classifiers" in refusal(capsys, trained, "--count", "5")
    assert "a passkey needs at least" in refusal(capsys, trained, "--tasks", "passkey", "--lengths", "64")
    assert "--plot: the result has neither" in refusal(
        capsys, trained, "--tasks", "induction", "--plot", tmp_path / "picture.png"
    )


def test_a_text_of_ones_own_is_read(trained, tmp_path):
    (tmp_path / "own.txt").write_text("the cat 3 sat on the mat. " * 40)
    result = judged(tmp_path, trained, "--text", tmp_path / "own.txt", "--tasks", "perplexity,position")
    assert result["text"] == {"source": "own.txt", "tokens": 1039}
    losses = {row["first"]: row["loss"] for row in result["position"]}
    assert losses[128] < losses[0]
