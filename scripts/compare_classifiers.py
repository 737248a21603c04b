r"""Runs on images that differ in a choice each, side by side: how right, with how many failed seeds, in what time.

    python train.py -m run_id=ablation64 'experiment=glob(pathfinder64*)' seed=1,2
    python scripts/compare_classifiers.py runs/ablation64 --plot docs/images/ablation64.png

Takes folders of runs, or of a sweep; those that failed count as such. Runs that differ in their seed alone are one row,
named by what its configuration has and the first row's has not. Accuracies are those of the runs' last validation, on
images that were not trained on. Writes a JSON, and accuracy over seconds of training as a picture. Seconds are those of
steps alone, with the first logged interval, in which kernels are compiled, at the median rate; GPU minutes are of all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_runs import jobs
from measuring.classified import CHANCE, MINUTES, Classified, error_of_mean, mean_of
from measuring.drawing import COLOURS, figure, save
from measuring.environment import choose_device
from measuring.report import Report, command_line, names, say, table

HEADERS = ("choice", "seeds", "failed", "held-out %", "+-", "of those not failed", "GPU minutes", "tokens/s")
# Keys that come with another one, which names the choice.
_FOLLOW = ("optimizer.matrix_lr", "classifier.proximity", "classifier.token_order")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or of a sweep")
    parser.add_argument("--labels", type=names, help="one for each row (what it differs in)")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/<the first folder's name>.json)")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--commit", help="commit of the code, where it ran outside a git clone")
    arguments = parser.parse_args(argv)
    try:
        rows = grouped([Classified.read(folder) for folder in jobs(arguments.runs)])
        labels = arguments.labels or [label_of(runs[0], rows[0][0]) for runs in rows]
        if len(labels) != len(rows):
            raise ValueError(f"--labels has {len(labels)} names for {len(rows)} rows")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    report = make_report(rows, labels, arguments, sys.argv[1:] if argv is None else argv)
    say(table(HEADERS, [cells(row) for row in report.rows]))
    report.finish()
    if arguments.plot is not None:
        draw(rows, labels, arguments.plot)
    return 0


def grouped(runs: Sequence[Classified]) -> list[list[Classified]]:
    """Runs that differ in their seed alone together, in the order in which the first of each comes.

    Raises:
        ValueError: a seed comes twice in one row, or rows were judged by other images or trained on other devices.
    """
    rows: list[list[Classified]] = []
    for run in runs:
        row = next((row for row in rows if not run.differs_from(row[0])), None)
        if row is None:
            rows.append([run])
            continue
        if run.run.config["seed"] in [other.run.config["seed"] for other in row]:
            raise ValueError(f"{run.run.name}: is {row[0].run.name} again, with the same seed; leave one of them out")
        row.append(run)
    for key in ("images.val_images", "images.seed", "images.contour_length", "images.preset", "seq_len"):
        for row in rows:
            first, other = rows[0][0].run, row[0].run
            if first.config.get(key) != other.config.get(key):
                values = first.config.get(key), other.config.get(key)
                raise ValueError(
                    f"{key} is {values[0]} in {first.name} and {values[1]} in {other.name}: take runs on the same kind "
                    "of images"
                )
    return rows


def label_of(run: Classified, first: Classified) -> str:
    """What a row has and the first one has not; of the first its name."""
    changes = run.differs_from(first)
    if not changes:
        return "base"
    if "attention.layout.name" in changes:
        changes = {key: value for key, value in changes.items() if not key.startswith("attention")} | {
            "attention.layout": changes["attention.layout.name"]
        }
    if "optimizer.name" in changes:
        changes["optimizer"] = changes.pop("optimizer.name")
    own = {key: value for key, value in changes.items() if key not in _FOLLOW} or changes
    return ", ".join(f"{key.split('.')[-1]} {_short(value)}" for key, value in own.items())


def _short(value: Any) -> str:
    return "none" if value in (None, []) else str(value)


def make_report(
    rows: Sequence[Sequence[Classified]], labels: Sequence[str], arguments: argparse.Namespace, argv: Sequence[str]
) -> Report:
    first = rows[0][0].run
    arguments.dry_run, arguments.command = False, command_line("compare_classifiers", argv)
    arguments.commit = arguments.commit or first.summary.get("git_commit")
    name = arguments.runs[0].resolve().name
    report = Report(name, arguments, choose_device("auto"))
    if report.content["gpu"] != first.summary.get("device"):  # compared elsewhere than trained
        report.content |= {"gpu": first.summary.get("device"), "versions": None}
    report.content |= {
        "spread": "accuracy_error is the standard error of the mean over seeds, and not less than that of the images, "
        "which are the same for all runs",
        "settings": {
            "images": first.config["images.val_images"],
            "protocol": first.summary.get("protocol"),
            "failed": f"below {CHANCE} at the end, or the run did not come to it",
            "gpu_minutes": MINUTES,
            "corpus": first.summary.get("corpus"),
        },
        "training": {key: value for key, value in first.config.items() if key.startswith(("trainer.", "optimizer."))},
    }
    report.rows.extend(row_of(runs, label, rows[0][0]) for runs, label in zip(rows, labels, strict=True))
    return report


def row_of(runs: Sequence[Classified], label: str, first: Classified) -> dict[str, Any]:
    """The figures of runs that differ in their seed alone."""
    right, learned = ([run.accuracy for run in some if run.accuracy is not None] for some in (
        runs, [run for run in runs if not run.failed]
    ))  # fmt: skip
    minutes = [run.gpu_minutes for run in runs if run.gpu_minutes is not None]
    return {
        "label": label,
        "differs": runs[0].differs_from(first),
        "accuracy": mean_of(right) if right else None,
        "accuracy_error": error_of_mean(runs),
        "accuracy_of_learned": mean_of(learned) if learned else None,
        "failed_seeds": sum(run.failed + run.failed_attempts for run in runs),
        "gpu_minutes": mean_of(minutes) if minutes else None,
        "tokens_per_second": runs[0].run.tokens_per_second if right else None,
        "attention_density": runs[0].run.summary.get("attention_density"),
        "runs": [
            {
                "run": run.run.name,
                "seed": run.seed,
                "status": run.run.summary["status"],
                "steps": run.run.summary["steps"],
                "accuracy": run.accuracy,
                "accuracy_error": run.accuracy_error,
                "failed": run.failed,
                "failed_attempts": run.failed_attempts,
                "gpu_minutes": run.gpu_minutes,
                "curve": [{"seconds": seconds, "accuracy": value} for seconds, value in run.curve],
            }
            for run in runs
        ],
    }


def cells(row: dict[str, Any]) -> list[object]:
    def percent(key: str) -> str:
        return "" if row[key] is None else f"{100 * row[key]:.2f}"

    rate = row["tokens_per_second"]
    return [
        row["label"],
        str(len(row["runs"])),
        str(row["failed_seeds"]),
        percent("accuracy"),
        percent("accuracy_error"),
        percent("accuracy_of_learned"),
        row["gpu_minutes"],
        None if rate is None else round(rate),
    ]


def draw(rows: Sequence[Sequence[Classified]], labels: Sequence[str], path: Path) -> None:
    """Accuracy over seconds of training, and where each row ended with its seeds, where there are several."""
    several = len(rows) > 1 or len(rows[0]) > 1
    height = 0.6 + 0.38 * max(len(rows), 9)
    drawn, axes = figure(1, 2, 12.5, height, width_ratios=(1.25, 1)) if several else figure(1, 1, 7.5, height)
    over = axes[0][0]
    for number, (runs, label) in enumerate(zip(rows, labels, strict=True)):
        colour, style = COLOURS[number % len(COLOURS)], ("-", "--", ":")[number // len(COLOURS) % 3]
        for seed, run in enumerate(runs):
            over.plot(
                [seconds for seconds, _ in run.curve], [100 * value for _, value in run.curve], color=colour,
                linestyle=style, linewidth=1.6, alpha=1.0 if seed == 0 else 0.45, label=None if seed else label,
            )  # fmt: skip
    over.set_xlabel("seconds of training")
    over.set_ylabel("held-out images that are right, %")
    over.legend(fontsize=8, frameon=False)
    if several:
        draw_ends(rows, labels, axes[0][1])
    about = rows[0][0].run
    count = about.config["images.val_images"]
    drawn.suptitle(f"{count:,} held-out images of {round(about.config['seq_len'] ** 0.5)} pixels, "
                   f"{about.summary.get('device')}", fontsize=12)  # fmt: skip
    drawn.tight_layout()
    save(drawn, path)


def draw_ends(rows: Sequence[Sequence[Classified]], labels: Sequence[str], axis: Any) -> None:
    """The last accuracy of each seed, and the mean of a row with its standard error."""
    for number, runs in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        places = [100 * run.accuracy for run in runs if run.accuracy is not None]
        axis.plot(places, [number] * len(places), "o", color=colour, markersize=6)
        error = error_of_mean(runs)
        if error is not None:
            axis.errorbar(sum(places) / len(places), number, xerr=100 * error, color=colour, capsize=3)
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("at the end, %; a point is a seed")
    axis.grid(axis="x", color="#dddddd", linewidth=0.8)


if __name__ == "__main__":
    sys.exit(main())
