"""Recall tasks at validation: the figures are what the model itself takes for likeliest."""

import json

import pytest
import torch

from flashtrain.data.batch import IGNORE
from flashtrain.data.recall import associative_recall, induction, passkey
from flashtrain.interchange import load
from flashtrain.training.recall_hits import COLUMNS
from flashtrain.training.run import run

from .conftest import figures, metrics

# Three rows at once, which do not divide the sixteen.
LONG = ("seq_len=256", "trainer.batch_tokens=768", "trainer.micro_batch_tokens=768", "trainer.sample_tokens=0")
# Large steps towards recall alone, so that some of it is right after a few.
LEARNS = ("trainer.max_steps=8", "optimizer.lr=0.01", "data.recall_share=1", "trainer.val_every_n_steps=8")


@pytest.mark.parametrize("averaged", [False, True])
def test_the_figures_are_the_model_s_own_likeliest_tokens(averaged, make_config, tmp_path):
    more = ("optimizer.ema_decay=0.9",) if averaged else ()
    assert run(make_config(*LONG, *LEARNS, *more, "trainer.val_recall=true", "run_id=recall"), []) == 0
    model, tokenizer = load(tmp_path / "runs" / "recall")  # its averaged weights, where it has such
    examples = {
        "val_recall_passkey": [passkey(tokenizer, 256, seed / 7, seed) for seed in range(8)],
        "val_recall_associative": [associative_recall(257, 256, seed) for seed in range(4)],
        "val_recall_induction": [induction(257, 256, seed) for seed in range(4)],
    }
    row, expected = metrics(tmp_path / "runs" / "recall")[-1], dict[str, float]()
    for name, rows in examples.items():
        tokens, targets = (torch.tensor([list(row[part]) for row in rows]) for part in (0, 1))
        with torch.no_grad():
            likeliest = model.logits(model(tokens)).argmax(dim=-1)
        asked = targets != IGNORE
        expected[name] = float((likeliest == targets)[asked].double().mean())
        assert float(row[name]) == pytest.approx(expected[name]), name
    assert any(expected.values())
    summary = json.loads((tmp_path / "runs" / "recall" / "summary.json").read_text())
    assert summary["val_recall_induction"] == float(row["val_recall_induction"])


def test_recall_changes_neither_the_held_out_loss_nor_the_training(make_config, tmp_path):
    both = ("trainer.val_recall=true", "trainer.val_by_position=true")
    assert run(make_config(*LONG, *both, "run_id=recall"), []) == 0
    assert run(make_config(*LONG, "trainer.val_by_position=true", "run_id=plain"), []) == 0
    recall, plain = tmp_path / "runs" / "recall", tmp_path / "runs" / "plain"
    assert figures(recall) == figures(plain)
    for row, other in zip(metrics(recall), metrics(plain), strict=True):
        assert {name: row[name] for name in row if "val_loss_at" in name} == {
            name: other[name] for name in other if "val_loss_at" in name
        }
        assert all(bool(row[name]) == bool(row["val_loss"]) for name in COLUMNS)
        assert not set(COLUMNS) & set(other)


def test_a_length_without_room_for_passkeys_says_so_once_and_reads_the_rest(make_config, tmp_path):
    assert run(make_config("trainer.val_recall=true", "run_id=short"), []) == 0
    folder = tmp_path / "runs" / "short"
    assert (folder / "train.log").read_text().count("val_recall_passkey stays empty: seq_len=32, and a passkey") == 1
    validated = [row for row in metrics(folder) if row["val_loss"]]
    assert validated
    for row in validated:
        assert [bool(row[name]) for name in COLUMNS] == [False, True, True]
