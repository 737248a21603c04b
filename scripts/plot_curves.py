"""Training and held-out loss of one or more runs as a picture.

python scripts/plot_curves.py runs/<run_id> --x minutes --out docs/loss.png
python scripts/plot_curves.py runs/a runs/b --labels 4k,16k --out docs/context.png
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from measuring.drawing import COLOURS, figure, save
from measuring.report import names
from measuring.runs import metrics

X_LABELS = {"step": "optimiser step", "tokens": "tokens, in millions", "minutes": "minutes of training"}


@dataclass
class Curve:
    """A run's losses: (x, loss) in the order of the steps."""

    train: list[tuple[float, float]]
    held_out: list[tuple[float, float]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or metrics.csv files")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    parser.add_argument("--x", choices=tuple(X_LABELS), default="tokens", help="(tokens)")
    parser.add_argument("--labels", type=names, help="one for each run (the run's id)")
    parser.add_argument("--title", help="(the run's model, length and device)")
    parser.add_argument("--hide", type=float, default=0.03, help="share of the run whose losses may lie above (0.03)")
    parser.add_argument("--unit", default="nats a token", help="of the loss (nats a token)")
    arguments = parser.parse_args(argv)
    labels = arguments.labels or [run.parent.name if run.suffix == ".csv" else run.name for run in arguments.runs]
    if len(labels) != len(arguments.runs):
        parser.error(f"--labels has {len(labels)} names for {len(arguments.runs)} runs")
    try:
        curves = [read(run, arguments.x) for run in arguments.runs]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    draw(curves, labels, arguments)
    return 0


def read(run: Path, x: str) -> Curve:
    """The curve in a run's metrics.csv. Minutes are those of training steps, without validation and checkpoints.

    Raises:
        ValueError: the file has no losses.
    """
    train: list[tuple[float, float]] = []
    held_out: list[tuple[float, float]] = []
    minutes, tokens = 0.0, 0.0
    for row in metrics(run):
        done, rate = float(row["tokens"]), row.get("tokens_per_second")
        if rate:
            minutes += (done - tokens) / float(rate) / 60
            tokens = done
        at = {"step": float(row["step"]), "tokens": done / 1e6, "minutes": minutes}[x]
        for name, points in (("train_loss", train), ("val_loss", held_out)):
            if row.get(name):
                points.append((at, float(row[name])))
    if not train:
        raise ValueError(f"{run} holds no training loss")
    return Curve(train, held_out)


def draw(curves: list[Curve], labels: list[str], arguments: argparse.Namespace) -> None:
    drawn, axes = figure()
    axis = axes[0, 0]
    for curve, label, colour in zip(curves, labels, COLOURS, strict=False):
        prefix = f"{label}: " if len(curves) > 1 else ""
        axis.plot(*zip(*curve.train, strict=True), color=colour, alpha=0.35, linewidth=1.2, label=f"{prefix}training")
        if curve.held_out:
            last = curve.held_out[-1][1]
            points = list(zip(*curve.held_out, strict=True))
            axis.plot(*points, color=colour, marker="o", markersize=4, label=f"{prefix}held-out, {last:.3f} at the end")
    axis.set_ylim(top=max(highest(curve, arguments.hide) for curve in curves))
    axis.set_xlim(left=0)
    axis.set_xlabel(X_LABELS[arguments.x])
    axis.set_ylabel(f"loss, {arguments.unit}")
    axis.set_title(arguments.title if arguments.title is not None else about(arguments.runs[0]), fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    save(drawn, arguments.out)


def highest(curve: Curve, hide: float) -> float:
    """The largest loss after the first share `hide` of the training losses, with some room above."""
    kept = curve.train[int(hide * len(curve.train)) :]
    top, low = max(loss for _, loss in kept), min(loss for _, loss in kept)
    return top + 0.05 * (top - low) + 1e-3


def about(run: Path) -> str:
    """What the run's summary says it is; empty where there is none."""
    path = (run.parent if run.suffix == ".csv" else run) / "summary.json"
    if not path.is_file():
        return ""
    summary = json.loads(path.read_text())
    return f"{summary.get('model')} on {summary.get('seq_len'):,} tokens of context, {summary.get('device')}"


if __name__ == "__main__":
    sys.exit(main())
