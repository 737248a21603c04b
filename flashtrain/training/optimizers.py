"""The optimiser: AdamW, or Muon for the blocks' matrices beside it; a step whose gradient is not finite is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flashtrain.config.schema import OptimizerConfig
from flashtrain.models.gpt import Attention, Block
from flashtrain.training.half_adamw import HalfAdamW
from flashtrain.training.muon import Muon


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The configured optimiser over the model's parameters.

    Matrices (and the embedding tables) decay, vectors (biases, norm weights) do not. The groups are in the order of
    the parameters' names, so that a resumed run finds each state where it left it.
    """
    parameters = {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}
    matrices = _block_matrices(model) if config.name == "muon" else {}
    rest = {name: p for name, p in parameters.items() if name not in matrices}
    decayed = [p for p in rest.values() if p.dim() >= 2]
    undecayed = [p for p in rest.values() if p.dim() < 2]
    optimizer: torch.optim.Optimizer
    if config.name == "muon":
        assert config.matrix_lr is not None
        optimizer = Muon(
            [(parameters[name], rows) for name, rows in sorted(matrices.items())], decayed, undecayed,
            matrix_lr=config.matrix_lr, momentum=config.momentum, lr=config.lr, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay,
        )  # fmt: skip
    else:
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if config.state == "bfloat16":
            optimizer = HalfAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        else:
            optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return optimizer


def _block_matrices(model: nn.Module) -> dict[str, list[int] | None]:
    """Names of the linear weights inside blocks, with the rows that are matrices of their own: q, k and v."""
    found: dict[str, list[int] | None] = {}
    for path, block in model.named_modules():
        if not isinstance(block, Block):
            continue
        found |= {f"{path}.{name}.weight": None for name, part in block.named_modules() if isinstance(part, nn.Linear)}
        for name, part in block.named_modules():
            if isinstance(part, Attention):
                found[f"{path}.{name}.qkv.weight"] = [heads * part.head_dim for heads in part.heads]
    return found


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, rate_of: Callable[[float], float]
) -> None:
    """Give every group the rate that `rate_of` makes of its configured peak.

    Rates are float32 scalars beside the parameters, always the same ones: a recorded step reads them there, and fused
    optimisers take no other type. Writing one does not wait for the device.
    """
    for group in optimizer.param_groups:
        peak = config.matrix_lr if group.get("kind") == "muon" else config.lr
        assert peak is not None
        device, rate = group["params"][0].device, group["lr"]
        if not isinstance(rate, Tensor) or rate.device != device:  # new, or from a checkpoint
            group["lr"] = rate = torch.zeros((), device=device)
        rate.fill_(rate_of(peak))


def allow_recording(optimizer: torch.optim.Optimizer) -> None:
    """Tell AdamW whether its next step is recorded: it refuses where it does not know, and warns where it need not."""
    recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = recording


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float | None) -> Tensor:
    """Scale the gradients down to `clip_norm`; returns their norm before that, float32, without a synchronisation."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None], foreach=None)
    if isinstance(norm, DTensor):  # of gradients that are divided among processes: the norm of all of them
        norm = norm.full_tensor()
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, clip_norm, norm)
    return norm


def skip_if_not_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Make the next step change nothing, weights or moments, unless `finite` (a bool scalar on the device).

    Fused optimisers take the flag as `found_inf`, the road that gradient scaling uses; nothing is read back here.
    """
    optimizer.found_inf = finite.logical_not().float()  # type: ignore[attr-defined]
