"""Muon for the matrices inside the blocks, AdamW for everything else, as one optimiser.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) takes momentum and replaces it by the nearest
matrix whose singular values are all one, by a few Newton-Schulz steps. Here matrices of one shape are one batch, so
that a deep and narrow model is not a thousand small products.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

# Five steps of this odd polynomial push the singular values of a matrix of norm one to within 0.3 of one (same source).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """One optimiser with two kinds of parameters.

    Args:
        matrices: 2-D parameters for Muon, each with the numbers of rows that are matrices of their own ([q, k, v] of a
            fused projection; None for a whole one).
        decayed, undecayed: parameters for AdamW with and without weight decay.
        matrix_lr, momentum: of Muon, whose update of a [rows, columns] matrix is scaled by
            sqrt(max(1, rows / columns)).
        lr, betas, eps: of AdamW. weight_decay: of both.

    A bool or float scalar `found_inf` on the device makes `step` change nothing where it is not zero.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, list[int] | None]],
        decayed: list[nn.Parameter],
        undecayed: list[nn.Parameter],
        *,
        matrix_lr: float,
        momentum: float,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        pairs = list(matrices)
        # `fused` tells PyTorch to load the count of steps onto the parameters' device, where the fused kernel reads it.
        adam = {"kind": "adamw", "betas": betas, "eps": eps, "lr": lr, "fused": True}
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p, _ in pairs], "rows": [rows for _, rows in pairs], "kind": "muon",
                "lr": matrix_lr, "momentum": momentum, "weight_decay": weight_decay,
            },
            {"params": decayed, "weight_decay": weight_decay, **adam},
            {"params": undecayed, "weight_decay": 0.0, **adam},
        ]  # fmt: skip
        super().__init__([group for group in groups if group["params"]], {})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._step_matrices(group)
            else:
                self._step_adamw(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        batches: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for parameter, rows in zip(group["params"], group["rows"], strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            parts = [len(parameter)] if rows is None else rows
            pieces = (x.split(parts) for x in (parameter, parameter.grad, state["momentum"]))
            for part in zip(*pieces, strict=True):
                batches.setdefault(part[0].shape, []).append(part)
        for (rows_of_all, columns), batch in batches.items():
            parameters, gradients, buffers = (list(column) for column in zip(*batch, strict=True))
            before = torch.stack(buffers)
            buffer = torch.lerp(torch.stack(gradients), before, group["momentum"])
            update = orthogonalised(torch.lerp(torch.stack(gradients), buffer, group["momentum"]))
            update *= max(1.0, rows_of_all / columns) ** 0.5 * group["lr"]
            weight = torch.stack(parameters)
            after = weight * (1 - group["lr"] * group["weight_decay"]) - update
            torch._foreach_copy_(parameters, list(self._kept(after, weight)))
            torch._foreach_copy_(buffers, list(self._kept(buffer, before)))

    def _kept(self, after: Tensor, before: Tensor) -> Tensor:
        """`after`, or `before` where the step is to be skipped: chosen on the device."""
        return after if self.found_inf is None else torch.where(self.found_inf.bool(), before, after)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalised(matrices: Tensor) -> Tensor:
    """[batch, rows, columns] -> the same with singular values near one, by Newton-Schulz steps.

    In bfloat16 on a GPU, which is as much precision as the polynomial has; in the input's dtype elsewhere. A matrix of
    zeros stays zero.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (wide if x.shape[1] <= x.shape[2] else wide.mT).to(matrices.dtype)
