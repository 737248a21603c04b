"""One optimiser step of a language model, as a Lightning module.

A Lightning batch is a whole optimiser step: a list of micro-batches. So the number of targets of the step is known
before its first forward pass, gradients are normalised by it, and no checkpoint ever falls inside an accumulation.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from flashtrain.attention import Causal, Documents, Mask, Plan, SlidingWindow, attention, lower
from flashtrain.config import Config
from flashtrain.data.batch import Batch
from flashtrain.models.gpt import GPT
from flashtrain.models.loss import cross_entropy_sum
from flashtrain.training.optimizers import build_optimizer, clip_gradients, set_learning_rate, skip_if_not_finite
from flashtrain.training.schedules import learning_rate


class LanguageTask(pl.LightningModule):
    """A GPT, its loss and its optimiser step.

    Attributes that callbacks read after a step: `loss` (mean over the step's targets), `grad_norm`, `finite` (device
    scalars), `lr`, `visible_pairs` (of the whole step), `unfinished` (the step was given up half-way).
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        attend = functools.partial(attention, backend=config.attention.backend)
        self.model = GPT(config.model, vocab_size, config.seq_len, attend)
        # Not registered as a submodule: the state's names stay those of the plain model.
        self._forward: tuple[Callable[..., Tensor]] = (self.model,)
        self.give_up: Callable[[], bool] = lambda: False
        self.loss = self.grad_norm = self.finite = torch.zeros(())
        self.lr, self.visible_pairs, self.unfinished = 0.0, 0.0, False

    def compile_model(self) -> None:
        """Compile the forward pass; attention is one node in it, and a graph break is an error."""
        self._forward = (torch.compile(self.model, fullgraph=True, dynamic=False),)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # micro-batches move one at a time

    def training_step(self, micro_batches: Sequence[Batch], batch_index: int) -> None:
        config, step = self.config, self.global_step
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        targets = max(1, sum(batch.num_targets for batch in micro_batches))
        self.visible_pairs, self.unfinished = 0.0, False
        loss = torch.zeros((), device=self.device)
        optimizer.zero_grad(set_to_none=True)
        for index, batch in enumerate(micro_batches):
            if index and self.give_up():
                self.unfinished = True
                optimizer.zero_grad(set_to_none=True)
                return
            # Dropout is a function of (seed, step, micro-batch): a resumed run has no generator state to restore.
            torch.manual_seed(fold_seed(config.seed, step, index))
            part = self.loss_sum(batch) / targets
            self.manual_backward(part)
            loss += part.detach()
        self.loss = loss
        self.grad_norm = clip_gradients(self.model.parameters(), config.optimizer.clip_norm)
        self.finite = torch.isfinite(self.loss) & torch.isfinite(self.grad_norm)
        rate = functools.partial(learning_rate, step, max_steps=config.trainer.max_steps, schedule=config.schedule)
        self.lr = rate(config.optimizer.lr)
        set_learning_rate(optimizer.optimizer, config.optimizer, rate)
        skip_if_not_finite(optimizer.optimizer, self.finite)
        optimizer.step()

    def loss_sum(self, batch: Batch) -> Tensor:
        """The summed loss of a micro-batch's targets, in nats."""
        if self.device.type == "cuda":
            batch = batch.pin_memory()  # or the copy would stop the host
        batch = batch.to(self.device, non_blocking=True)
        plan = self.plan(batch)
        self.visible_pairs += plan.visible_pairs * len(batch.tokens)
        hidden = self._forward[0](batch.tokens, plan, batch.positions)
        total, _ = cross_entropy_sum(
            hidden, self.model.head_weight, batch.targets, chunk_tokens=self.config.memory.loss_chunk_tokens
        )
        return total

    def plan(self, batch: Batch) -> Plan:
        """What each token of the batch may attend to, lowered once for all layers."""
        rows, seq_len = batch.tokens.shape
        mask = mask_of(self.config)
        if batch.documents is not None:
            mask = mask & Documents(batch.documents)
        return lower(mask, rows, seq_len, seq_len, self.device)

    def plan_of_length(self, seq_len: int) -> Plan:
        """The plan of one sequence of `seq_len` tokens, for sampling."""
        return lower(mask_of(self.config), 1, seq_len, seq_len, self.device)

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> float | None:
        """Mean loss a target over held-out batches, in nats; None if the run was asked to stop meanwhile."""
        self.model.eval()
        total, targets = torch.zeros((), dtype=torch.float64, device=self.device), 0
        try:
            with self.trainer.precision_plugin.val_step_context():
                for batch in batches:
                    if self.give_up():
                        return None
                    total += self.loss_sum(batch).double()
                    targets += batch.num_targets
        finally:
            self.model.train()
        return float(total) / max(1, targets)


def mask_of(config: Config) -> Mask:
    """The mask that the configuration asks for, without the documents of a batch."""
    window = config.attention.window
    return Causal() if window is None else Causal() & SlidingWindow(window - 1, 0)


def fold_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
