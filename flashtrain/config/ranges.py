"""The numbers that each key takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from flashtrain.config.schema import Config

_ABOVE_0 = (
    "seq_len",
    "model.num_layers",
    "model.num_heads",
    "model.hidden_size",
    "model.head_dim",
    "model.mlp_size",
    "model.rope_theta",
    "attention.window",
    "classifier.num_classes",
    "images.side",
    "optimizer.lr",
    "memory.loss_chunk_tokens",
    "trainer.max_steps",
    "trainer.batch_tokens",
    "trainer.micro_batch_tokens",
    "trainer.devices",
    "trainer.context",
    "trainer.timeout",
    "trainer.log_every_n_steps",
    "trainer.val_every_n_steps",
    "trainer.checkpoint_every_n_steps",
    "trainer.keep_checkpoints",
    "trainer.peak_tflops",
)
_AT_LEAST_0 = (
    "model.norm_eps",
    "model.init_std",
    "data.num_workers",
    "images.num_workers",
    "sequences.num_workers",
    "optimizer.eps",
    "optimizer.weight_decay",
)
_FROM_0_TO_1 = ("schedule.decay_fraction", "schedule.min_lr_ratio", "data.recall_share")
_FROM_0_BELOW_1 = ("model.dropout", "data.val_fraction", "optimizer.momentum", "optimizer.betas")


def broken_ranges(config: Config) -> Iterator[str]:
    """One line for each number that its key does not take. What is null or not there takes any."""
    for key in _ABOVE_0:
        value = _value(config, key)
        if value is not None and value <= 0:
            yield f"{key}={value}: must be above 0"
    for key in _AT_LEAST_0:
        value = _value(config, key)
        if value is not None and value < 0:
            yield f"{key}={value}: must be at least 0"
    for key in _FROM_0_TO_1:
        value = _value(config, key)
        if not 0 <= value <= 1:
            yield f"{key}={value}: must lie between 0 and 1"
    for key in _FROM_0_BELOW_1:
        value = _value(config, key)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(0 <= number < 1 for number in numbers):
            yield f"{key}={list(value) if isinstance(value, tuple) else value}: must be at least 0 and below 1"


def _value(config: Config, key: str) -> Any:
    return functools.reduce(lambda section, name: getattr(section, name, None), key.split("."), config)  # type: ignore[arg-type, return-value]
