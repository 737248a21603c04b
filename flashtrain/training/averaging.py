"""A running mean of the weights: often better than the newest ones, and free of the last steps' noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flashtrain.training.distributed.replicas import divided_like, own_part, put_away


class AveragedWeights:
    """Exponential mean of a model's parameters over the optimiser steps.

    The decay of step t (from 1) is min(decay, (1 + t) / (10 + t)), so that the first steps do not keep the random start
    for long. A step that was skipped (its gradient was not finite) still counts: the weights it leaves are finite.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.model = model
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.decay = decay
        self.mean: list[Tensor] | None = None
        self._share: Tensor | None = None  # of the next weights, on the device, where a recorded step reads it

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Say which optimiser step comes next, counted from 1; nothing waits for the device."""
        if self._share is None:
            device = self.parameters[0].device
            self._share = torch.zeros((), device=device)
            if self.mean is not None:  # loaded before the model went to its device
                self.mean = [mean.to(device) for mean in self.mean]
        self._share.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def take_in(self) -> None:
        """Take in the weights after the step that `begin` has named."""
        assert self._share is not None, "begin() names the step"
        now = [p.detach() for p in self.parameters]
        if self.mean is None:
            self.mean = [p.clone() for p in now]
            return
        change = torch._foreach_sub(now, self.mean)
        torch._foreach_mul_(change, self._share)
        torch._foreach_add_(self.mean, change)

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
        """Go on from a stored state; `begin` takes it to the model's device, where Lightning brings the model later."""
        if state:
            pairs = zip(self.names, self.parameters, strict=True)
            self.mean = [divided_like(state[name].to(parameter.dtype), parameter) for name, parameter in pairs]

    @torch.no_grad()
    def _copy(self, source: list[Tensor]) -> None:
        put_away(self.model)
        torch._foreach_copy_([own_part(p) for p in self.parameters], [own_part(tensor) for tensor in source])
