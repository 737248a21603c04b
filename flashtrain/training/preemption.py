"""SIGTERM and Ctrl-C: finish what must be finished, save, and leave with a code that says why."""

from __future__ import annotations

import os
import signal
from types import FrameType

import lightning.pytorch as pl

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Preemption(pl.Callback):
    """Turns the first signal into a flag that the training loop reads; a second one ends the process at once.

    Nothing is done inside the handler: it may interrupt a backward pass or a write.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

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
        if self.requested:
            os._exit(EXIT_CODES[signal.Signals(number)])
        self.signal = signal.Signals(number)
