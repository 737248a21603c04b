"""Pathfinder images: look at them, pack them, count them. See data/pathfinder.md.

    python scripts/pathfinder.py sheet --preset lra128 --out sheet.png
    python scripts/pathfinder.py make --preset lra128 --split train --count 200000 --out data/prepared --targets
    python scripts/pathfinder.py statistics --preset lra128 --count 500

--set changes a parameter of the preset (flashtrain/data/pathfinder/parameters.py names them all), such as
--set contour_length=9 distractor_count=4 seeding_flaw=false.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring.drawing import COLOURS, figure, save

from flashtrain.data.pathfinder import PRESETS, PathfinderSpec, generate, prepare, spec_of
from flashtrain.data.pathfinder.images import geometry, stream_key
from flashtrain.data.pathfinder.statistics import image_statistics, marker_distances, shortcut_accuracy
from flashtrain.training.run_folder import git_commit


def main(argv: list[str] | None = None) -> int:
    parser = parse()
    arguments = parser.parse_args(argv)
    if arguments.count < 1:
        parser.error(f"--count {arguments.count}: must be at least 1")
    try:
        spec = spec_of(arguments.preset, **dict(arguments.set))
        arguments.action(spec, arguments)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    for action, about in ((sheet, "a picture of samples"), (make, "a packed file"), (statistics, "figures")):
        command = actions.add_parser(action.__name__, help=about, description=action.__doc__)
        command.set_defaults(action=action)
        command.add_argument("--preset", choices=tuple(PRESETS), default="lra128", help="(lra128)")
        command.add_argument("--set", type=change, nargs="+", default=[], metavar="KEY=VALUE", help="other parameters")
        command.add_argument("--split", default="train", help="(train)")
        command.add_argument("--seed", type=int, default=0, help="(0)")
        if action is sheet:
            command.add_argument("--count", type=int, default=24, help="(24)")
            command.add_argument("--first", type=int, default=0, help="number of the first image (0)")
            command.add_argument("--targets", action="store_true", help="beside each image, its targets per pixel")
            command.add_argument("--out", type=Path, required=True, help="PNG to write")
        elif action is make:
            command.add_argument("--count", type=int, required=True, help="images")
            command.add_argument("--targets", action="store_true", help="with targets per pixel: twice the size")
            command.add_argument("--workers", type=int, help="processes (one for each core)")
            command.add_argument("--out", type=Path, required=True, help="folder of the file")
        else:
            command.add_argument("--count", type=int, default=500, help="(500)")
            command.add_argument("--out", type=Path, help="also write the figures into this JSON")
    return parser


def change(text: str) -> tuple[str, Any]:
    """Argument type: KEY=VALUE, the value as JSON where it is."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def sheet(spec: PathfinderSpec, arguments: argparse.Namespace) -> None:
    """Draw a contact sheet: samples with their labels."""
    made = generate(spec, arguments.seed, arguments.split, arguments.first, arguments.count, targets=True)
    tiles = list(made.images)
    if arguments.targets and made.targets is not None:
        # 0, 1, 2 and 3 as four greys, right of each image
        tiles = [np.hstack([image, 85 * target]) for image, target in zip(tiles, made.targets, strict=True)]
    columns = min(len(tiles), 4 if arguments.targets else 6)
    rows = math.ceil(len(tiles) / columns)
    height, width = tiles[0].shape
    drawn, axes = figure(rows, columns, width=2.2 * columns * width / height, height=2.4 * rows)
    for axis in axes.flat:
        axis.axis("off")
    for number, (axis, tile, label) in enumerate(zip(axes.flat, tiles, made.labels, strict=False)):
        axis.imshow(tile, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        about = f"{arguments.first + number}: label {label}, {'one contour' if label else 'two contours'}"
        axis.set_title(about, fontsize=8, color=COLOURS[3 if label else 0])
    save(drawn, arguments.out)


def make(spec: PathfinderSpec, arguments: argparse.Namespace) -> None:
    """Generate a split into a packed file, or find the one of an earlier call."""
    start = time.perf_counter()
    packed = prepare(
        arguments.out,
        spec,
        arguments.seed,
        arguments.split,
        arguments.count,
        targets=arguments.targets,
        workers=arguments.workers,
    )
    size = packed.path.stat().st_size / 2**20
    print(f"{packed.path}: {len(packed):,} images, {size:,.0f} MiB, {time.perf_counter() - start:.0f} s")
    print(f"fingerprint {packed.fingerprint}")


def statistics(spec: PathfinderSpec, arguments: argparse.Namespace) -> None:
    """Print figures over images, for both labels and each, and how fast one core makes them."""
    generate(spec, arguments.seed, arguments.split, 0, 1)  # compiles, and computes the tables
    start = time.process_time()
    made = generate(spec, arguments.seed, arguments.split, 0, arguments.count)
    rate = arguments.count / (time.process_time() - start)
    figures = image_statistics(made.images) | {"disc distance": marker_distances(made.markers)}
    groups = {"all": made.labels >= 0, "label 0": made.labels == 0, "label 1": made.labels == 1}
    print(f"{'':14}" + "".join(f"{name:>24}" for name in groups))
    for name, values in figures.items():
        cells = [cell(values[group]) for group in groups.values()]
        print(f"{name:14}" + "".join(f"{text:>24}" for text in cells))
    print(f"\nstandard errors after +-; most components in an image: {figures['components'].max():.0f}")
    print(f"label 1: {made.labels.mean():.3f} of {arguments.count} images")
    key = stream_key(spec, arguments.seed, arguments.split)
    drawn = [len(geometry(spec, key, index).distractors) for index in range(arguments.count)]
    print(f"distractors drawn: {np.mean(drawn):.2f} of {spec.distractor_count} wanted")
    accuracy = shortcut_accuracy(marker_distances(made.markers), made.labels)
    print(f"label guessed from the discs' distance alone: {accuracy:.3f} +- {0.5 / math.sqrt(arguments.count):.3f}")
    print(f"one core makes {rate:.0f} images a second")
    if arguments.out is not None:
        content = {
            "benchmark": "pathfinder", "commit": git_commit(), "command": shlex.join(["python", *sys.argv]),
            "spec": spec.as_dict(), "count": arguments.count, "seed": arguments.seed, "split": arguments.split,
            "mean": {name: float(values.mean()) for name, values in figures.items()},
            "standard_deviation": {name: float(values.std()) for name, values in figures.items()},
            "most_components": float(figures["components"].max()), "label_1": float(made.labels.mean()),
            "distractors_drawn": float(np.mean(drawn)), "shortcut_accuracy": float(accuracy),
            "images_per_second_per_core": rate,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(content, indent=2) + "\n")


def cell(values: np.ndarray) -> str:
    if not len(values):
        return "-"
    return f"{values.mean():.5g} +- {values.std() / math.sqrt(len(values)):.2g}"


if __name__ == "__main__":
    sys.exit(main())
