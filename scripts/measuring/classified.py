"""What runs on images came to: their accuracy, what it took, and which seeds never left chance."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring.runs import FREE, Run

CHANCE = 0.6  # a run of two classes below it has learned nothing, as in a curriculum's restart rule
MINUTES = "from a run's first line to its last, with compiling, validation and checkpoints; all of its allocations"
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)")
_BEGINS = re.compile(r"run \S+ in ")
_STAGE = re.compile(r".* stage \d+ of \d+ from step (\d+)")
_ENDS = re.compile(r"(finished|stopped|failed|diverged) after \d+ steps")


@dataclass(frozen=True)
class Classified:
    """A run on images and its figures.

    accuracy: of its last validation, with its standard error. curve: (seconds of training, accuracy) of all validations
    with the images of a curriculum's last stage.
    failed_attempts: seeds that its restart rule gave up before the one that it ended with.
    gpu_minutes: see `MINUTES`; None on the CPU, or without the run's log.
    """

    run: Run
    seed: int
    accuracy: float | None
    accuracy_error: float | None
    curve: list[tuple[float, float]]
    failed_attempts: int
    gpu_minutes: float | None

    @classmethod
    def read(cls, folder: Path) -> Classified:
        """Raises ValueError: no run on images, or one that has not ended."""
        run = Run.read(folder, failed=True)
        if run.config.get("task") != "classification":
            raise ValueError(f"{folder}: task={run.config.get('task')}; give runs with task=classification")
        summary, log = run.summary, folder / "train.log"
        lines = log.read_text().splitlines() if log.is_file() else []
        minutes = minutes_of(lines)
        on_gpu = not summary.get("device", "cpu").startswith("cpu")
        devices = run.config.get("trainer.devices", 1)
        accuracy = summary.get("val_accuracy")
        return cls(
            run,
            int(summary.get("seed", run.config["seed"])),
            accuracy,
            summary.get("val_accuracy_error"),
            _curve(run, max((int(found[1]) for found in map(_STAGE.match, lines) if found), default=0)),
            int(summary.get("failed_seeds", 0)),
            minutes * devices if on_gpu and minutes is not None else None,
        )

    @property
    def failed(self) -> bool:
        """Whether it ended at chance, or did not come to its end."""
        return self.run.summary["status"] != "finished" or self.accuracy is None or self.accuracy < CHANCE

    def differs_from(self, other: Classified) -> dict[str, Any]:
        """Keys of the configuration, without the seed and names and places, with this run's values."""
        free = (*FREE, "seed", "images.prepared_dir", "images.num_workers", "model.name")
        mine, its = self.run.config, other.run.config
        return {
            key: mine.get(key)
            for key in sorted({*mine, *its})
            if mine.get(key) != its.get(key) and not any(key == each or key.startswith(f"{each}.") for each in free)
        }


def _curve(run: Run, first_step: int) -> list[tuple[float, float]]:
    """(seconds of training, accuracy) of the validations after a step."""
    steps = [int(row["step"]) for row in run.rows if row.get("val_accuracy")]
    found = zip(steps, run.losses("val_accuracy"), strict=True)
    return [(seconds, value) for step, (_, seconds, value) in found if step > first_step]


def minutes_of(lines: Iterable[str]) -> float | None:
    """Minutes that a log's run has lasted, without the time between a stop and the next start; None without times.

    A start that follows no end is that of a run that was killed, which is counted to the last step that it told of.
    """
    total, begun, banner, worked, last = 0.0, None, None, None, None
    for line in lines:
        found = _LINE.match(line)
        if found is None or found[2].startswith("go on with:"):  # said behind the end
            continue
        last = now = datetime.datetime.fromisoformat(found[1].replace(",", "."))
        if _BEGINS.match(found[2]):
            if begun is not None and banner is not None:
                total, begun, worked = total + ((worked or banner) - begun).total_seconds(), now, None
            banner = now
        begun = begun or now
        if found[2].startswith("step "):
            worked = now
        if _ENDS.match(found[2]):
            total, begun, banner, worked = total + (now - begun).total_seconds(), None, None, None
    if begun is not None and last is not None:
        total += (last - begun).total_seconds()
    return None if last is None else total / 60


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def error_of_mean(runs: Sequence[Classified]) -> float | None:
    """Standard error of the mean accuracy of runs that differ in their seed: that of their spread, but not less than
    that of the images they were judged by, which are the same for all."""
    values = [run.accuracy for run in runs if run.accuracy is not None]
    errors = [run.accuracy_error for run in runs if run.accuracy_error is not None]
    if not values or not errors:
        return None
    if len(values) == 1:
        return errors[0]
    mean = mean_of(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return max(spread, mean_of(errors))
