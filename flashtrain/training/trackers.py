"""Where figures go: metrics.csv always, wandb or TensorBoard beside it."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from flashtrain.config import Config, to_dict
from flashtrain.training import recall_hits
from flashtrain.training.by_position import columns
from flashtrain.training.run_folder import RunFolder, write_atomically

logger = logging.getLogger("flashtrain")

# wandb writes blocks of 32 KiB: more rows than one has.
_NOT_YET_WRITTEN = 300
_PATIENCE = 10.0  # seconds: after SIGTERM a run may have half a minute, and has yet to save
_SEARCH = 30.0  # seconds to reach wandb in at the start

COLUMNS = (
    "step",
    "tokens",
    "train_loss",
    "val_loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu",
    "peak_memory_gib",
    "val_perplexity",
    "val_accuracy",
)


class Tracker(Protocol):
    def log(self, row: Mapping[str, float | int | None]) -> None: ...

    def log_text(self, step: int, name: str, text: str) -> None: ...

    def finish(self, status: str, summary: Mapping[str, Any]) -> None: ...


def build_trackers(config: Config, folder: RunFolder, resumed_step: int | None) -> list[Tracker]:
    """The trackers of a run; `resumed_step` is where a resumed run goes on, and what came after it is cut."""
    more = [
        *(("stage",) if config.curriculum is not None else ()),
        *(columns(config.seq_len) if config.trainer.val_by_position else ()),
        *(recall_hits.COLUMNS if config.trainer.val_recall else ()),
    ]
    trackers: list[Tracker] = [CsvTracker(folder.metrics, resumed_step, (*COLUMNS, *more))]
    if config.logger.name == "wandb":
        trackers.append(WandbTracker(config, folder))
    elif config.logger.name == "tensorboard":
        trackers.append(TensorBoardTracker(folder.path / "tensorboard", resumed_step))
    return trackers


class CsvTracker:
    """metrics.csv: one row a logged step, an empty cell where a figure does not exist at that step."""

    def __init__(self, path: Path, resumed_step: int | None, columns: tuple[str, ...] = COLUMNS) -> None:
        self.path, self.columns = path, columns
        kept: list[dict[str, str]] = []
        if path.exists() and resumed_step is not None:
            with path.open(newline="") as file:
                # A killed run may leave half a row; it lies after the last checkpoint and goes with the others.
                kept = [
                    row for row in csv.DictReader(file) if row["step"].isdigit() and int(row["step"]) <= resumed_step
                ]
        lines = [",".join(columns)] + [",".join(row.get(column) or "" for column in columns) for row in kept]
        write_atomically(path, "\n".join(lines) + "\n")
        self._last = kept[-1] if kept else {}

    def log(self, row: Mapping[str, float | int | None]) -> None:
        # repr keeps every bit of a float
        cells = {column: "" if row.get(column) is None else repr(row[column]) for column in self.columns}
        try:
            with self.path.open("r+") as file:
                end = file.seek(0, os.SEEK_END)
                if cells["step"] == self._last.get("step"):  # figures that came after their step's row was written
                    cells = {column: cells[column] or self._last.get(column) or "" for column in self.columns}
                    end -= len(",".join(self._last.get(column) or "" for column in self.columns)) + 1
                    file.seek(end)
                    file.truncate()
                file.write(",".join(cells.values()) + "\n")
        except OSError as error:  # which names no file where a write, and not the opening, failed
            message = f"{error.strerror}: cannot write {self.path}; earlier checkpoints are whole: make room and resume"
            raise OSError(error.errno, message) from error
        self._last = cells

    def log_text(self, step: int, name: str, text: str) -> None:
        pass

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        pass


class WandbTracker:
    """One wandb run for one flashtrain run, the same again when it resumes.

    Online where a key is configured and wandb can be reached, offline otherwise, never a prompt. The id lies in the
    run's folder from the first second, so that a run killed before its first checkpoint keeps it too.

    What is logged goes to a process of wandb's own. Slurm sends SIGTERM to it too, and it ends at once, with rows that
    it has not written; then another is started, for the same wandb run, which gets the latest rows once more.

    Attributes:
        run: wandb's; None once wandb can no longer be reached.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        self._latest: deque[dict[str, float | int]] = deque(maxlen=_NOT_YET_WRITTEN)
        self._mode = wandb_mode(config.logger.mode)
        self.run = self._begin_or_offline()

    def log(self, row: Mapping[str, float | int | None]) -> None:
        known = {name: value for name, value in row.items() if value is not None}
        self._tell(lambda run: run.log(known))
        self._latest.append(known)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._tell(lambda run: run.log({"step": step, name: text}))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        def end(run: Any) -> None:
            run.summary.update(dict(summary))
            run.finish(exit_code=0 if status in ("finished", "stopped") else 1)

        self._tell(end)

    def _begin_or_offline(self) -> Any:
        """A configured key says nothing of a network: where wandb cannot be reached, `auto` goes offline.

        Raises:
            ValueError: it cannot be reached, or has no key, and logger.mode=online asks for it.
        """
        from wandb.errors import Error

        asked = self._config.logger.mode
        shorter = asked == "auto" and "WANDB_INIT_TIMEOUT" not in os.environ
        try:
            return self._begin(**({"init_timeout": _SEARCH} if shorter else {}))
        except Error as error:
            reason = " ".join(str(error).split())
            if asked != "auto" or self._mode != "online":
                way_out = "write logger.mode=offline, or logger=csv for none"
                raise ValueError(f"logger.mode={asked}: wandb did not start ({reason}); {way_out}") from error
            logger.warning("wandb cannot be reached, going on offline; `wandb sync` uploads the run later (%s)", reason)
        self._forget()
        self._mode = "offline"
        return self._begin()

    def _begin(self, **settings: Any) -> Any:
        import wandb

        config, folder = self._config, self._folder
        id_file = folder.path / "wandb_id"
        if not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4))
        run = wandb.init(
            project=config.logger.project,
            id=id_file.read_text().strip(),
            resume="allow",
            name=folder.run_id,
            group=config.logger.group,
            tags=list(config.logger.tags),
            mode=self._mode,
            dir=str(folder.path),
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, **settings),
        )
        run.config.update(to_dict(config), allow_val_change=True)
        run.define_metric("step")
        run.define_metric("tokens")
        run.define_metric("*", step_metric="step")
        return run

    def _tell(self, what: Callable[[Any], None]) -> None:
        """Do that with the wandb run; where it fails, once more with a new process of wandb's, and then never again:
        training goes on without, all rows are in metrics.csv."""
        if self.run is None:
            return
        try:
            what(self.run)
        except Exception as error:
            logger.warning("wandb did not take it (%s: %s); starting its process anew", type(error).__name__, error)
            try:
                self._begin_again()
                what(self.run)
            except Exception as second:
                logger.warning("wandb cannot be reached (%s: %s); see metrics.csv", type(second).__name__, second)
                self.run = None

    @staticmethod
    def _forget() -> None:
        """End wandb's process, which takes no second run of the same id."""
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown()  # says once more that it is gone, if it is

    def _begin_again(self) -> None:
        self._forget()
        self.run = self._begin(init_timeout=_PATIENCE)
        for row in self._latest:
            self.run.log(row)


def wandb_mode(mode: Literal["auto", "online", "offline"]) -> Literal["online", "offline", "disabled"]:
    """online or offline: as asked; `auto` is online only where a key is configured."""
    if mode != "auto":
        return mode
    for wanted in ("online", "offline", "disabled"):
        if os.environ.get("WANDB_MODE") == wanted:
            return wanted
    return "online" if os.environ.get("WANDB_API_KEY") or _netrc_names("api.wandb.ai") else "offline"


def _netrc_names(host: str) -> bool:
    import netrc

    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return path.exists() and netrc.netrc(str(path)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False


class TensorBoardTracker:
    def __init__(self, path: Path, resumed_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("logger=tensorboard: tensorboard is not installed; pip install tensorboard") from None
        self.writer = SummaryWriter(str(path), purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, row: Mapping[str, float | int | None]) -> None:
        step = int(row["step"] or 0)
        for name, value in row.items():
            if value is not None and name != "step":
                self.writer.add_scalar(name, value, step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, text, step)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self.writer.close()
