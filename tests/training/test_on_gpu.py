"""What only a GPU can show of a training step."""

from __future__ import annotations

import pytest
import torch

from flashtrain.training import run as run_module

from .conftest import figures, go_on, summary
from .waiting import refuse_waiting

pytestmark = pytest.mark.gpu

ON_GPU = ("trainer.accelerator=cuda", "model.head_dim=16", "trainer.sample_tokens=0")


SPARSE = (
    "attention=block_sparse", "attention.layout.block=64", "attention.layout.window=0", "attention.dense_every=2",
    "seq_len=256", "trainer.batch_tokens=1k", "trainer.micro_batch_tokens=512",
)  # fmt: skip


@pytest.mark.parametrize(
    "attention",
    [(), ("trainer.micro_batch_tokens=256",), SPARSE, (*SPARSE, "trainer.compile=true")],
    ids=["dense", "recorded", "sparse", "compiled"],
)
@pytest.mark.parametrize("borders", ["false", "true"])
def test_a_steady_step_never_waits_for_the_gpu(make_config, tmp_path, monkeypatch, borders, attention):
    refuse_waiting(monkeypatch)
    config = make_config(
        *ON_GPU, "run_id=steady", f"data.document_borders={borders}", "trainer.log_every_n_steps=6",
        "trainer.val_every_n_steps=12", "trainer.checkpoint_every_n_steps=12", *attention,
    )  # fmt: skip
    try:
        assert run_module.run(config, []) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert summary(tmp_path / "runs" / "steady")["attention_backend"] in ("hopper", "portable")


def test_two_deterministic_runs_are_equal_bit_for_bit(make_config, tmp_path):
    for name in ("one", "two"):
        changes = (f"run_id={name}", "trainer.deterministic=true", "model.dropout=0.1")
        assert run_module.run(make_config(*ON_GPU, *changes), []) == 0
    assert figures(tmp_path / "runs" / "one") == figures(tmp_path / "runs" / "two")


def test_a_deterministic_run_stopped_and_resumed_is_equal_bit_for_bit(make_config, tmp_path):
    changes = ("trainer.deterministic=true", "model.dropout=0.1", "trainer.val_every_n_steps=12")
    assert run_module.run(make_config(*ON_GPU, *changes, "run_id=straight"), []) == 0
    assert run_module.run(make_config(*ON_GPU, *changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert summary(tmp_path / "runs" / "cut")["steps"] == 1
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = figures(tmp_path / "runs" / "straight"), figures(tmp_path / "runs" / "cut")
    assert cut[1:] == straight[1:]  # the stop itself validates, which is one figure more in row 1
    assert [value for value in cut[0] if value in straight[0]] == [value for value in straight[0] if value]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_step_on_text_as_one_graph_equals_launched_steps_and_resumes_to_the_same_bits(
    make_config, tmp_path, compiled
):
    changes = (
        *ON_GPU, "trainer.deterministic=true", f"trainer.compile={compiled}", "model.dropout=0.1",
        "trainer.micro_batch_tokens=256", "data.recall_share=0.5",
    )  # fmt: skip
    assert run_module.run(make_config(*changes, "trainer.cuda_graph=false", "run_id=launched"), []) == 0
    assert run_module.run(make_config(*changes, "run_id=graph"), []) == 0
    assert "a step is one CUDA graph" in (tmp_path / "runs" / "graph" / "train.log").read_text()
    assert run_module.run(make_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    launched, graph, cut = (figures(tmp_path / "runs" / name) for name in ("launched", "graph", "cut"))
    assert graph == launched
    assert cut[1:] == launched[1:]


IMAGES_ON_GPU = (
    "trainer.accelerator=cuda", "trainer.micro_batch_tokens=8k", "trainer.max_steps=24", "model.dropout=0.1",
    "optimizer.ema_decay=0.9", "schedule.warmup_steps=8", "trainer.val_every_n_steps=11",
)  # fmt: skip


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_step_as_one_graph_equals_launched_steps_and_resumes_to_the_same_bits(image_config, tmp_path, compiled):
    """Schedule, dropout, running mean and validations included."""
    changes = (*IMAGES_ON_GPU, "trainer.deterministic=true", f"trainer.compile={compiled}")
    assert run_module.run(image_config(*changes, "trainer.cuda_graph=false", "run_id=launched"), []) == 0
    assert run_module.run(image_config(*changes, "trainer.cuda_graph=true", "run_id=graph"), []) == 0
    assert run_module.run(image_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    assert "a step is one CUDA graph" in (tmp_path / "runs" / "graph" / "train.log").read_text()
    launched, graph, cut = (figures(tmp_path / "runs" / name) for name in ("launched", "graph", "cut"))
    assert graph == launched
    assert cut[1:] == launched[1:]


SOME_LOCAL = (
    "attention=block_sparse", "attention.layout.name=tiles_2d", "attention.alternate_with=[{name:dense}]",
    "classifier.token_order=tiles", "model.num_layers=2",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [("optimizer=muon",), ("optimizer=adamw",), SOME_LOCAL], ids=["muon", "adamw", "some layers local"]
)
def test_a_recorded_step_never_waits_for_the_gpu_and_learns(image_config, tmp_path, monkeypatch, kind):
    refuse_waiting(monkeypatch)
    changes = (
        *kind, "trainer.log_every_n_steps=6", "trainer.checkpoint_every_n_steps=12", "trainer.cuda_graph=true",
        "trainer.compile=false",
    )  # fmt: skip
    try:
        assert run_module.run(image_config(*IMAGES_ON_GPU, *changes, "run_id=steady"), []) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [float(row[2]) for row in figures(tmp_path / "runs" / "steady") if row[2]]
    assert losses[-1] < losses[0]
    assert "a step is one CUDA graph" in (tmp_path / "runs" / "steady" / "train.log").read_text()
