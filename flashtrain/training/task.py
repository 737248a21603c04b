"""One optimiser step, as a Lightning module: what language models and classifiers have in common.

A Lightning batch is a whole optimiser step: a list of micro-batches. So the number of targets of the step is known
before its first forward pass, gradients are normalised by it, and no checkpoint ever falls inside an accumulation.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from flashtrain.config import Config
from flashtrain.models.recompute import Recompute, compile_blocks
from flashtrain.training.averaging import AveragedWeights
from flashtrain.training.curriculum import Progress
from flashtrain.training.distributed.replicas import Replicas
from flashtrain.training.optimizers import (
    allow_recording,
    build_optimizer,
    clip_gradients,
    set_learning_rate,
    skip_if_not_finite,
)
from flashtrain.training.recording import RecordedStep, Recorder
from flashtrain.training.schedules import learning_rate
from flashtrain.training.seeds import fold_seed, set_seed
from flashtrain.training.visibility import LayerMasks

if TYPE_CHECKING:
    from flashtrain.models.classifier import Classifier
    from flashtrain.models.gpt import GPT


_VERSIONS = 64  # of a compiled model, at most


class MicroBatch(Protocol):
    """Tensors that go through the model at once."""

    num_targets: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any: ...

    def pin_memory(self) -> Any: ...


_Batch = TypeVar("_Batch", bound=MicroBatch)


class Task(pl.LightningModule, ABC):
    """A model, its loss and its optimiser step; subclasses say what the loss of a micro-batch is.

    Attributes that callbacks read after a step: `loss` (mean over the step's targets), `grad_norm`, `finite` (device
    scalars), `lr`, `visible_pairs` (of the whole step, a head's mean over layers; on the device where only that knows
    them), `unfinished` (the step was given up half-way). They are those of all processes together.
    """

    # What `measure` sums up, in order.
    FIGURES: ClassVar[tuple[str, ...]] = ("loss",)
    # What each layer may attend to.
    masks: LayerMasks
    # Rows of the head that every token is multiplied with, for the count of FLOPs.
    head_size: int
    # Whether a small model is compiled too where its steps are recorded: if its runs take minutes at the least.
    COMPILED_IF_RECORDED: ClassVar[bool] = False

    def __init__(self, config: Config, model: GPT | Classifier) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.model: GPT | Classifier = model
        # Not registered as a submodule: the state's names stay those of the plain model.
        self._forward: tuple[Callable[..., Any]] = (model,)
        self.give_up: Callable[[], bool] = lambda: False
        # The run's processes; where each has the whole model, what gives `loss_sum` and makes them sum its gradients.
        self.replicas = Replicas()
        self._replicated: tuple[nn.Module, ...] = ()
        # Where others may be compiling, they are waited for longer: in the first two steps and the first validation.
        self._steps_here, self._validated_here = 0, False
        self.progress = Progress()
        # Makes of a checkpoint what the task begins with, in place.
        self.at_load: Callable[[dict[str, Any]], None] | None = None
        self.loss = self.grad_norm = self.finite = torch.zeros(())
        self.lr, self.unfinished = 0.0, False
        self.visible_pairs: float | Tensor = 0.0
        # Repeats the step's work on the device instead of launching it anew; None where it is launched.
        self.recorded: RecordedStep | None = None
        self.average = self._averaged_weights()

    @abstractmethod
    def loss_sum(self, batch: Any) -> Tensor:
        """The summed loss of the targets of a micro-batch on the model's device, in nats."""

    def what_differs(self) -> str | None:
        """What differs between the run's micro-batches, in shape or mask, so that no recording of one fits the next."""
        return f"with task={self.config.task} the masks differ from step to step"

    def targets_of(self, batch: Any) -> int | Tensor:
        """How many targets a micro-batch on the device has: a number there, where they differ from step to step."""
        return int(batch.num_targets)

    def measure(self, batch: Any) -> Tensor:
        """Sums over a held-out batch's targets: one for each of FIGURES."""
        return self.loss_sum(batch)[None]

    def compile_model(self) -> None:
        """Compile the forward pass, as one graph or block by block; attention is one node in it.

        Of a divided model the parts of each block, between which its weights come and go.
        """
        how = Recompute.of(self.model.checkpoint_blocks)
        # Each length of a warm-up and each size of a validation's batch is another version. PyTorch's limit, 8, is for
        # code that is compiled again by mistake, and ends a run.
        torch._dynamo.config.recompile_limit = max(_VERSIONS, torch._dynamo.config.recompile_limit)
        if self.replicas.sharded:
            for block in self.model.blocks:
                for name in ("attention", "mlp"):
                    block.get_submodule(name).compile(fullgraph=True, dynamic=False)
            return
        if how == Recompute():
            self._forward = (torch.compile(self.model, fullgraph=True, dynamic=False),)
        else:
            self.model.checkpoint_blocks = compile_blocks(self.model.blocks, how)

    def join(self, replicas: Replicas, device: torch.device) -> None:
        """Train together with others: the model's weights may become this process's part of them, on `device`."""
        self.replicas = replicas
        if replicas.sharded:
            replicas.shard(self.model, self.model.blocks, device)
            self.average = self._averaged_weights()

    def _averaged_weights(self) -> AveragedWeights | None:
        decay = self.config.optimizer.ema_decay
        return None if decay is None else AveragedWeights(self.model, decay)

    def on_train_start(self) -> None:
        if self.replicas.replicated:
            self._replicated = (self.replicas.replicate(_Loss(self), find_unused=self.config.task != "language"),)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # micro-batches move one at a time

    def to_device(self, batch: _Batch, into: Any = None) -> _Batch:
        """The batch on the model's device: in new memory, or in that of `into`, one of the same shapes there."""
        if self.device.type == "cuda":
            batch = batch.pin_memory()  # or the copy would stop the host
        if into is None:
            return batch.to(self.device, non_blocking=True)
        into.copy_(batch)
        return into

    def training_step(self, micro_batches: Sequence[MicroBatch], batch_index: int) -> None:
        """One optimiser step: what its number decides is written to the device first, then comes the work there."""
        config, step = self.config, self.progress.own(self.global_step)
        place, length = (self.progress.scheduled(n) for n in (self.global_step, config.trainer.max_steps))
        rate = functools.partial(learning_rate, place, max_steps=length, schedule=config.schedule)
        self.lr = rate(config.optimizer.lr)
        set_learning_rate(self._optimizer, config.optimizer, rate)
        if self.average is not None:
            self.average.begin(self.progress.averaged(self.global_step) + 1)
        self.replicas.processes.patient = self._steps_here < 2
        seeds = self._seeds(step, len(micro_batches))
        set_seed(seeds[0], self.device)
        self.unfinished = False
        if self.recorded is None:
            targets = self._targets(micro_batches)
            self._work(map(self.to_device, micro_batches), targets, seeds)
        else:
            (batch,) = micro_batches
            self.recorded(batch)
        if not self.unfinished:
            # Lightning's count of steps. It would do this itself around `step` of its own wrapper of the optimiser,
            # which a recorded step does not go through.
            progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            progress.increment_ready()
            progress.increment_completed()
            self._steps_here += 1

    def _seeds(self, step: int, count: int) -> list[int]:
        """Of each of the process's `count` micro-batches.

        Dropout is a function of (seed, step, micro-batch): a resumed run has no generator state to restore, and a step
        that several processes share has the masks of a single one, unless they share its sequences.
        """
        processes = self.replicas.processes
        first, part = processes.share[0] * count, (processes.part,) if processes.context > 1 else ()
        return [fold_seed(self.config.seed, step, first + index, *part) for index in range(count)]

    def _targets(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Of the whole step, those of all processes."""
        processes = self.replicas.processes
        own = sum(batch.num_targets for batch in micro_batches) if processes.part == 0 else 0
        return int(processes.total(own))

    def record_steps(self, recorder: Recorder) -> None:
        """From now on a step is one micro-batch, and its work is recorded by `recorder` and then repeated."""
        self.recorded = RecordedStep(self._whole_step, self.to_device, recorder)

    def _whole_step(self, batch: Any) -> None:
        self._work([batch], self.targets_of(batch))

    def _work(self, micro_batches: Iterable[MicroBatch], num_targets: int | Tensor, seeds: Sequence[int] = ()) -> None:
        """A step's work on the device: gradients, clipping, the optimiser, the running mean of the weights.

        Recorded, it runs once in Python and then only on the device: whatever differs between steps must lie there.
        `num_targets`: of the whole step. `seeds`: of each micro-batch; the first is in force already.
        """
        optimizer, loss = self._optimizer, torch.zeros((), device=self.device)
        loss_of: Callable[[Any], Tensor] = self._replicated[0] if self._replicated else self.loss_sum
        self.visible_pairs = 0.0
        if not isinstance(num_targets, Tensor):  # the same division in either case
            num_targets = torch.full((), num_targets, device=self.device)
        num_targets = num_targets.clamp(min=1)
        optimizer.zero_grad(set_to_none=True)
        for index, batch in enumerate(micro_batches):
            if index:
                if self.give_up():
                    self.unfinished = True
                    optimizer.zero_grad(set_to_none=True)
                    return
                set_seed(seeds[index], self.device)
            with self.replicas.accumulating(loss_of, last=index + 1 >= len(seeds)):
                part = loss_of(batch) / num_targets
                self.manual_backward(part)
            loss += part.detach()
        self.loss, self.visible_pairs = self._of_all(loss, self.visible_pairs)
        self.grad_norm = clip_gradients(self.model.parameters(), self.config.optimizer.clip_norm)
        self.finite = torch.isfinite(self.loss) & torch.isfinite(self.grad_norm)
        skip_if_not_finite(optimizer, self.finite)
        allow_recording(optimizer)
        optimizer.step()
        if self.average is not None:
            self.average.take_in()

    def _of_all(self, loss: Tensor, pairs: float | Tensor) -> tuple[Tensor, float | Tensor]:
        """Sums over all processes; nothing is waited for."""
        if not self.replicas.several:
            return loss, pairs
        if not isinstance(pairs, Tensor):
            pairs = torch.full((), pairs, dtype=torch.float64, device=loss.device)
        both = self.replicas.total(torch.stack([loss.double(), pairs.double()]))
        return both[0].to(loss.dtype), both[1]

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.average is not None:
            checkpoint["average"] = self.average.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.at_load is not None:
            self.at_load(checkpoint)
        if self.average is not None:
            self.average.load(checkpoint.get("average", {}))

    def averaged(self) -> AbstractContextManager[None]:
        """The model holds its averaged weights inside, where there are such."""
        return nullcontext() if self.average is None else self.average.in_place()

    @torch.no_grad()
    def validate(self, batches: Iterable[MicroBatch]) -> dict[str, float] | None:
        """Means over the targets of held-out batches, val_<figure> each; None if the run is asked to stop meanwhile."""
        self.model.eval()
        counted, self.visible_pairs = self.visible_pairs, 0.0  # of the last step, which is not over for the meter
        total, targets = torch.zeros(len(self.FIGURES), dtype=torch.float64, device=self.device), 0
        processes = self.replicas.processes
        processes.patient, self._validated_here = not self._validated_here, True
        try:
            with self.averaged(), self.trainer.precision_plugin.val_step_context():
                for batch, counts in processes.take_turns(batches):
                    if self.give_up():
                        return None
                    if not counts:  # the others need this process to run the model with them
                        self.loss_sum(self.to_device(batch))
                        continue
                    total += self.measure(self.to_device(batch)).double()
                    targets += batch.num_targets if processes.part == 0 else 0
        finally:
            self.model.train()
            self.visible_pairs = counted
        means = (self.replicas.total(total) / max(1, processes.total(targets))).tolist()
        return {f"val_{name}": mean for name, mean in zip(self.FIGURES, means, strict=True)}


class _Loss(nn.Module):
    """The loss of a micro-batch as a module of its own: what is used of the model outside its forward pass, such as a
    tied head, is inside this one's."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.model
        self._task = (task,)  # not as a submodule

    def forward(self, batch: Any) -> Tensor:
        return self._task[0].loss_sum(batch)
