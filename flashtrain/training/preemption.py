"""SIGTERM, Ctrl-C and SIGUSR2: finish what must be finished, save, and leave with a code that says why."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import lightning.pytorch as pl

from flashtrain.training.distributed.processes import ALONE, EXIT_CODES, Processes

_ONE_SIGNAL = 1.0  # seconds: Slurm sends a signal to all processes of a job, and those that started others pass it on


class Preemption(pl.Callback):
    """Turns the first signal into a flag that the training loop reads; a second one, later, ends the process at once.

    Nothing is done inside the handler: it may interrupt a backward pass or a write. Before there is a training loop,
    `interrupting` gives the first signal another meaning.

    Attributes:
        signal: the one that ends the run, the same for all processes from the moment they `agree` on it.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.signal: signal.Signals | None = None
        self._own: signal.Signals | None = None
        self._interrupts = False
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

    def alone(self) -> bool:
        """Whether this process was asked to stop; then it ends for itself, whatever the others know."""
        self.signal = self.signal or self._own
        return self.signal is not None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Signals are this object's, in here."""
        with _second_ends_at_once():
            self._install()
            try:
                yield
            finally:
                for number, previous in self._previous.items():
                    signal.signal(number, previous)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """The first signal raises KeyboardInterrupt in here, also one that has come already.

        Of several processes none may go while others wait for it: they agree on the signal before their first step.
        """
        self._interrupts = self.processes.size == 1
        try:
            if self._interrupts and self.alone():
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._install()  # once more: Lightning has put a handler of its own around that of SIGTERM

    def _install(self) -> None:
        for number in EXIT_CODES:
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._own is None
        if first or self._own == signal.SIGUSR2:
            self._own = signal.Signals(number)
        if first and self._interrupts and self.alone():
            raise KeyboardInterrupt


_wakeup: int | None = None  # the end of the pipe that signals are written to


@contextlib.contextmanager
def _second_ends_at_once() -> Iterator[None]:
    """A second signal ends the process in here, even during one long call.

    A handler in Python has to wait until a call into PyTorch returns, which may take a minute on a CPU, and may never
    happen on a GPU that hangs. But each signal's number is written to a pipe meanwhile, and a thread reads it.
    """
    global _wakeup
    reading, _wakeup = os.pipe()
    os.set_blocking(_wakeup, False)
    thread = threading.Thread(target=_end_at_second, args=(reading,), name="second signal", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(_wakeup, bytes(1))
        thread.join()
        for end in (reading, _wakeup):
            os.close(end)
        _wakeup = None


def _end_at_second(reading: int) -> None:
    first, since = 0, 0.0
    while number := os.read(reading, 1)[0]:
        now = time.monotonic()
        if number not in EXIT_CODES:
            continue
        if first in (0, signal.SIGUSR2):
            first, since = number, now
        elif now - since > _ONE_SIGNAL:
            os._exit(EXIT_CODES[signal.Signals(number)])


def _leave_to_the_parent() -> None:
    """In a fork, such as one that reads data: its signals are none of this process's."""
    if _wakeup is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_the_parent)
