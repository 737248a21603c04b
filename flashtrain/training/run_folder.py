"""A run's folder: made once, refused if it exists, written so that nothing half-written is ever read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flashtrain.config import Config, format_size, to_dict

RUN_ID_VARIABLE = "FLASHTRAIN_RUN_ID"


class RunFolder:
    """`runs/<run_id>/` and the names of what lies in it."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self.metrics = path / "metrics.csv"
        self.log = path / "train.log"
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.summary = path / "summary.json"

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Make the folder of a new run.

        Raises:
            ValueError: it exists already, or cannot be written. Two runs started at once get two folders or this error,
                never one folder.
        """
        run_id = config.run_id or os.environ.get(RUN_ID_VARIABLE) or new_run_id(config)
        path = Path(config.runs_dir) / run_id
        with _naming_the_key(config.runs_dir):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                raise ValueError(
                    f"run_id={run_id}: {path} exists; continue it with resume={run_id}, or choose another run_id"
                ) from None
            folder = cls(path, run_id)
            try:
                folder.write_config(config)
            except OSError:
                path.rmdir()  # without a configuration it is no run
                raise
        return folder

    @classmethod
    def reopen(cls, runs_dir: str, run_id: str) -> RunFolder:
        """The folder of an earlier run.

        Raises:
            ValueError: there is no such run.
        """
        folder = cls(Path(runs_dir) / run_id, run_id)
        if not folder.config.is_file():
            known = sorted(str(path.parent.relative_to(runs_dir)) for path in Path(runs_dir).glob("**/config.yaml"))
            hint = f"; runs in {runs_dir}: {', '.join(known[-8:])}" if known else f"; {runs_dir} holds no runs"
            raise ValueError(f"resume={run_id}: {folder.config} does not exist{hint}")
        return folder

    def write_config(self, config: Config) -> None:
        """Store the resolved configuration; an earlier one is kept beside it as config.<n>.yaml."""
        text = yaml.safe_dump(to_dict(config), sort_keys=False)
        if self.config.exists() and (earlier := self.config.read_text()) != text:
            number = len(list(self.path.glob("config.*.yaml"))) + 1
            # A copy: a run without config.yaml could not be resumed, so there is one at any time.
            write_atomically(self.path / f"config.{number}.yaml", earlier)
        write_atomically(self.config, text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json; what a resumed run has no new figure for keeps its last one."""
        try:
            earlier = dict(json.loads(self.summary.read_text()))
        except (FileNotFoundError, TypeError, ValueError):  # none, or a damaged one
            earlier = {}
        known = {key: value for key, value in summary.items() if value is not None}
        write_atomically(self.summary, json.dumps({**summary, **earlier, **known}, indent=2) + "\n")


def new_run_id(config: Config) -> str:
    """A name that says what the run is, with random letters instead of a clock that ranks could read differently."""
    # A folder that weights come from may have any name; that of a run can be given to resume.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", config.model.name).strip("._-")
    return f"{name or 'run'}-{format_size(config.seq_len)}-{secrets.token_hex(3)}"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old or the new one, never a part.

    Raises:
        OSError: the disk is full or not writable; the message names the file, and the old one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: cannot write {path}") from error


@contextlib.contextmanager
def _naming_the_key(runs_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"runs_dir={runs_dir}: {error}; make room there, or give another folder") from error


def git_commit() -> str | None:
    """The commit of the code that runs, with '+changes' where the working tree differs; None outside git."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
