"""What finished runs left in their folders, and whether they may be compared."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

# Keys of config.yaml in which runs may differ and still be compared: names, places, and what changes time alone.
FREE = ("run_id", "resume", "runs_dir", "logger", "memory", "data.prepared_dir", "data.num_workers")
# Facts of summary.json that must be equal.
FACTS = ("tokens", "steps", "tokenizer", "corpus.fingerprint", "corpus.text_fingerprint", "device", "precision")


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv, in the order of the steps; `run` is the folder or the file."""
    path = run if run.suffix == ".csv" else run / "metrics.csv"
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Run:
    """A run's summary, its configuration by dotted keys, and its rows."""

    name: str
    summary: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, str]]

    @classmethod
    def read(cls, folder: Path, failed: bool = False) -> Run:
        """failed: runs that failed or diverged are read too.

        Raises:
            ValueError: the run is not finished.
        """
        summary = json.loads((folder / "summary.json").read_text())
        if summary.get("status") not in ("finished", *(("failed", "diverged") if failed else ())):
            raise ValueError(f"{folder}: the run is {summary.get('status')!r}, not finished; go on with resume=")
        config = dict(flat(yaml.safe_load((folder / "config.yaml").read_text())))
        return cls(str(summary["run_id"]), summary, config, metrics(folder))

    @cached_property
    def tokens_per_second(self) -> float:
        """Median over the logged intervals, without the first, in which kernels are compiled."""
        rates = [float(row["tokens_per_second"]) for row in self.rows if row.get("tokens_per_second")]
        return statistics.median(rates[1:] or rates)

    def losses(self, name: str) -> list[tuple[float, float, float]]:
        """(tokens, seconds of training, loss) of each row with a loss of that name, train_loss or val_loss.

        Seconds are those of steps, without validation and checkpoints; the first logged interval, in which kernels are
        compiled, counts at the median rate.
        """
        found, tokens, seconds = [], 0.0, 0.0
        for row in self.rows:
            done, rate = float(row["tokens"]), row.get("tokens_per_second")
            if rate:
                seconds += (done - tokens) / (float(rate) if tokens else self.tokens_per_second)
                tokens = done
            if row.get(name):
                found.append((done, seconds + (done - tokens) / self.tokens_per_second, float(row[name])))
        return found

    def seconds_to(self, loss: float) -> float | None:
        """Seconds of training until the held-out loss is `loss`, straight lines between validations; None: never."""
        before: tuple[float, float] | None = None
        for _, seconds, value in self.losses("val_loss"):
            if value <= loss:
                if before is None:
                    return seconds
                share = (before[1] - loss) / (before[1] - value)
                return before[0] + share * (seconds - before[0])
            before = seconds, value
        return None


def require_comparable(runs: Sequence[Run], free: Sequence[str] = ("attention",)) -> None:
    """Whether runs differ in `free` keys alone: equal tokens of the same text, in the same order and steps.

    Raises:
        ValueError: naming the first difference.
    """
    first = runs[0]
    for other in runs[1:]:
        for key, here, there in _differences(first, other, (*FREE, *free)):
            raise ValueError(
                f"{key} is {here} in {first.name} and {there} in {other.name}: take runs that differ in {free[0]} alone"
            )


def _differences(first: Run, other: Run, free: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    for of in (lambda run: run.config, lambda run: {key: fact(run.summary, key) for key in FACTS}):
        a, b = of(first), of(other)
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key) and not any(key == each or key.startswith(f"{each}.") for each in free):
                yield key, a.get(key), b.get(key)


def fact(summary: dict[str, Any], key: str) -> Any:
    """A dotted key of a summary; None where it is not there."""
    value: Any = summary
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a tree of sections."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
