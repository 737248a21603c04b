"""How right a classifier of images is: accuracies with standard errors, and what a shortcut alone would reach."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from flashtrain.config.schema import ClassifierConfig, ImagesConfig
from flashtrain.data.images import StoredImages, held_out_batches
from flashtrain.data.pathfinder.statistics import marker_distances, shortcut_accuracy
from flashtrain.training.attention_report import AttentionReport
from flashtrain.training.classification import ClassificationTask
from measuring.discs import find_discs
from measuring.judged import Judged, choose_images
from measuring.report import say, table
from measuring.trained import Run


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
    if (known := published(run)) is not None:
        rows.append(known)
    cells = [
        (name, count or "", *("" if v is None else f"{100 * v:.2f}" for v in values)) for name, count, *values in rows
    ]
    say(table(["", "images", "%", "+-"], cells))
    if short["accuracy"] is None:
        say(f"the discs' distance alone: not available, {short['why']}")
    speed, how = result["images_per_second"], f"{result['precision']}, {result['attention_backend']} attention"
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"  # large images on a CPU take seconds each
    say(f"{rate} images/s in batches of {result['batch']}, {result['gpu']}, {how}")


def published(run: Run) -> tuple[str, int | None, float, float] | None:
    """What an exported classifier says of itself, as a row; None for a run."""
    said = run.summary
    if "weights_dtype" not in said or said["accuracy"] is None:
        return None
    on = said["evaluated"] if isinstance(said["evaluated"], str) else said["evaluated"]["name"]
    return f"as published ({on})", said.get("images"), said["accuracy"], said["accuracy_error"]
