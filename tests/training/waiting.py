"""Runs in which a steady step must not stop the host."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from flashtrain.training import run as run_module


class _NoSynchronisation(pl.Callback):
    """Makes PyTorch refuse whatever stops the host, from step 4 to step 9."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 4 <= trainer.global_step < 9 else "default")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_rest: Any) -> None:
        if trainer.global_step >= 9:
            torch.cuda.set_sync_debug_mode("default")


def refuse_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the test has the callback above."""
    make_trainer = run_module.make_trainer
    monkeypatch.setattr(
        run_module,
        "make_trainer",
        lambda config, device, precision, callbacks, processes: make_trainer(
            config, device, precision, [_NoSynchronisation(), *callbacks], processes
        ),
    )
