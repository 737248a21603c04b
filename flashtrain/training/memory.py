"""Whether the activations of a step fit, or are computed again in the backward pass."""

from __future__ import annotations

import torch

from flashtrain.config import Config
from flashtrain.training.hardware import device_memory_bytes

# Share of the device's memory that activations may take before blocks are checkpointed. On the CPU the machine has
# other things to hold as well.
_SHARE = {"cuda": 0.7, "cpu": 0.25}


def activation_bytes(config: Config, precision: str) -> int:
    """What autograd keeps of one micro-batch, without checkpointing: an estimate from the shapes.

    A block keeps about 16 vectors of hidden_size and 3 of mlp_size a token (inputs and outputs of its norms, linear
    layers, activation and attention).
    """
    model = config.model
    mlp = model.mlp_size or 4 * model.hidden_size
    width = 4 if precision == "32-true" else 2
    tokens = config.sequences_per_micro_batch * config.seq_len
    return tokens * model.num_layers * (16 * model.hidden_size + 3 * mlp) * width


def checkpoint_blocks(config: Config, precision: str, device: torch.device) -> bool:
    """True if blocks are computed again in the backward pass: as configured, or (`auto`) where they would not fit."""
    if config.memory.checkpointing != "auto":
        return config.memory.checkpointing == "full"
    return activation_bytes(config, precision) > _SHARE[device.type] * device_memory_bytes(device)
