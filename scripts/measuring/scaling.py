"""Training steps on several GPUs: how they share the work, one process's part of a row, and what its time goes into.

The task, the trainer, the meter and the way the model is divided are those of train.py; tokens are random.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from flashtrain.config import Config
from flashtrain.data.batch import Batch
from flashtrain.training.distributed.processes import Processes, join
from flashtrain.training.distributed.replicas import Replicas
from flashtrain.training.forecast import Forecast, describe
from flashtrain.training.forecast.mesh import gradient_bytes, sequence_bytes
from flashtrain.training.hardware import choose_device, choose_precision
from flashtrain.training.language import LanguageTask
from flashtrain.training.memory import forecast_of
from flashtrain.training.meter import Meter
from flashtrain.training.recording import choose_launching
from flashtrain.training.run_parts import make_trainer
from flashtrain.training.seeds import fold_seed
from measuring.environment import StateReading
from measuring.longest import config_of
from measuring.report import Unavailable
from measuring.scaling_communication import communication
from measuring.scaling_meshes import Mesh
from measuring.step_parts import ProfiledSteps
from measuring.timing import Mark, Stopwatch, spread
from measuring.training import Watch, as_it_is, batches

LONG_STEP = 20.0  # seconds from which the last timed step is the one that is profiled too


@dataclass(frozen=True)
class Amount:
    """How many steps are made: `warm_up`, then as many timed ones as take `seconds`, `least` to `most`."""

    warm_up: int
    least: int
    most: int
    seconds: float


class Steps:
    """Counts and times steps, the same number in all processes, and profiles one of them on several devices.

    Nothing waits for the device while steps are timed. Profiled is a further step or, where a step takes LONG_STEP, the
    last timed one: beside that what the profiler costs is nothing.
    """

    def __init__(self, device: torch.device, processes: Processes, amount: Amount) -> None:
        self.watch, self.processes, self.amount = Stopwatch(device), processes, amount
        self.count, self.target, self.first_step_seconds = 0, 0, 0.0
        self.losses: list[Tensor] = []
        self.marks: list[tuple[Mark, Mark]] = []
        self.memory: dict[str, float] = {}
        self.state: StateReading | None = None
        self.profiled = ProfiledSteps(device, steps=1) if processes.size > 1 else None
        self.profiled_step = 0  # its number, from 1
        self._at = time.perf_counter()
        self._from: Mark = 0.0

    def done(self, loss: Tensor) -> bool:
        """Told after each step; whether it was the last one."""
        self.count += 1
        self.losses.append(loss.detach())
        timed_end = self.amount.warm_up + self.target
        if self.count <= self.amount.warm_up:
            self._warm_up()
        elif self.count <= timed_end:
            self.marks.append((self._from, self.watch.mark()))
            if len(self.marks) == 1:
                self.state = StateReading(self.watch.device)
            if self.count == timed_end:
                self._read_memory()
        if self.profiled is not None and self.target and self.count >= self.profiled_step - 1:
            self.profiled.done()  # begins before that step and ends behind it
        if self.target and self.count == max(self.amount.warm_up + self.target, self.profiled_step):
            return True
        self._from = self.watch.mark()
        return False

    def figures(self, tokens: int) -> dict[str, Any]:
        """What the steps took, of all processes: a step's time is that of the slowest; tokens are those of a step."""
        steps = self.processes.most(*(self.watch.ms(start, end) for start, end in self.marks))
        losses = [float(loss) for loss in self.losses]
        common = self.amount.warm_up + self.amount.least
        return {
            "tokens_per_second": 1000 * tokens * len(steps) / sum(steps),
            "step_ms": spread(steps),
            "steps_ms": steps,
            "seconds_to_first_step": self.first_step_seconds,
            "loss": losses[common - 1],
            "loss_of_step": common,
            "losses": losses[:common],
            "state": self.state.values() if self.state else {},
            **{name: self.processes.most(gib)[0] for name, gib in self.memory.items()},
            **self._communication(),
        }

    def _warm_up(self) -> None:
        self.watch.wait()
        now = time.perf_counter()
        if self.count == 1:
            self.first_step_seconds = now - self._at
        if self.count == self.amount.warm_up:
            (step,) = self.processes.most(now - self._at)
            self.target = max(self.amount.least, min(self.amount.most, int(self.amount.seconds / max(step, 1e-6))))
            if self.profiled is not None:
                self.profiled_step = self.amount.warm_up + self.target + (step < LONG_STEP)
                self.profiled.count = 2  # what it would wait for has gone ahead
            if self.watch.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.watch.device)
            self.processes.meet()
        self._at = time.perf_counter()

    def _read_memory(self) -> None:
        device = self.watch.device
        self.watch.wait()
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            self.memory = {
                "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
                "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
                "device_gib": (total - free) / 2**30,
            }

    def _communication(self) -> dict[str, Any]:
        """Shares of the profiled step, the mean over processes and each one's."""
        if self.profiled is None:
            return {"communication": None}
        own, processes = communication(self.profiled.kernels()), self.processes
        last = self.profiled_step == self.amount.warm_up + self.target
        found: dict[str, Any] = {"profiled": "the last timed step" if last else "a further step"}
        for name in ("step_ms", "communication_ms", "exposed_ms"):
            mine = [own[name] if rank == processes.rank else 0.0 for rank in range(processes.size)]
            found[name] = processes.most(*mine)
        found["kernels"] = own["kernels"]
        steps = sum(found["step_ms"]) or 1.0
        shares = {name: sum(found[f"{name}_ms"]) / steps for name in ("communication", "exposed")}
        return {"communication": shares["communication"], "exposed": shares["exposed"], "profile": found}


class Share(IterableDataset[list[Batch]]):
    """This process's micro-batches of each step, which has the same sequences whoever shares them."""

    def __init__(self, config: Config, vocab: int, share: tuple[int, int]) -> None:
        self.config, self.vocab, self.share = config, vocab, share

    def __iter__(self) -> Iterator[list[Batch]]:
        (own, shares), rows = self.share, self.config.sequences_per_micro_batch
        for batch in batches(self.config, self.vocab):
            tokens, targets = (each.chunk(shares)[own] for each in (batch.tokens, batch.targets))
            yield [
                replace(batch, tokens=few, targets=their, num_targets=their.numel())
                for few, their in zip(tokens.split(rows), targets.split(rows), strict=True)
            ]


def scaled_config(
    model: str, seq_len: int, mesh: Mesh, overrides: Sequence[str], dry_run: bool, on_cpu: bool
) -> Config:
    """`model` as benchmark_longest.py trains it, a sequence for each share of the mesh in a step.

    Steps are launched kernel by kernel, as several GPUs do it in any case.

    Raises:
        ValueError: the mesh cannot train it.
    """
    own = [
        *mesh.overrides(seq_len),
        "trainer.timeout=10m",
        "trainer.cuda_graph=false",
        *(["trainer.accelerator=cpu"] if on_cpu else []),
    ]
    return config_of(model, "ours", seq_len, [*own, *overrides], dry_run)


def measure(config: Config, vocab: int, amount: Amount) -> dict[str, Any]:
    """Join the other processes of the row, train, and give the first one's view of all.

    Raises:
        Unavailable: the loss is not finite.
        ValueError: the forecast says that it does not fit.
    """
    processes = join(config)
    device = choose_device(config.trainer.accelerator)
    precision = choose_precision(config.trainer, device)
    torch.manual_seed(fold_seed(config.seed))
    task = LanguageTask(config, vocab, processes)
    found = forecast_of(config, vocab, precision, device)
    task.model.checkpoint_blocks = found.case.how
    task.join(Replicas(processes, config.trainer.strategy, config.trainer.shard), device)
    launched = choose_launching(task, config, device)
    processes.meet()
    steps = Steps(device, processes, amount)
    meter = Meter(config, vocab, precision, device, on_row=lambda row: None, processes=processes)
    watch = Watch(lambda task: steps.done(task.loss), meter)
    trainer = make_trainer(config, device, precision, [meter, watch], processes)
    trainer.fit(task, DataLoader(Share(config, vocab, processes.share), batch_size=None, collate_fn=as_it_is))
    figures = steps.figures(config.sequences_per_step * config.seq_len)
    processes.leave(together=True)
    if not all(map(_finite, figures["losses"])):
        raise Unavailable(f"the loss is {figures['loss']}")
    return {"launching": launched, **forecast_facts(found), **figures}


def forecast_facts(found: Forecast) -> dict[str, Any]:
    """What was said of the row before, in the units of what is measured."""
    case, time_of = found.case, found.time
    return {
        "backend": case.backend,
        "memory": describe(case.how),
        "forecast_gib": found.memory.peak / 2**30,
        "forecast_ms": None if time_of is None else 1000 * time_of.step,
        "forecast_parts_ms": None if time_of is None else {name: 1000 * s for name, s in vars(time_of).items()},
        "forecast_sent_gib": {
            "weights": gradient_bytes(case) / 2**30,
            "sequences": sequence_bytes(case) / 2**30 if case.context > 1 else 0.0,
        },
    }


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
