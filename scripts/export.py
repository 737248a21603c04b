"""A trained run as a folder for others: a language model for Hugging Face's transformers, a classifier for ours.

    python scripts/export.py runs/<run_id> --out folder
    python scripts/export.py runs/<run_id>/checkpoints/step-00001000.ckpt --out folder --dtype bfloat16
    python scripts/evaluate.py runs/path_x --out path_x.json
    python scripts/export.py runs/path_x --result path_x.json --seeds runs/path_x_2 --out weights/path_x

Takes the newest checkpoint of a run, and the mean of the weights where the run kept one.

Of a language model it writes config.json, generation_config.json, the weights as safetensors and the tokenizer's files,
so that `AutoModelForCausalLM.from_pretrained(folder)` and `AutoTokenizer.from_pretrained(folder)` give the run's model
and its tokenizer. Of a classifier of images: model.safetensors, config.yaml, and result.json with the accuracy (that of
an evaluation's JSON, or else of the run's last validation), seeds, failed seeds and GPU minutes;
`scripts/evaluate.py folder` judges it, and `model.init_from=folder` trains on from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measuring.exported import export_classifier, tell_result
from measuring.report import say
from measuring.trained import load_run

from flashtrain.config.hugging_face import is_hugging_face_folder
from flashtrain.interchange.loading import read
from flashtrain.interchange.saving import DTYPES, save


def main(argv: list[str] | None = None) -> int:
    parser = parse()
    arguments = parser.parse_args(argv)
    try:
        run = None if is_hugging_face_folder(arguments.run) else load_run(arguments.run)
        if run is None or run.config.task == "language":
            export_language(arguments)
        else:
            if arguments.shard_gib is not None:
                raise ValueError("--shard-gib: is for language models; leave it out")
            result = export_classifier(
                arguments.run, run, arguments.out, arguments.dtype, arguments.result, arguments.seeds
            )
            say(f"wrote {arguments.out}: {tell_result(result)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def export_language(arguments: argparse.Namespace) -> None:
    """Write a language model's folder.

    Raises:
        ValueError: it has parts that no architecture of transformers has, or arguments are for classifiers.
    """
    if arguments.result is not None or arguments.seeds:
        raise ValueError("--result and --seeds: are for image classifiers; leave them out")
    loaded = read(arguments.run)
    if loaded.layouts:
        raise ValueError(
            f"{arguments.run}: was trained with block layouts, which no model of transformers has; train it on "
            "with attention=flash and model.init_from, and export that"
        )
    kind = save(
        loaded.model,
        loaded.tokenizer,
        arguments.out,
        window=loaded.window,
        dtype=arguments.dtype,
        max_shard_bytes=int((arguments.shard_gib or 5.0) * 2**30),
    )
    say(f"wrote {arguments.out}: {kind}, {loaded.model.num_parameters:,} parameters, {arguments.dtype}")


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, or a checkpoint file (of a language model)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the weights (float32)")
    parser.add_argument("--shard-gib", type=float, help="largest file of a language model's weights, in GiB (5)")
    parser.add_argument("--result", type=Path, help="of a classifier: JSON of scripts/evaluate.py about the run")
    parser.add_argument("--seeds", type=Path, nargs="+", default=[], help="of a classifier: runs with other seeds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
