"""What a person sees while a run trains: a bar in a terminal, a line a logged step elsewhere, and train.log."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger("flashtrain")


class Display:
    """The one place that writes to the terminal; everything also goes to train.log.

    rank: of several processes only the first shows a run; the others tell what went wrong with them.
    """

    def __init__(self, log_file: Path, max_steps: int, rank: int = 0) -> None:
        self.console = Console(highlight=False, soft_wrap=True, stderr=rank > 0)
        self.max_steps = max_steps
        self.rank = rank
        name = f"rank {rank}: " if rank else ""
        self._file = _FileHandler(log_file, encoding="utf-8")
        self._file.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s"))
        self._screen = _ScreenHandler(self)
        self._screen.setLevel(logging.INFO)  # tracebacks of what is told in a line go to the file only
        for handler in (self._file, self._screen):
            if rank:
                handler.setLevel(logging.ERROR)
            logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        self._progress: Progress | None = None

    def start(self, step: int) -> None:
        if not self.console.is_terminal or self.rank:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("training", total=self.max_steps, completed=step, figures="")
        self._progress.start()

    def step(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def row(self, row: Mapping[str, float | int | None]) -> None:
        """Show a logged step."""
        line = describe(row)
        if self._progress is not None:
            self._progress.update(self._task, figures=line)
            self._file.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, self._prefix(row) + line, (), None))
        else:
            logger.info("%s%s", self._prefix(row), line)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        self.stop()
        for handler in (self._file, self._screen):
            logger.removeHandler(handler)
            handler.close()

    def _prefix(self, row: Mapping[str, float | int | None]) -> str:
        return f"step {row['step']}/{self.max_steps}  "


class _FileHandler(logging.FileHandler):
    """Says once if train.log can no longer be written, such as on a full disk; the run itself may still go on."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            complain(f"{self.baseFilename}: {sys.exc_info()[1]}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was still to be written
            super().close()


class _ScreenHandler(logging.Handler):
    """Prints through the console that owns the bar, so that the two never garble each other."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        rank = self._display.rank
        self._display.console.print((f"rank {rank}: " if rank else "") + record.getMessage(), markup=False)


def describe(row: Mapping[str, float | int | None]) -> str:
    """The figures of a row as people read them, those that exist."""
    formats = {
        "train_loss": "loss {:.4f}",
        "val_loss": "held-out {:.4f}",
        "val_accuracy": "right {:.2%}",
        "lr": "lr {:.2e}",
        "grad_norm": "grad {:.2f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "peak_memory_gib": "{:.1f} GiB",
    }
    cells = [text.format(row[name]) for name, text in formats.items() if row.get(name) is not None]
    return "  ".join(cells)


def complain(message: str) -> None:
    """An error for the user, on stderr and without a traceback."""
    print(message, file=sys.stderr)
