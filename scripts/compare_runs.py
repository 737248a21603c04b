r"""Runs that differ in their attention alone, side by side: what each learned from equal tokens, and in what time.

    python train.py -m run_id=sparse_text \
        experiment=sparse_text,sparse_text_sinks,sparse_text_butterfly,sparse_text_strided
    python scripts/compare_runs.py runs/sparse_text --plot docs/images/sparse_text.png

Takes folders of finished runs, or of a sweep, and refuses runs that saw other tokens. Writes a JSON, and held-out loss
over tokens and over seconds as one picture. Seconds are those of training steps alone, with the first logged interval,
in which kernels are compiled, at the median rate.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.drawing import COLOURS, figure, save
from measuring.environment import choose_device
from measuring.report import Report, names, say, table
from measuring.runs import Run, require_comparable

from flashtrain.config.sizes import format_size

HEADERS = (
    "run",
    "of dense pairs",
    "train loss",
    "held-out",
    "tokens/s",
    "MFU",
    "peak GiB",
    "seconds",
    "to dense's loss",
)
LAST = 5  # logged training losses that the final one is the mean of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or of a sweep")
    parser.add_argument("--labels", type=names, help="one for each run (what its layers attend to)")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/sparse_text.json)")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--commit", help="commit of the code, where it ran outside a git clone")
    arguments = parser.parse_args(argv)
    try:
        runs = [Run.read(folder) for folder in jobs(arguments.runs)]
        require_comparable(runs)
        labels = arguments.labels or labels_of(runs)
        if len(labels) != len(runs):
            raise ValueError(f"--labels has {len(labels)} names for {len(runs)} runs")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    report = make_report(runs, labels, arguments)
    say(table(HEADERS, [cells(row, report.rows) for row in report.rows]))
    report.finish()
    if arguments.plot is not None:
        draw(runs, labels, arguments.plot)
    return 0


def jobs(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs; one of a sweep stands for its runs, in their order."""
    found: list[Path] = []
    for path in paths:
        own = sorted((job for job in path.iterdir() if job.name.isdigit()), key=lambda job: int(job.name))
        found += own or [path]
    return found


def labels_of(runs: Sequence[Run]) -> list[str]:
    """The layouts of each run; where they do not tell runs apart, with the run's name."""
    said = [" + ".join(dict.fromkeys(each["layout"] for each in layers_of(run))) for run in runs]
    count = Counter(said)
    return [text if count[text] == 1 else f"{text} ({run.name})" for text, run in zip(said, runs, strict=True)]


def layers_of(run: Run) -> list[dict[str, Any]]:
    """Layouts with their layers, as the summary says it; a dense run says nothing."""
    dense = [{"layout": "dense", "layers": list(range(1, run.config["model.num_layers"] + 1))}]
    return run.summary.get("attention_layers") or dense


def make_report(runs: Sequence[Run], labels: Sequence[str], arguments: argparse.Namespace) -> Report:
    first = runs[0]
    arguments.dry_run = False
    arguments.command = " ".join(("python scripts/compare_runs.py", *(f"runs/{run.name}" for run in runs)))
    arguments.commit = arguments.commit or first.summary.get("git_commit")
    report = Report("sparse_text", arguments, choose_device("auto"))
    if report.content["gpu"] != first.summary["device"]:  # compared elsewhere than trained
        report.content |= {"gpu": first.summary["device"], "versions": None}
    report.content |= {
        "spread": "single runs; tokens_per_second is the median over logged intervals without the first",
        "settings": {
            "model": first.summary["model"],
            "seq_len": first.summary["seq_len"],
            "tokens": first.summary["tokens"],
            "precision": first.summary["precision"],
            "seconds": "of training steps, without validation; the first logged interval at the median rate",
            "seconds_to_loss_of": "seconds to the final held-out loss of each other run; null: not reached",
            "train_loss": f"mean of the last {LAST} logged ones",
            "density": "visible share of all query-key pairs; of_causal: of those that causal attention has",
        },
        "corpus": first.summary.get("corpus"),
        "training": {key: value for key, value in first.config.items() if key.startswith(("trainer.", "optimizer."))},
    }
    finals = {label: run.losses("val_loss")[-1][2] for label, run in zip(labels, runs, strict=True)}
    report.rows.extend(row_of(run, label, finals) for run, label in zip(runs, labels, strict=True))
    return report


def row_of(run: Run, label: str, finals: dict[str, float]) -> dict[str, Any]:
    """A run's row; finals: the last held-out loss of every run."""
    summary, seq_len = run.summary, run.summary["seq_len"]
    train, held_out = run.losses("train_loss"), run.losses("val_loss")
    last = [loss for *_, loss in train[-LAST:]]
    return {
        "label": label,
        "run": run.name,
        "failed": None,
        "attention_backend": summary["attention_backend"],
        "layers": layers_of(run),
        "density": summary["attention_density"],
        "of_causal": summary["attention_density"] * 2 * seq_len / (seq_len + 1),
        "train_loss": sum(last) / len(last),
        "val_loss": held_out[-1][2],
        "tokens_per_second": run.tokens_per_second,
        "mfu": summary.get("mfu"),
        "peak_memory_gib": summary.get("peak_memory_gib"),
        "seconds": train[-1][1],
        "seconds_to_loss_of": {other: run.seconds_to(loss) for other, loss in finals.items() if other != label},
        "held_out": [{"tokens": t, "seconds": s, "loss": loss} for t, s, loss in held_out],
    }


def cells(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[object]:
    dense = next((other["label"] for other in rows if other["of_causal"] > 0.999), None)
    to_dense = row["seconds"] if row["label"] == dense else row["seconds_to_loss_of"].get(dense)
    return [
        row["label"],
        f"{100 * row['of_causal']:.1f} %",
        row["train_loss"],
        row["val_loss"],
        round(row["tokens_per_second"]),
        row["mfu"],
        row["peak_memory_gib"],
        row["seconds"],
        "not reached" if dense is not None and to_dense is None else to_dense,
    ]


def draw(runs: Sequence[Run], labels: Sequence[str], path: Path) -> None:
    """Loss over tokens and over seconds; training losses pale, held-out ones with marks."""
    drawn, axes = figure(1, 2, 10.5, 4.2, sharey=True)
    for axis, place, title in zip(axes[0], (0, 1), ("tokens, in millions", "seconds of training"), strict=True):
        for run, label, colour in zip(runs, labels, COLOURS, strict=False):
            scale = 1e6 if place == 0 else 1.0
            train, held_out = run.losses("train_loss"), run.losses("val_loss")
            axis.plot([p[place] / scale for p in train], [p[2] for p in train], color=colour, alpha=0.2, linewidth=1)
            text = f"{label}: {held_out[-1][2]:.3f} at the end, {run.tokens_per_second / 1000:,.3g} thousand tokens/s"
            points = [p[place] / scale for p in held_out], [p[2] for p in held_out]
            axis.plot(*points, color=colour, marker="o", markersize=4, label=text)
        axis.set_xlim(left=0)
        axis.set_xlabel(title)
    losses = [
        p[2] for run in runs for p in run.losses("val_loss")[1:]
    ]  # the first ones would press all others together
    if losses:
        axes[0, 0].set_ylim(min(losses) - 0.15, max(losses) + 0.3)
    axes[0, 0].set_ylabel("loss, nats a token")
    handles, texts = axes[0, 0].get_legend_handles_labels()
    drawn.legend(handles, texts, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, frameon=False, fontsize=9)
    about = runs[0].summary
    length = format_size(about["seq_len"])
    drawn.suptitle(f"Held-out loss of {about['model']} at {length} tokens of context, {about['device']}", fontsize=12)
    drawn.tight_layout()
    save(drawn, path)


if __name__ == "__main__":
    sys.exit(main())
