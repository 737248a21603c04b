"""Memory settings of whole runs: none of them changes what is learned."""

from __future__ import annotations

import gc

import pytest
import torch

from flashtrain.config import ConfigError
from flashtrain.training.run import run

from .conftest import figures, summary
from .waiting import refuse_waiting

SETTINGS = {
    "selective": ("memory=selective",),
    "full": ("memory=full",),
    "offload": ("memory=offload",),
    "selective-offload": ("memory=selective", "memory.offload=true"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_learns_the_same_bit_for_bit_with_every_setting(make_config, tmp_path, name):
    for run_id, changes in (("none", ("memory=none",)), (name, SETTINGS[name])):
        small = ("model.dropout=0.1", "trainer.max_steps=3", "trainer.sample_tokens=0", f"run_id={run_id}")
        assert run(make_config(*changes, *small), []) == 0
    assert figures(tmp_path / "runs" / name) == figures(tmp_path / "runs" / "none")


def test_a_run_with_mlps_in_pieces_learns_the_same(make_config, tmp_path):
    for run_id, tokens in (("whole", 0), ("pieces", 24)):
        small = ("memory=selective", "trainer.max_steps=3", "trainer.sample_tokens=0", f"run_id={run_id}")
        assert run(make_config(*small, f"memory.mlp_chunk_tokens={tokens}"), []) == 0
    whole, pieces = figures(tmp_path / "runs" / "whole"), figures(tmp_path / "runs" / "pieces")
    assert [float(row[2]) for row in pieces] == pytest.approx([float(row[2]) for row in whole], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("memory=none", "memory.offload=true"), "write memory.checkpointing=selective or full"),
        (("memory.loss=liger", "trainer.accelerator=cpu"), "write memory.loss=chunked"),
        (("schedule.length_steps=4", "schedule.first_length=32"), "write less, or schedule.length_steps=0"),
    ],
)
def test_settings_that_cannot_be_are_told_before_the_run(make_config, changes, told):
    with pytest.raises(ConfigError, match=told):
        make_config(*changes)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_on_a_gpu_each_setting_holds_less_learns_the_same_and_never_waits(make_config, tmp_path, monkeypatch, compiled):
    refuse_waiting(monkeypatch)
    common = (
        "trainer.accelerator=cuda", "model.num_layers=12", "model.hidden_size=256", "model.head_dim=64", "seq_len=4k",
        "trainer.batch_tokens=16k", "trainer.micro_batch_tokens=16k", "trainer.sample_tokens=0", "trainer.max_steps=10",
        "trainer.val_every_n_steps=100", "trainer.checkpoint_every_n_steps=100", f"trainer.compile={compiled}",
    )  # fmt: skip
    peaks, losses = {}, {}
    for name, changes in {"none": ("memory=none",), **SETTINGS}.items():
        gc.collect()  # the run before this one is no part of its peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            assert run(make_config(*common, *changes, f"run_id={name}"), []) == 0
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks[name] = summary(tmp_path / "runs" / name)["peak_memory_gib"]
        losses[name] = [float(row[2]) for row in figures(tmp_path / "runs" / name) if row[2]]
    assert peaks["none"] > peaks["selective"] > peaks["full"] > peaks["offload"]
    assert peaks["selective"] > peaks["selective-offload"]
    for name in SETTINGS:
        assert losses[name] == pytest.approx(losses["none"], rel=0.02)
