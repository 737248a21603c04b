"""What a run is put together from: its folder, its work, Lightning's loop."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from flashtrain.config import Config
from flashtrain.training.classification import ClassificationWork
from flashtrain.training.distributed.processes import Processes
from flashtrain.training.distributed.strategy import OneOfSeveral, ReadsEither
from flashtrain.training.language import LanguageWork
from flashtrain.training.run_folder import RunFolder
from flashtrain.training.sequence_task import SequenceWork

Work = LanguageWork | ClassificationWork | SequenceWork


def open_folder(config: Config, processes: Processes) -> RunFolder:
    """The run's folder, which the first process makes or finds for all.

    Raises:
        ValueError: a new run's folder exists, or a resumed one's does not; the first process says which.
    """
    run_id, problem = "", ""
    if processes.is_first:
        try:
            folder = RunFolder.reopen(config.runs_dir, config.resume) if config.resume else RunFolder.create(config)
            run_id = folder.run_id
        except ValueError as error:
            problem = str(error)
    try:
        run_id, problem = processes.same((run_id, problem))
    except RuntimeError:  # some ended meanwhile, such as by a signal before they heeded any
        if not run_id:
            raise
        return folder  # in which the run will say so, or that it was stopped too
    if problem:
        processes.leave(together=True)
        raise ValueError(problem if processes.is_first else f"rank {processes.rank}: the run cannot start")
    return RunFolder(Path(config.runs_dir) / run_id, run_id)


def doubts(config: Config, step: int) -> Iterator[str]:
    """What is allowed and yet hardly meant, a line each; `step` is the one that the run goes on behind."""
    steps, warmup = config.trainer.max_steps, config.schedule.warmup_steps
    if warmup > steps:
        yield (
            f"schedule.warmup_steps={warmup} is more than trainer.max_steps={steps}: the learning rate never reaches "
            "its peak"
        )
    taken = config.sequences_per_step * config.seq_len
    if config.task == "language" and taken != config.trainer.batch_tokens:
        yield (
            f"trainer.batch_tokens={config.trainer.batch_tokens} is no multiple of seq_len={config.seq_len}: a step "
            f"takes {taken} tokens"
        )
    if config.plan.gpu is not None:
        yield f"plan.gpu={config.plan.gpu} is for plan.only=true: this run's forecast is for the machine it is on"
    if step > steps:
        yield f"trainer.max_steps={steps}: the run has made {step} steps already; a larger number lets it go on"


def work_of(config: Config, run_config: Config, processes: Processes) -> Work:
    """What the run trains on, and for what; `config` is that of the present stage."""
    if config.task == "language":
        return LanguageWork(config, processes)
    if config.sequences is None:
        return ClassificationWork(config, run_config, processes.share)
    return SequenceWork(config, processes.share)


def make_trainer(
    config: Config, device: torch.device, precision: str, callbacks: list[pl.Callback], processes: Processes
) -> pl.Trainer:
    """Lightning's loop with everything that it would do by itself and we do better switched off."""
    warnings.filterwarnings("ignore", module="lightning.*")
    # Attention asks once what the device can, which does not change while a model is compiled.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`-wrapped function")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    several: dict[str, Any] = {}
    if processes.size > 1:
        several["strategy"] = OneOfSeveral(device, processes, config.trainer.checkpoint_format == "sharded")
    return pl.Trainer(
        accelerator=device.type,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        deterministic=config.trainer.deterministic,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        # Lightning shall not look for other processes by itself, nor requeue jobs of Slurm.
        plugins=[LightningEnvironment(), ReadsEither()],
        **several,
    )
