"""What a benchmark leaves behind: one JSON with all that is needed to judge and repeat it, and a table to read."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashtrain.config.sizes import parse_size
from flashtrain.training.run_folder import git_commit, write_atomically
from measuring import ROOT
from measuring.environment import facts

SPREAD = "times are medians over `repeats` calls; beside each stand its minimum and quartiles (p25, p75), in ms"


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str] | None, benchmark: str) -> argparse.Namespace:
    """Parse with --out, --commit, --device and --dry-run, which every benchmark takes."""
    default = f"{benchmark}.json"
    parser.add_argument("--out", type=Path, help=f"JSON to write (benchmarks/{default}; none for a dry run)")
    parser.add_argument("--commit", help="commit of the code, where it runs outside a git clone")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any machine: does it run at all?")
    arguments = parser.parse_args(argv)
    arguments.command = command_line(f"benchmark_{benchmark}", sys.argv[1:] if argv is None else argv)
    return arguments


def sizes(text: str) -> list[int]:
    """Argument type: 1k,4k,16k."""
    try:
        return [parse_size(item) for item in text.split(",") if item]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def names(text: str) -> list[str]:
    """Argument type: a list with commas."""
    return [item for item in text.split(",") if item]


class Problem(RuntimeError):
    """What is told in a row without a traceback: the message says it all."""


class Unavailable(Problem):
    """This cannot be measured here."""


class Report:
    """Collects rows and writes them as they come, so that a run that is cut short keeps what it has."""

    def __init__(self, benchmark: str, arguments: argparse.Namespace, device: torch.device) -> None:
        self.path: Path | None = arguments.out
        if self.path is None and not arguments.dry_run:
            self.path = ROOT / "benchmarks" / f"{benchmark}.json"
        self.content: dict[str, Any] = {
            "benchmark": benchmark,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": arguments.commit or git_commit(),
            "command": arguments.command,
            "dry_run": arguments.dry_run,
            **facts(device),
            "spread": SPREAD,
            "rows": [],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(_json(self.content), indent=1) + "\n")

    def finish(self) -> None:
        """Write for the last time and say where."""
        self.write()
        if self.path is not None:
            say(f"wrote {self.path}")


def command_line(script: str, argv: Sequence[str]) -> str:
    """The command as anyone can repeat it in a clone: without the places of this machine."""
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("--out", "--commit", "--plot"):
            next(arguments, None)
        elif not argument.startswith(("--out=", "--commit=", "--plot=")):
            name, equals, value = argument.partition("=")
            place = Path(argument).name if argument.startswith("/") else argument
            kept.append(f"{name}=..." if equals and "/" in value else place)
    return " ".join(("python", f"scripts/{script}.py", *kept))


def reason(error: BaseException) -> str:
    """Why a row failed, in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Problem) else f"{type(error).__name__}: {text}"


def gpu_is_lost(text: str | None) -> bool:
    """True for the failures after which nothing more can run in this process."""
    return text is not None and any(sign in text for sign in ("CUDA error", "Triton Error [CUDA]", "illegal memory"))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under their headers, text to the left and numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells), 0) for i, header in enumerate(headers)]
    numeric = [all(not row[i] or row[i][0] in "-0123456789" for row in cells) for i in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _json(value: Any) -> Any:
    """Six digits are more than any timing here is good for, and not-a-number is no JSON."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else str(value)
    return value
