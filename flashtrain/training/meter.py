"""The meter: what a step cost and what it brought, without stopping the GPU to ask.

Figures stay on the device when a step is logged; they are copied to the host in the background and written as a row
at the next logged step, when they have long arrived. The rate is the time between two logged steps by the device's own
clock, validation and checkpoints left out.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from flashtrain.config import Config
from flashtrain.models.flops import model_flops
from flashtrain.training.curriculum import Progress
from flashtrain.training.distributed.processes import ALONE, Processes
from flashtrain.training.hardware import peak_flops, peak_memory_gib
from flashtrain.training.task import Task

Row = dict[str, float | int | None]


class Diverged(RuntimeError):
    """A loss or gradient was not finite; the weights are those from before that step."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(
            f"loss or gradient not finite at step {step}: that update and those after it were not applied. "
            "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of that step"
        )


@dataclass
class _Clock:
    """A point in time on the device: a CUDA event, or the host's clock where work is not asynchronous."""

    event: torch.cuda.Event | None
    seconds: float

    @classmethod
    def now(cls, device: torch.device) -> _Clock:
        if device.type != "cuda":
            return cls(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event, 0.0)

    def since(self, earlier: _Clock) -> float:
        if self.event is None or earlier.event is None:
            return self.seconds - earlier.seconds
        return earlier.event.elapsed_time(self.event) / 1000

    @property
    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


@dataclass
class _Pending:
    row: Row
    # Loss, grad_norm, first step that was not finite (-1: none), visible pairs; on the host once `end` has passed.
    figures: Tensor
    start: _Clock
    end: _Clock
    sequences: int
    extra: Row = field(default_factory=dict)


class Meter(pl.Callback):
    """Counts tokens, time and FLOPs, and hands a row to `on_row` for each logged step.

    MFU is model FLOPs a second over the device's dense peak. The FLOPs are `models.flops.model_flops` (3 x forward)
    with attention counted for the visible pairs of each layer only: a causal mask counts half of the square, a window
    its band, a block layout its blocks. Of several processes: tokens of all of them together, MFU of a device, and the
    memory of the one that holds most.
    """

    def __init__(
        self,
        config: Config,
        head_size: int,
        precision: str,
        device: torch.device,
        on_row: Callable[[Row], None],
        progress: Progress | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.config = config
        self.processes = processes
        self.progress = progress or Progress()
        self.head_size = head_size
        self.device = device
        self.peak = peak_flops(device, precision, config.trainer.peak_tflops)
        self.on_row = on_row
        self.last_row: Row = {}
        self._pending: deque[_Pending] = deque()
        self._interval: _Clock | None = None
        self._sequences = 0
        self._pairs: float | Tensor = 0.0
        self._rates: list[tuple[float, float | None]] = []
        self._first_bad = torch.full((), -1.0, device=device)

    def start_interval(self) -> None:
        """Start counting time and tokens afresh: at the start, and after validation or a checkpoint."""
        self._interval, self._sequences, self._pairs = None, 0, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._interval is None:
            self._interval = _Clock.now(self.device)

    def step_done(self, step: int, task: Task) -> None:
        """Count a finished optimiser step; `step` is the number of steps done, 1 after the first."""
        config = self.config
        self._sequences += config.sequences_per_step
        self._pairs = self._pairs + task.visible_pairs
        unnoticed = (self._first_bad < 0) & ~task.finite
        self._first_bad = torch.where(unnoticed, torch.full_like(self._first_bad, step), self._first_bad)
        if step % config.trainer.log_every_n_steps == 0 or step == config.trainer.max_steps:
            self._log(step, task)

    def add(self, step: int, **figures: float) -> None:
        """Figures of step `step` that come after it, such as a validation loss: one row holds all of a step."""
        if self._pending and self._pending[-1].row["step"] == step:
            self._pending[-1].extra.update(figures)
        else:
            self.flush()  # rows come in the order of their steps
            self.on_row({"step": step, "tokens": self._tokens_at(step), **figures})

    def flush(self, wait: bool = True) -> None:
        """Write the rows whose figures have arrived; with `wait`, all of them.

        Raises:
            Diverged: a step since the last row was not finite.
        """
        while self._pending and (wait or self._pending[0].end.passed):
            pending = self._pending.popleft()
            pending.end.wait()
            self._write(pending)

    def check_finite(self) -> None:
        """Look at once whether any step so far was not finite; this waits for the device.

        Raises:
            Diverged: one was.
        """
        first_bad = int(self._first_bad)
        if first_bad >= 0:
            raise Diverged(first_bad)

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the logged intervals, without the first, in which kernels are compiled."""
        rates = [rate for rate, _ in self._rates[1:] or self._rates]
        return statistics.median(rates) if rates else None

    @property
    def mfu(self) -> float | None:
        rates = [mfu for _, mfu in self._rates[1:] or self._rates if mfu is not None]
        return statistics.median(rates) if rates else None

    def _tokens_at(self, step: int) -> int:
        return self.progress.tokens_at(step, self.config)

    def _log(self, step: int, task: Task) -> None:
        assert self._interval is not None
        pairs = self._pairs
        if not isinstance(pairs, Tensor):
            pairs = torch.full((), pairs, dtype=torch.float64, device=self.device)
        figures = torch.stack([task.loss.double(), task.grad_norm.double(), self._first_bad.double(), pairs])
        if self.device.type == "cuda":
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
        row: Row = {
            "step": step,
            "tokens": self._tokens_at(step),
            "lr": task.lr,
            "peak_memory_gib": self.processes.most(peak_memory_gib(self.device))[0],
        }
        end = _Clock.now(self.device)
        self.flush(wait=False)
        self._pending.append(_Pending(row, figures, self._interval, end, self._sequences))
        self._interval, self._sequences, self._pairs = end, 0, 0.0

    def _write(self, pending: _Pending) -> None:
        loss, grad_norm, first_bad, pairs = pending.figures.tolist()
        if first_bad >= 0:
            raise Diverged(int(first_bad))
        seconds = pending.end.since(pending.start)
        config, sequences = self.config, pending.sequences
        rate = sequences * config.seq_len / seconds
        flops = sequences * model_flops(config.model, self.head_size, config.seq_len, pairs / sequences).training
        mfu = None if self.peak is None else flops / seconds / (self.peak * self.processes.size)
        self._rates.append((rate, mfu))
        row = {**pending.row, "train_loss": loss, "grad_norm": grad_norm, "tokens_per_second": rate, "mfu": mfu}
        self.last_row = {**row, **pending.extra}
        self.on_row(self.last_row)
