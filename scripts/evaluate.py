"""How right a trained run is on data that it was not trained on; what that means goes by the run's task.

    python scripts/evaluate.py runs/<run_id>                                     all that its task is judged by
    python scripts/evaluate.py runs/<run_id> --out result.json --plot result.png
    python scripts/evaluate.py runs/<run_id> --context 32k --extend yarn         a language model, read further
    python scripts/evaluate.py runs/<run_id> --tasks passkey --lengths 1k,4k,16k --repeats 20
    python scripts/evaluate.py runs/<run_id> --images lra32 --count 20000        a Pathfinder classifier
    python scripts/evaluate.py runs/<run_id> --release lra_release --side 32     the Long Range Arena's test images
    python scripts/evaluate.py runs/<run_id> --npz images.npz
    python scripts/evaluate.py weights/<name>                                    an exported classifier

Takes a run's newest checkpoint (the mean of the weights, where the run kept one), a checkpoint file, what
scripts/export.py wrote of a classifier, or a language model in a Hugging Face folder.

Language models: perplexity on held-out text with sliding windows, loss by position, passkeys found over a grid of depth
and length, associative recall and induction. Pathfinder classifiers: accuracy with its standard error, that of each
class, that of guessing from the distance between the two discs alone, and the images per second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from measuring.environment import choose_device, facts
from measuring.images import evaluate_images
from measuring.images import tell as tell_of_images
from measuring.judged import GENERATED
from measuring.language import ALL, evaluate_language
from measuring.language_report import draw
from measuring.language_report import tell as tell_of_language
from measuring.reading import load_reader
from measuring.report import command_line, names, say, sizes
from measuring.tracking import log_tables, wandb_id
from measuring.trained import Run, load_run

from flashtrain.config.hugging_face import is_hugging_face_folder
from flashtrain.config.sizes import parse_size
from flashtrain.data.image_set import PARTS
from flashtrain.data.pathfinder import PRESETS
from flashtrain.data.release import DIFFICULTIES
from flashtrain.training.extension import LEARNED, ROTARY
from flashtrain.training.run_folder import git_commit, write_atomically

_LANGUAGE = ("tasks", "context", "extend", "lengths", "stride", "text", "plot", "track")
_IMAGES = ("images", "release", "npz", "split", "count", "side", "difficulty", "batch")


def main(argv: list[str] | None = None) -> int:
    parser = parse()
    arguments = parser.parse_args(argv)
    try:
        run = None if is_hugging_face_folder(arguments.run) else load_run(arguments.run)
        if arguments.track is not None:
            wandb_id(arguments.run, run)  # raises where there is none, before hours of work
        result = evaluate(run, arguments)
        result["command"] = command_line("evaluate", sys.argv[1:] if argv is None else argv)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
            say(f"wrote {arguments.out}")
        if arguments.track is not None and run is not None:
            log_tables(arguments.run, run, result)
        if arguments.plot is not None:
            draw([(result["run"]["id"], result)], arguments.plot)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, a checkpoint, or an exported folder")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=12345, help="of whatever is generated (12345)")
    parser.add_argument("--commit", help="commit of the code, where it runs outside a git clone")
    parser.add_argument("--out", type=Path, help="JSON to write")
    add_language(parser.add_argument_group("language models"))
    add_images(parser.add_argument_group("Pathfinder classifiers"))
    return parser


def add_language(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tasks", type=names, help=f"some of {','.join(ALL)} (all)")
    group.add_argument("--context", type=parse_size, help="tokens that the model reads at once (as trained)")
    group.add_argument("--extend", choices=(*ROTARY, *LEARNED), help="how positions reach a longer context")
    group.add_argument("--text", type=Path, help="file to read (the run's own held-out text)")
    group.add_argument("--tokens", type=parse_size, default=2**18, help="tokens of text at most (256k)")
    group.add_argument("--stride", type=parse_size, help="tokens that a sliding window moves on (half the context)")
    group.add_argument("--lengths", type=sizes, help="of passkeys and recall tasks (the context down to its eighth)")
    group.add_argument("--depths", type=int, default=11, help="places of a passkey, evenly from start to end (11)")
    group.add_argument("--repeats", type=int, default=5, help="sequences of each length, and depth (5)")
    group.add_argument("--precision", default="auto", choices=("auto", "float32", "bfloat16"),
                       help="of the arithmetic (auto: as the run trained)")  # fmt: skip
    group.add_argument("--track", action="store_true", default=None, help="log the tables to the run's wandb run too")
    group.add_argument("--plot", type=Path, help="picture to write: loss by position, passkeys as a heat map")


def add_images(group: argparse._ArgumentGroup) -> None:
    what = group.add_mutually_exclusive_group()
    what.add_argument("--images", choices=tuple(PRESETS), help="generated images of a preset (those of the run)")
    what.add_argument("--release", type=Path, help="folder of the Long Range Arena's release")
    what.add_argument("--npz", type=Path, help="file with images, uint8 [n, side, side], and labels [n]")
    group.add_argument("--split", choices=PARTS, help="(test; of an .npz file all images)")
    group.add_argument("--count", type=int, help=f"images ({GENERATED:,} of generated ones; of others all)")
    group.add_argument("--side", type=int, help="of released images, in pixels (that of the run)")
    group.add_argument("--difficulty", choices=DIFFICULTIES, help="of released images (that of the run)")
    group.add_argument("--prepared-dir", help="folder of packed images (that of the run)")
    group.add_argument("--workers", type=int, help="processes that make images (one for each core)")
    group.add_argument("--batch", type=int, help="images at once (as in the run)")


def evaluate(run: Run | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the run's task is judged by, printed and returned; None stands for a Hugging Face folder.

    Raises:
        ValueError: there is no evaluation of such runs, or the arguments do not fit the run.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA GPU here; take --device cpu")
    device, language = choose_device(arguments.device), run is None or run.config.task == "language"
    refuse(arguments, _IMAGES if language else _LANGUAGE, "image classifiers" if language else "language models")
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": arguments.commit or git_commit(),
        **facts(device),
        "run": {"id": arguments.run.resolve().name} if run is None else about(run),
    }
    if language:
        reader = load_reader(arguments.run, arguments.context, arguments.extend, device)
        result |= {"trained_at": reader.trained.seq_len, "extended": arguments.extend}
        result |= evaluate_language(reader, arguments)
        tell_of_language(reader.name, None if run is None else run.step, result)
        return result
    assert run is not None
    if run.config.classifier is None or run.config.images is None:
        raise ValueError(
            f"{run.id}: runs on sequences have no evaluation here; that of the run's own end, on the test part, is "
            "test_accuracy in its summary.json"
        )
    if "pixel_head.weight" in run.weights:
        raise ValueError(
            f"{run.id}: stopped in its pretraining, which knows no labels; train it on, or start a run from it with "
            f"model.init_from={run.id}, and evaluate that"
        )
    result |= evaluate_images(run, run.config.classifier, run.config.images, arguments, device)
    tell_of_images(run, result)
    return result


def refuse(arguments: argparse.Namespace, keys: tuple[str, ...], whose: str) -> None:
    """Refuse arguments of another task, which would do nothing.

    Raises:
        ValueError: naming the first of them.
    """
    for key in keys:
        if getattr(arguments, key) is not None:
            raise ValueError(f"--{key}: is for {whose}, and {arguments.run} is none; leave it out")


def about(run: Run) -> dict[str, Any]:
    """Facts of a run for its result."""
    return {
        "id": run.id,
        "step": run.step,
        "weights": "running mean" if run.averaged else "newest",
        **{key: run.summary.get(key) for key in ("git_commit", "model", "protocol", "dense_target", "corpus")},
    }


if __name__ == "__main__":
    sys.exit(main())
