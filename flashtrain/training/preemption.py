"""SIGTERM, Ctrl-C and SIGUSR2: finish what must be finished, save, and leave with a code that says why."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import lightning.pytorch as pl

from flashtrain.training.distributed.processes import ALONE, EXIT_CODES, Processes

_ONE_SIGNAL = 1.0  # seconds: Slurm sends a signal to all processes of a job, and those that started others pass it on


class Preemption(pl.Callback):
    """Turns the first signal into a flag that the training loop reads; a second one, later, ends the process at once.

    Nothing is done inside the handler: it may interrupt a backward pass or a write.

    Attributes:
        signal: the one that ends the run, the same for all processes from the moment they `agree` on it.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.signal: signal.Signals | None = None
        self._own: signal.Signals | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        if self.processes.size == 1:
            self.signal = self._own
        return self.signal is not None

    def asked(self) -> bool:
        """Whether any process was asked to stop. All ask this at the same time."""
        self.agree()
        return self.requested

    def agree(self, *more: bool) -> list[bool]:
        """Ask all processes for signals, and whether any of them says yes to `more`. All call it in the same order."""
        own = self.signal or self._own
        number, *answers = self.processes.most(0 if own is None else own.value, *more)
        self.signal = signal.Signals(int(number)) if number else None
        return [bool(answer) for answer in answers]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.signal] if self.signal is not None else 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.install()  # after Lightning has installed its own handlers

    def install(self) -> None:
        for number in EXIT_CODES:
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)

    def restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._own in (None, signal.SIGUSR2):
            self._own, self._since = signal.Signals(number), now
        elif now - self._since > _ONE_SIGNAL:
            os._exit(EXIT_CODES[signal.Signals(number)])
