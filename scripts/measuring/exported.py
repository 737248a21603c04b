"""A run on images as a folder to publish: its weights, and a result that says what they reach and what they took."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtrain.interchange.classifier_folder import RESULT, ClassifierFolder, is_classifier_folder, save_classifier
from measuring.classified import MINUTES, Classified
from measuring.report import table
from measuring.trained import Run

# Of an evaluation; what it says of the run is said by the run.
_EVALUATED = ("evaluated", "images", "accuracy", "accuracy_error", "classes", "shortcut", "precision")
_FROM_SUMMARY = (
    "model", "parameters", "protocol", "dense_target", "pretraining", "tokens", "corpus", "git_commit", "device",
    "seq_len",
)  # fmt: skip


def export_classifier(
    folder: Path, run: Run, out: Path, dtype: str, evaluation: Path | None, others: Sequence[Path]
) -> dict[str, Any]:
    """Write `out`; its result.

    Args:
        folder: the run's.
        run: what `load_run` makes of it.
        evaluation: JSON of scripts/evaluate.py; None takes the accuracy of the run's last validation.
        others: runs that differ in their seed alone.

    Raises:
        ValueError: `folder` is no run's folder, the evaluation is that of another run, or the others differ in more
            than the seed.
    """
    if not (folder / "summary.json").is_file():
        raise ValueError(f"{folder}: has no summary.json, which says what the weights took; give the run's folder")
    own, seeds = Classified.read(folder), [Classified.read(other) for other in others]
    for other in seeds:
        if changes := other.differs_from(own):
            key, value = next(iter(changes.items()))
            raise ValueError(f"{other.run.name}: has {key}={value}, not only another seed; leave it out")
    result = result_of(own, run, seeds, evaluation) | begun_from(own, folder) | {"weights_dtype": dtype}
    save_classifier(out, ClassifierFolder(run.config, run.weights, run.step, run.averaged, run.corpus, result), dtype)
    return result


def result_of(own: Classified, run: Run, others: Sequence[Classified], evaluation: Path | None) -> dict[str, Any]:
    """What result.json says."""
    summary, runs = own.run.summary, [own, *others]
    if run.step != summary["steps"]:
        raise ValueError(f"{own.run.name}: its newest checkpoint is of step {run.step}, and it had {summary['steps']}")
    judged = _evaluation(run, evaluation)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "run": own.run.name,
        **(judged or {"accuracy": own.accuracy, "accuracy_error": own.accuracy_error, "evaluated": "last validation"}),
        "seed": own.seed,
        "steps": run.step,
        "gpu_minutes": own.gpu_minutes,
        "gpu_minutes_are": MINUTES,
        "weights": "running mean" if run.averaged else "newest",
        **{key: summary.get(key) for key in _FROM_SUMMARY},
        "seeds": [
            {
                "seed": each.seed,
                "val_accuracy": each.accuracy,
                "val_accuracy_error": each.accuracy_error,
                "gpu_minutes": each.gpu_minutes,
                "failed": each.failed,
                "failed_attempts": each.failed_attempts,
            }
            for each in sorted(runs, key=lambda each: each.seed)
        ],
        "failed_seeds": sum(each.failed + each.failed_attempts for each in runs),
    }


def begun_from(own: Classified, folder: Path) -> dict[str, Any]:
    """The weights that a run started from, and GPU minutes with theirs; None where nobody knows."""
    init_from = own.run.config.get("model.init_from")
    if init_from is None:
        return {"init_from": None, "gpu_minutes_in_all": own.gpu_minutes}
    before = next(filter(None, map(_known, (Path(init_from), folder.parent / init_from))), None)
    earlier = None if before is None else before["gpu_minutes_in_all"]
    both = None if own.gpu_minutes is None or earlier is None else own.gpu_minutes + earlier
    return {"init_from": Path(init_from).name, "gpu_minutes_in_all": both}


def _known(place: Path) -> dict[str, Any] | None:
    """What is known of the weights at a place: of an exported folder, or of a run."""
    if is_classifier_folder(place):
        found: dict[str, Any] = json.loads((place / RESULT).read_text())
        return found
    return begun_from(Classified.read(place), place) if (place / "summary.json").is_file() else None


def _evaluation(run: Run, file: Path | None) -> dict[str, Any] | None:
    if file is None:
        return None
    try:
        found = json.loads(file.read_text())
        about, chosen = found["run"], {key: found.get(key) for key in _EVALUATED}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a JSON of scripts/evaluate.py ({error})") from error
    if (about.get("id"), about.get("step")) != (run.id, run.step):
        raise ValueError(
            f"{file}: is about {about.get('id')} after step {about.get('step')}, not about {run.id} after {run.step}; "
            "evaluate this one"
        )
    return chosen | {"evaluated_on": found.get("gpu")}


def tell_result(result: dict[str, Any]) -> str:
    """The result for people: a line, and a table of the seeds."""
    accuracy, error, minutes = result["accuracy"], result["accuracy_error"], result["gpu_minutes_in_all"]
    told = "unknown" if accuracy is None else f"{100 * accuracy:.2f} % +- {100 * error:.2f}"
    took = "" if minutes is None else f", {minutes:.1f} GPU minutes"
    rows = [
        [
            str(each["seed"]),
            "" if each["val_accuracy"] is None else f"{100 * each['val_accuracy']:.2f}",
            each["gpu_minutes"],
            "failed" if each["failed"] else "",
        ]
        for each in result["seeds"]
    ]
    return f"{told} after {result['steps']:,} steps{took}\n" + table(("seed", "held-out %", "GPU minutes", ""), rows)
