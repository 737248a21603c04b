"""A running mean of the weights: often better than the newest ones, and free of the last steps' noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class AveragedWeights:
    """Exponential mean of a model's parameters over the optimiser steps.

    The decay of step t (from 1) is min(decay, (1 + t) / (10 + t)), so that the first steps do not keep the random start
    for long. A step that was skipped (its gradient was not finite) still counts: the weights it leaves are finite.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.decay = decay
        self.mean: list[Tensor] | None = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step `step`, counted from 1."""
        if self.mean is None:
            self.mean = [p.detach().clone() for p in self.parameters]
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.parameters], 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the mean inside, and its own weights again afterwards, whatever happens."""
        if self.mean is None:
            yield
            return
        own = [p.detach().clone() for p in self.parameters]
        try:
            self._copy(self.mean)
            yield
        finally:
            self._copy(own)

    def state(self) -> dict[str, Tensor]:
        """The mean by the parameters' names; empty before the first step."""
        return {} if self.mean is None else dict(zip(self.names, self.mean, strict=True))

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a stored state, on the model's device."""
        if state:
            pairs = zip(self.names, self.parameters, strict=True)
            self.mean = [state[name].to(parameter.device, parameter.dtype) for name, parameter in pairs]

    @torch.no_grad()
    def _copy(self, source: list[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, source)
