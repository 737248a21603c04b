"""An evaluation's figures in the tracked run that they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.config.sizes import format_size
from flashtrain.training.trackers import wandb_mode
from measuring.trained import Run

TABLES = ("position", "passkey", "associative", "induction")


def wandb_id(folder: Path, run: Run | None) -> str:
    """The id of the run's own wandb run.

    Raises:
        ValueError: it has none.
    """
    file = folder / "wandb_id"
    if run is None or run.config.logger.name != "wandb" or not file.is_file():
        raise ValueError(f"--track: {folder} has no wandb run; leave it out")
    return file.read_text().strip()


def log_tables(folder: Path, run: Run, result: dict[str, Any]) -> None:
    """Log perplexity and tables of a language model's result to its wandb run, which is opened again.

    Their names say the context, and how positions were extended, so that several evaluations lie beside each other.
    """
    import wandb

    logger = run.config.logger
    tracked = wandb.init(
        project=logger.project, id=wandb_id(folder, run), resume="allow", dir=str(folder),
        mode=wandb_mode(logger.mode), settings=wandb.Settings(silent=True, console="off", disable_git=True),
    )  # fmt: skip
    place = "_".join(("evaluation", format_size(result["context"]), *filter(None, (result["extended"],))))
    figures: dict[str, Any] = {}
    for name in TABLES:
        if rows := result.get(name):
            columns = list(rows[0])
            figures[f"{place}/{name}"] = wandb.Table(columns, [[row[column] for column in columns] for row in rows])
    if "perplexity" in result:
        figures[f"{place}/perplexity"] = result["perplexity"]["perplexity"]
    tracked.log(figures)
    tracked.finish()
