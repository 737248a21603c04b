"""Several processes train as one does: the same losses, gradient norms and weights, whoever holds what."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from flashtrain.config import build, to_dict
from flashtrain.config.resume import resumed
from flashtrain.training.run import run

from ..conftest import go_on, metrics
from .conftest import check_equal, train

SHORT = ["trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.checkpoint_every_n_steps=4"]
SHORT += ["model.num_heads=4", "trainer.val_tokens=224"]  # 7 sequences: not the same number for all
DOCUMENTS = ("data.document_borders=true", "data.packing=whole")
BLOCKS = ("attention=block_sparse", "attention.layout.name=local_global", "attention.layout.block=64")
BLOCKS = (*BLOCKS, "seq_len=256", "trainer.batch_tokens=512", "trainer.micro_batch_tokens=256")
CONTEXT = ("trainer=context_parallel", "attention.backend=standard")

CASES = {
    "ddp_with_dropout": (2, ("model.dropout=0.1", "trainer=ddp")),
    "ddp_of_four": (4, ("trainer=ddp", *DOCUMENTS)),
    "ddp_with_muon": (2, ("trainer=ddp", "optimizer=muon", "data.recall_share=0.3")),
    "fsdp_with_dropout": (2, ("model.dropout=0.1", "trainer=fsdp", "optimizer.ema_decay=0.9", "memory=full")),
    "fsdp_of_four": (4, ("trainer=fsdp", *DOCUMENTS, "model.tie_embeddings=false", "optimizer.clip_norm=0.5")),
    "fsdp_in_groups": (4, ("trainer=fsdp", "trainer.shard=2", *DOCUMENTS, "trainer.micro_batch_tokens=32")),
    "ring": (2, (*CONTEXT, "model.positions=learned", "memory=selective")),
    "ring_with_ddp": (2, (*CONTEXT, "trainer.strategy=ddp", *DOCUMENTS, "model.positions=rope")),
    "ring_with_window": (4, (*CONTEXT, "attention.window=9", "model.positions=rope")),
    "ring_on_a_mesh": (4, (*CONTEXT, "trainer.context=2", *DOCUMENTS)),
    "ring_in_groups": (4, (*CONTEXT, "trainer.context=4", "trainer.shard=2", *DOCUMENTS)),
    "ring_over_blocks": (2, (*CONTEXT, *BLOCKS)),
    "ulysses": (2, (*CONTEXT, "trainer.context_method=ulysses", *DOCUMENTS)),
    "ulysses_on_a_mesh": (4, (*CONTEXT, "trainer.context_method=ulysses", "trainer.context=2", "memory=full")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_several_processes_give_the_losses_and_weights_of_one(case, make_config, ranks, tmp_path, float64):
    size, changes = CASES[case]
    alone = [
        change
        for change in changes
        if not change.startswith(("trainer=", "trainer.strategy", "trainer.context", "trainer.shard"))
    ]
    assert run(make_config(*SHORT, *alone, "run_id=alone"), []) == 0
    together = make_config(*SHORT, f"trainer.devices={size}", *changes, "run_id=together")
    assert ranks(size).call(train, together, []) == [0] * size
    check_equal(tmp_path / "runs" / "alone", tmp_path / "runs" / "together", 4)


def test_a_run_goes_on_with_another_number_of_processes(make_config, ranks, tmp_path, float64):
    steps = ["trainer.max_steps=9", "trainer.checkpoint_every_n_steps=3", "trainer.keep_checkpoints=9"]
    steps += ["optimizer.ema_decay=0.9", "trainer.val_every_n_steps=3"]
    runs = tmp_path / "runs"
    assert run(make_config(*steps, "run_id=alone"), []) == 0
    two = make_config(*steps, "trainer=fsdp", "trainer.devices=2", "run_id=together")
    assert ranks(2).call(train, two, []) == [0, 0]
    _cut(runs / "together", 3)
    raw, told = resumed({**to_dict(two), "resume": "together", "trainer": {"devices": 4}}, ["trainer.devices=4"])
    assert told == ["trainer.devices: 2 -> 4"]
    assert ranks(4).call(train, build(raw), told) == [0] * 4
    _cut(runs / "together", 6)
    assert go_on(tmp_path, "together", "trainer.devices=1") == 0
    check_equal(runs / "alone", runs / "together", 9)
    one, other = (torch.load(runs / name / "checkpoints" / "step-00000009.ckpt") for name in ("alone", "together"))
    torch.testing.assert_close(other["average"], one["average"], rtol=1e-9, atol=1e-9)


def test_images_are_shared_too(image_config, ranks, tmp_path, float64):
    changes = ["trainer.max_steps=2", "images.val_images=22", "model.dropout=0.1", "trainer.micro_batch_tokens=2k"]
    assert run(image_config(*changes, "run_id=alone"), []) == 0
    together = image_config(*changes, "trainer.devices=2", "run_id=together")
    assert ranks(2).call(train, together, []) == [0, 0]
    # The encoder's sinusoids and grey levels are float32.
    check_equal(tmp_path / "runs" / "alone", tmp_path / "runs" / "together", 2, 1e-5)


def test_the_loss_by_position_counts_each_token_once(make_config, ranks, tmp_path):
    changes = [*SHORT, "trainer.val_by_position=true", "attention.backend=standard", *DOCUMENTS]
    assert run(make_config(*changes, "run_id=alone"), []) == 0
    shared = ["trainer=context_parallel", "trainer.context=2", "trainer.devices=4"]
    together = make_config(*changes, *shared, "run_id=together")
    assert ranks(4).call(train, together, [], torch.float32) == [0] * 4
    check_equal(tmp_path / "runs" / "alone", tmp_path / "runs" / "together", 4, 1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "context_parallel"])
def test_recall_counts_each_asked_token_once(how, make_config, ranks, tmp_path, float64):
    # Batches of three rows, the last of which is filled up.
    changes = [*SHORT, "trainer.val_recall=true", "attention.backend=standard", "seq_len=256"]
    changes += ["trainer.batch_tokens=1536", "trainer.micro_batch_tokens=768", "optimizer.lr=0.01"]
    assert run(make_config(*changes, "run_id=alone"), []) == 0
    together = make_config(*changes, f"trainer={how}", "trainer.devices=2", "run_id=together")
    assert ranks(2).call(train, together, []) == [0, 0]
    check_equal(tmp_path / "runs" / "alone", tmp_path / "runs" / "together", 4)
    last = metrics(tmp_path / "runs" / "together")[-1]
    assert all(float(last[name]) > 0 for name in last if "recall" in name), last


def test_all_processes_leave_one_log_and_one_folder(make_config, ranks, tmp_path):
    together = make_config(*SHORT, "trainer.devices=2", "run_id=together")
    assert ranks(2).call(train, together, []) == [0, 0]
    folder = tmp_path / "runs" / "together"
    assert [path.name for path in folder.parent.iterdir()] == ["together"]
    assert (folder / "train.log").read_text().count("finished after 4 steps") == 1
    assert not list(folder.glob("config.*.yaml"))
    assert len(metrics(folder)) == 4


def _cut(folder: Path, step: int) -> None:
    """As if the run had been stopped after that step."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.split("-")[1]) > step:
            path.unlink()
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
