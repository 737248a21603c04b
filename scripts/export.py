"""A trained run as a folder that Hugging Face's transformers loads.

    python scripts/export.py runs/<run_id> --out folder
    python scripts/export.py runs/<run_id>/checkpoints/step-00001000.ckpt --out folder --dtype bfloat16

Writes config.json, generation_config.json, the weights as safetensors and the tokenizer's files, so that
`AutoModelForCausalLM.from_pretrained(folder)` and `AutoTokenizer.from_pretrained(folder)` give the run's model and its
tokenizer. Takes the newest checkpoint of a run, and the mean of the weights where the run kept one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measuring.report import say

from flashtrain.interchange.loading import read
from flashtrain.interchange.saving import DTYPES, save


def main(argv: list[str] | None = None) -> int:
    parser = parse()
    arguments = parser.parse_args(argv)
    try:
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
            max_shard_bytes=int(arguments.shard_gib * 2**30),
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    say(f"wrote {arguments.out}: {kind}, {loaded.model.num_parameters:,} parameters, {arguments.dtype}")
    return 0


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, or a checkpoint file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the weights (float32)")
    parser.add_argument("--shard-gib", type=float, default=5.0, help="largest file of weights, in GiB (5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
