"""AdamW (Loshchilov and Hutter 2019) whose two moments are bfloat16: half of their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HalfAdamW(torch.optim.Optimizer):
    """As torch.optim.AdamW; each parameter's moments are widened to float32, moved, and rounded again.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as there; `lr` may be a tensor on the parameters' device.

    Attributes:
        found_inf: set by the loop; a scalar that is 1 where the step must change nothing. Read on the device alone.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(parameter.device)
            # PyTorch has given the moments the parameter's type; widened and back they are the same.
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        beta1, beta2 = group["betas"]
        gradient, step = gradient.float(), state["step"] + 1
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        length = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        moved = parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] / (1 - beta1**step) * mean / length
        new = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        for old, value in ((parameter, moved), *((state[name], value) for name, value in new.items())):
            old.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, old, value))
