"""Sweeps: `-m` runs each combination as a run in a process of its own.

No memory, process group or tracker carries over from one job to the next, a job that fails stops none of the others,
and the configuration files are copied when the sweep starts, so that editing them meanwhile changes nothing. Whatever
launcher Hydra is given only starts these processes.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from flashtrain.config.command_line import overrides_of
from flashtrain.config.started import name_parent

_SWEEP_VARIABLE = "FLASHTRAIN_SWEEP"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def prepare(argv: list[str]) -> Path | None:
    """For a command line with -m: make the sweep's folder, point Hydra at it, and return it.

    `run_id=` on the command line names the sweep.

    Raises:
        SystemExit: the folder exists already or cannot be written, the name is none, or the launcher is not installed.
    """
    if not {"-m", "--multirun"} & set(argv[1:]):
        return None
    settings = _settings(argv[1:])
    _check_launcher(settings.get("hydra/launcher", "basic"))
    sweep_id = settings.get("run_id") or f"sweep-{secrets.token_hex(3)}"
    if not _NAME.fullmatch(sweep_id):
        sys.exit(f"run_id={sweep_id}: names the whole sweep; write one name of letters, digits, '.', '_' and '-'")
    runs_dir = settings.get("runs_dir", "runs")
    folder = Path(runs_dir) / sweep_id
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            sys.exit(f"run_id={sweep_id}: {folder} exists; choose another name for the sweep")
        shutil.copytree(Path(argv[0]).resolve().parent / "conf", folder / "conf")
    except OSError as error:
        sys.exit(f"runs_dir={runs_dir}: {folder} cannot be written ({error}); make room there, or give another folder")
    os.environ[_SWEEP_VARIABLE] = sweep_id
    argv.append(f"hydra.sweep.dir={_quoted(folder)}")
    return folder


def _settings(arguments: Sequence[str]) -> dict[str, str]:
    """Values on the command line that are one text, as Hydra reads them; those of keys that are swept as they stand.

    Raises:
        SystemExit: `runs_dir` is swept.
    """
    overrides = OverridesParser.create().parse_overrides(overrides_of(arguments))
    if any(override.key_or_group == "runs_dir" and override.is_sweep_override() for override in overrides):
        sys.exit("runs_dir: holds the whole sweep; give one folder, and in quotes where commas are part of its name")
    values = {
        override.key_or_group: override.get_value_string() if override.is_sweep_override() else override.value()
        for override in overrides
        if not override.is_delete()
    }
    return {key: str(value) for key, value in values.items() if value is not None}


def _quoted(path: Path) -> str:
    """As Hydra reads it again, whatever its name is made of."""
    return QuotedString(str(path), Quote.single).with_quotes()


def _check_launcher(name: str) -> None:
    """Name the package of a launcher that is not installed, before the sweep has a folder."""
    plugin = "submitit" if name == "slurm" or name.startswith("submitit_") else name
    if plugin not in ("submitit", "joblib"):
        return
    try:
        importlib.import_module(f"hydra_plugins.hydra_{plugin}_launcher")
    except ImportError:
        package = f"hydra-{plugin}-launcher"
        sys.exit(f"hydra/launcher={name}: needs a package that is not installed; pip install {package}")


def run_job(script: Path) -> float | None:
    """Run the current job of the sweep as a process of its own; returns its held-out loss, which some sweepers use.

    A job that a launcher starts once more, such as after a time limit, goes on with its run.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.sweep.dir)
    number = str(hydra.job.num)
    overrides = [text for text in hydra.overrides.task if not text.startswith(("run_id=", "logger.group="))]
    print(f"[{folder.name}/{number}] {' '.join(overrides)}", flush=True)
    job = folder / number
    command = [sys.executable, str(script), f"--config-path={(folder / 'conf').resolve()}"]
    if (job / "config.yaml").exists():
        command += [f"runs_dir={_quoted(folder.parent)}", f"resume={folder.name}/{number}"]
    else:
        command += [*overrides, f"run_id={folder.name}/{number}", f"logger.group={folder.name}"]
    if _wait_for(subprocess.Popen(command, env={**os.environ, **name_parent()})) in (130, -2):
        raise KeyboardInterrupt
    job.mkdir(exist_ok=True)
    summary = _read(job / "summary.json", {})
    if not summary:
        (job / "summary.json").write_text(json.dumps({"run_id": f"{folder.name}/{number}", "status": "failed"}) + "\n")
    (job / "overrides.json").write_text(json.dumps(overrides) + "\n")
    return summary.get("val_loss")


def _wait_for(process: subprocess.Popen[bytes]) -> int:
    """The exit code; a launcher that ends this job meanwhile waits until the run has saved what it has done."""
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal has told the run as well
        process.wait()
        raise
    except BaseException:
        process.terminate()
        process.wait()
        raise


def report(folder: Path) -> int:
    """Print and store (sweep.csv) what became of each job; 1 if any of them did not finish."""
    jobs = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    overrides = [_read(job / "overrides.json", []) for job in jobs]
    rows = []
    for job, own in zip(jobs, overrides, strict=True):
        summary = _read(job / "summary.json", {})
        varied = [text for text in own if not all(text in others for others in overrides)]
        rows.append(
            {
                "run": f"{folder.name}/{job.name}",
                "status": summary.get("status", "failed"),
                "val_loss": summary.get("val_loss"),
                "tokens_per_second": summary.get("tokens_per_second"),
                "overrides": " ".join(varied),
            }
        )
    _write(folder / "sweep.csv", rows)
    for row in rows:
        print("  ".join(_cell(value) for value in row.values()))
    return 0 if rows and all(row["status"] == "finished" for row in rows) else 1


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "status", "val_loss", "tokens_per_second", "overrides"])
        writer.writeheader()
        writer.writerows(rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _read(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise
