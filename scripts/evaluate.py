"""How right a trained run is on data that it was not trained on.

    python scripts/evaluate.py runs/<run_id>                                     new images of the run's own kind
    python scripts/evaluate.py runs/<run_id> --images lra32 --count 20000
    python scripts/evaluate.py runs/<run_id> --release lra_release --side 32     the Long Range Arena's test images
    python scripts/evaluate.py runs/<run_id> --npz images.npz --out result.json

Takes the newest checkpoint (the mean of the weights, where the run kept one) and prints the accuracy with its standard
error, that of each class, that of guessing from the distance between the two discs alone, and the images per second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring.discs import find_discs
from measuring.environment import choose_device, facts
from measuring.judged import GENERATED, Judged, choose_images
from measuring.report import say, table
from measuring.trained import Run, load_run
from rich.console import Console
from rich.progress import track

from flashtrain.config.schema import ClassifierConfig, ImagesConfig
from flashtrain.data.image_set import PARTS
from flashtrain.data.images import StoredImages, held_out_batches
from flashtrain.data.pathfinder import PRESETS
from flashtrain.data.pathfinder.statistics import marker_distances, shortcut_accuracy
from flashtrain.data.release import DIFFICULTIES
from flashtrain.training.attention_report import AttentionReport
from flashtrain.training.classification import ClassificationTask
from flashtrain.training.run_folder import git_commit, write_atomically


def main(argv: list[str] | None = None) -> int:
    parser = parse()
    arguments = parser.parse_args(argv)
    try:
        run = load_run(arguments.run)
        result = evaluate(run, arguments)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
            say(f"wrote {arguments.out}")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--images", choices=tuple(PRESETS), help="generated images of a preset (those of the run)")
    what.add_argument("--release", type=Path, help="folder of the Long Range Arena's release")
    what.add_argument("--npz", type=Path, help="file with images, uint8 [n, side, side], and labels [n]")
    parser.add_argument("--split", choices=PARTS, help="(test; of an .npz file all images)")
    parser.add_argument("--count", type=int, help=f"images ({GENERATED:,} of generated ones; of others all)")
    parser.add_argument("--seed", type=int, default=12345, help="of generated images (12345)")
    parser.add_argument("--side", type=int, help="of released images, in pixels (that of the run)")
    parser.add_argument("--difficulty", choices=DIFFICULTIES, help="of released images (that of the run)")
    parser.add_argument("--prepared-dir", help="folder of packed images (that of the run)")
    parser.add_argument("--workers", type=int, help="processes that make images (one for each core)")
    parser.add_argument("--batch", type=int, help="images at once (as in the run)")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--commit", help="commit of the code, where it runs outside a git clone")
    parser.add_argument("--out", type=Path, help="JSON to write")
    return parser


def evaluate(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the run's task is judged by, printed and returned.

    Raises:
        ValueError: there is no evaluation of such runs yet, or the arguments do not fit the run.
    """
    config = run.config
    if config.task == "language":
        raise ValueError(
            f"{run.id}: task=language has no evaluation here yet; the held-out loss and perplexity of its own "
            "validation are val_loss and val_perplexity in its summary.json"
        )
    if config.classifier is None or config.images is None:
        raise ValueError(
            f"{run.id}: runs on sequences have no evaluation here; that of the run's own end, on the test part, is "
            "test_accuracy in its summary.json"
        )
    if "pixel_head.weight" in run.weights:
        raise ValueError(
            f"{run.id}: stopped in its pretraining, which knows no labels; train it on, or start a run from it with "
            f"model.init_from={run.id}, and evaluate that"
        )
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA GPU here; take --device cpu")
    device = choose_device(arguments.device)
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": arguments.commit or git_commit(),
        **facts(device),
        "run": {
            "id": run.id,
            "step": run.step,
            "weights": "running mean" if run.averaged else "newest",
            **{key: run.summary.get(key) for key in ("git_commit", "model", "protocol", "dense_target", "corpus")},
        },
    }
    result |= evaluate_images(run, config.classifier, config.images, arguments, device)
    tell(run, result)
    return result


def evaluate_images(
    run: Run, classifier: ClassifierConfig, images: ImagesConfig, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Accuracies and speed."""
    images = replace(images, prepared_dir=arguments.prepared_dir or images.prepared_dir)
    judged = choose_images(run, classifier, images, arguments)
    labels = judged.source.labels.astype(np.int64)
    # The kernels are a matter of this machine.
    config = replace(run.config, attention=replace(run.config.attention, backend="auto"))
    task = ClassificationTask(config, classifier)
    task.model.load_state_dict(run.weights)
    task.to(device).eval()
    half = device.type == "cuda" and config.trainer.precision != "32-true"
    batch = arguments.batch or max(1, config.trainer.micro_batch_tokens // judged.source.images[0].size)
    predicted, rate = predict(task, judged.source, batch, half)
    precision = "bf16-mixed" if half else "32-true"
    right = predicted == labels
    return {
        "evaluated": judged.about | {"side": judged.source.images.shape[1], "count": len(labels)},
        "precision": precision,
        "attention_backend": " and ".join(AttentionReport(task.masks, precision, device).backends),
        "batch": batch,
        **share(right),
        "classes": [{"class": c, **share(right[labels == c])} for c in range(classifier.num_classes)],
        "shortcut": shortcut(judged, labels, device),
        "images_per_second": rate,
    }


def share(right: np.ndarray) -> dict[str, Any]:
    """Accuracy and its standard error over bool [n]; None where there are no images."""
    if not len(right):
        return {"images": 0, "accuracy": None, "accuracy_error": None}
    accuracy = float(right.mean())
    return {
        "images": len(right),
        "accuracy": accuracy,
        "accuracy_error": math.sqrt(accuracy * (1 - accuracy) / len(right)),
    }


@torch.no_grad()
def predict(task: ClassificationTask, source: StoredImages, batch: int, half: bool) -> tuple[np.ndarray, float]:
    """The class of each image, int64 [n], and images per second.

    The first batch, which compiles kernels, is not timed, unless it is the only one.
    """
    console, classes = Console(stderr=True), []
    start, timed = time.perf_counter(), source.length
    batches = track(
        held_out_batches(source, batch), "evaluating", total=math.ceil(source.length / batch), console=console,
        transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with torch.autocast(task.device.type, torch.bfloat16, enabled=half):
        for number, each in enumerate(batches):
            each = task.to_device(each)
            logits, _ = task.model(each.images, task.plan(each.images))
            classes.append(logits.float().argmax(-1))
            if number == 0 and source.length > batch:
                classes[0] = classes[0].cpu()  # waits for the device
                start, timed = time.perf_counter(), source.length - batch
        predicted = torch.cat([each.cpu() for each in classes]).numpy()
    return predicted, timed / (time.perf_counter() - start)


def shortcut(judged: Judged, labels: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Accuracy of the label guessed from the distance between the discs, fitted on one half and tested on the other."""
    if labels.max() > 1:
        return {"accuracy": None, "why": "more than two classes"}
    markers = judged.markers if judged.markers is not None else find_discs(judged.source.images, device)
    if markers is None:
        return {"accuracy": None, "why": "no two discs to be found in the images"}
    return {
        "accuracy": float(shortcut_accuracy(marker_distances(markers), labels)),
        "accuracy_error": 0.5 / math.sqrt(len(labels)),
        "discs": "found in the images" if judged.markers is None else "known",
    }


def tell(run: Run, result: dict[str, Any]) -> None:
    """Print a result for people."""
    about, short = result["evaluated"], result["shortcut"]
    of = f", {about['split']} split" if about["split"] else ""
    say(f"{run.id} after {run.step:,} steps on {about['count']:,} images: {about['source']} {about['name']}{of}")
    rows = [("accuracy", result["images"], result["accuracy"], result["accuracy_error"])]
    rows += [(f"of class {c['class']}", c["images"], c["accuracy"], c["accuracy_error"]) for c in result["classes"]]
    if short["accuracy"] is not None:
        rows.append(("the discs' distance alone", about["count"], short["accuracy"], short["accuracy_error"]))
    cells = [(name, count, *("" if v is None else f"{100 * v:.2f}" for v in values)) for name, count, *values in rows]
    say(table(["", "images", "%", "+-"], cells))
    if short["accuracy"] is None:
        say(f"the discs' distance alone: not available, {short['why']}")
    speed, how = result["images_per_second"], f"{result['precision']}, {result['attention_backend']} attention"
    say(f"{speed:,.0f} images/s in batches of {result['batch']}, {result['gpu']}, {how}")


if __name__ == "__main__":
    sys.exit(main())
