"""The optimiser: AdamW with weight decay on matrices only, which skips a step whose gradient is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flashtrain.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW over the model's parameters.

    Matrices (and the embedding tables) decay, vectors (biases, norm weights) do not. The groups are in the order of
    the parameters' names, so that a resumed run finds each state where it left it.
    """
    parameters = {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    undecayed = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float | None) -> Tensor:
    """Scale the gradients down to `clip_norm`; returns their norm before that, float32, without a synchronisation."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=None)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm


def skip_if_not_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Make the next step change nothing, weights or moments, unless `finite` (a bool scalar on the device).

    Fused optimisers take the flag as `found_inf`, the road that gradient scaling uses; nothing is read back here.
    """
    optimizer.found_inf = finite.logical_not().float()  # type: ignore[attr-defined]
