"""Runs on token sequences: the same promises as for images, and a padding that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import Config, build
from flashtrain.config.build import ConfigError
from flashtrain.data.listops import TOKENS, evaluate
from flashtrain.data.sequences import SequenceSet
from flashtrain.training.run import run
from flashtrain.training.sequence_task import SequenceTask

from .conftest import ROOT, changed, figures, go_on, summary

SMALL = [
    "experiment=lra_listops", "seq_len=32", "model.hidden_size=32", "model.num_layers=1", "logger=csv",
    "trainer.accelerator=cpu", "trainer.batch_tokens=256", "trainer.micro_batch_tokens=128", "trainer.max_steps=8",
    "trainer.val_every_n_steps=8", "trainer.checkpoint_every_n_steps=4", "trainer.log_every_n_steps=1",
    "schedule.warmup_steps=2", "sequences.num_workers=0", "optimizer.lr=1e-2",
]  # fmt: skip


def lines(draw: np.random.Generator, count: int) -> str:
    """A file of the Arena's with short lists."""
    rows = ["Source\tTarget"]
    for _ in range(count):
        tokens = ["[MAX", *map(str, draw.integers(0, 10, draw.integers(2, 29))), "]"]
        rows.append(f"( {' '.join(tokens)} )\t{evaluate([TOKENS.index(token) for token in tokens])}")
    return "\n".join(rows) + "\n"


@pytest.fixture
def sequence_config(tmp_path: Path) -> Callable[..., Config]:
    """The configuration of a small run on lists from files, with changes."""
    folder, draw = tmp_path / "lists", np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", 40), ("val", 9), ("test", 11)):
        (folder / f"basic_{part}.tsv").write_text(lines(draw, count))
    base = [*SMALL, f"runs_dir={tmp_path / 'runs'}", f"sequences.prepared_dir={tmp_path / 'prepared'}"]
    base.append(f"sequences.path={folder}")

    def make(*changes: str) -> Config:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            composed = compose("config", changed(base, *changes))
        return build(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]

    return make


def test_a_run_is_tested_at_its_end_and_resumes_to_the_same_bits(sequence_config, tmp_path):
    assert run(sequence_config("run_id=straight"), []) == 0
    said = summary(tmp_path / "runs" / "straight")
    assert (said["status"], said["protocol"]) == ("finished", "fixed set")
    assert 11 * said["test_accuracy"] == pytest.approx(round(11 * said["test_accuracy"]))
    assert said["test_loss"] > 0 and "test_accuracy_error" in said and "val_accuracy_error" in said
    assert run(sequence_config("run_id=cut", "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = (figures(tmp_path / "runs" / name) for name in ("straight", "cut"))
    assert cut[1:] == straight[1:]
    assert float(straight[-1][2]) < float(straight[0][2])


def test_a_longer_padding_changes_no_logit(sequence_config):
    config = sequence_config("model.dropout=0")
    torch.manual_seed(0)
    task = SequenceTask(config, config.classifier, "listops").double()
    task.model.reset_parameters()
    source = SequenceSet.of([np.full(n, n, np.uint8) for n in (3, 9, 15)], [0, 1, 2])
    short, long = (task.logits(source.read(np.arange(3), seq_len)) for seq_len in (16, 32))
    torch.testing.assert_close(short, long)
    assert (short[0] - short[1]).abs().max() > 1e-4, "the guard: samples differ"


def test_pairs_are_told_apart_by_both_texts_and_their_order(sequence_config):
    config = sequence_config("classifier.num_classes=2", "model.dropout=0")
    torch.manual_seed(0)
    task = SequenceTask(config, config.classifier, "retrieval")
    texts = [np.arange(1, n, dtype=np.uint16) for n in (9, 14, 20)]
    pairs = ((0, 1), (1, 0), (0, 2), (0, 1))
    source = SequenceSet.of([texts[i] for pair in pairs for i in pair], [0] * 4)
    logits = task.logits(source.read(np.arange(4), 32))
    assert logits.shape == (4, 2)
    assert torch.allclose(logits[0], logits[3], atol=1e-6)
    assert (logits[0] - logits[1]).abs().max() > 1e-6 and (logits[0] - logits[2]).abs().max() > 1e-6


def test_a_run_on_pairs_finishes(sequence_config, tmp_path):
    folder = tmp_path / "aan"
    folder.mkdir()
    rows = "".join(f"{i % 2}\ta\tb\t{'left' * i}\t{'right' * (i % 3)}\n" for i in range(12))
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_text(rows)
    changes = ("experiment=lra_retrieval", f"sequences.path={folder}", "trainer.max_steps=3", "run_id=pairs")
    assert run(sequence_config(*changes), []) == 0
    assert summary(tmp_path / "runs" / "pairs")["corpus"]["name"] == "AAN"


def test_what_does_not_fit_is_refused_by_name(sequence_config, tmp_path):
    assert run(sequence_config("classifier.num_classes=2", "run_id=wrong"), []) == 1
    assert "sequences.source=listops has 10 classes" in (tmp_path / "runs" / "wrong" / "train.log").read_text()
    with pytest.raises(ConfigError, match=r"sequences\.path=null: sequences\.source=text reads files"):
        sequence_config("experiment=lra_text", "sequences.path=null")
    with pytest.raises(ConfigError, match=r"images: is for images, and sequences\.source=listops"):
        sequence_config("images=pathfinder")
    with pytest.raises(ConfigError, match=r"sequences: a section for task=classification"):
        sequence_config("task=language")


@pytest.mark.parametrize("name", ["listops", "text", "retrieval", "image"])
def test_the_published_recipes_are_configurations(sequence_config, name):
    base = (f"experiment=lra_{name}", "sequences.path=x")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(OmegaConf.to_container(compose("config", [*base]), resolve=True))  # type: ignore[arg-type]
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.mlp_size, model.dropout) == (2, 64, 2, 128, 0.1)
    assert config.sequences_per_step == {"image": 256}.get(name, 32)
    assert config.sequences_per_micro_batch == config.sequences_per_step
