"""Text from a trained language model, streamed to the terminal.

    python scripts/generate.py runs/<run_id> "def main("
    python scripts/generate.py runs/<run_id> "def main(" --temperature 0 --max-tokens 500
    python scripts/generate.py runs/<run_id> --prompt-file book.txt --context 64k --extend yarn --prefill 8k

Takes a run's folder (the newest checkpoint, and the mean of its weights where the run kept one), a checkpoint file, or
a Hugging Face folder. Each new token is computed alone, against the keys and values of those before it; on a GPU by one
CUDA graph, where no layer is block-sparse.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from measuring.environment import choose_device
from measuring.reading import Reader, load_reader
from measuring.text_stream import TextStream

from flashtrain.config.sizes import parse_size
from flashtrain.models.generate import Sampling, stream
from flashtrain.models.longer import ways_to_extend
from flashtrain.training.extension import LEARNED, ROTARY


def main(argv: list[str] | None = None) -> int:
    parser = parse()
    arguments = parser.parse_args(argv)
    try:
        reader = load_reader(arguments.model, arguments.context, arguments.extend, choose_device(arguments.device))
        write(reader, arguments)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a run's folder, a checkpoint, or a Hugging Face folder")
    parser.add_argument("prompt", nargs="?", default="", help="what the text begins with (a new document)")
    parser.add_argument("--prompt-file", type=Path, help="read the prompt from a file")
    parser.add_argument("--max-tokens", type=parse_size, default=200, help="new tokens at most (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among so many likeliest tokens; 0 all (50)")
    parser.add_argument("--top-p", type=float, default=1.0, help="among the likeliest with this probability (1: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--context", type=parse_size, help="tokens of prompt and text at most (as trained)")
    parser.add_argument("--extend", choices=(*ROTARY, *LEARNED), help="how positions reach a longer context")
    parser.add_argument("--prefill", type=parse_size, help="tokens of the prompt that are read at once (all)")
    parser.add_argument("--no-cache", action="store_true", help="read the whole context again for each token")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph: launch each token's kernels one by one")
    parser.add_argument("--compile", action="store_true", help="let torch.compile fuse each token's kernels first")
    parser.add_argument("--past-end", action="store_true", help="go on behind the end of the document")
    parser.add_argument("--precision", default="auto", choices=("auto", "float32", "bfloat16"),
                        help="of weights and arithmetic (auto: bfloat16 on a GPU)")  # fmt: skip
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    return parser


def write(reader: Reader, arguments: argparse.Namespace) -> None:
    """Stream the text to stdout, and what it took to stderr."""
    tokenizer, model = reader.tokenizer, reader.model
    if arguments.compile and (arguments.eager or arguments.no_cache):
        raise ValueError("--compile fuses steps of fixed shapes behind a cache: leave out --eager and --no-cache")
    text = arguments.prompt if arguments.prompt_file is None else arguments.prompt_file.read_text()
    prompt = tokenizer.encode(text).tolist() or [tokenizer.eod]
    require_room(reader, len(prompt), arguments.max_tokens)
    half = {"auto": reader.device.type == "cuda", "float32": False, "bfloat16": True}[arguments.precision]
    model.to(torch.bfloat16 if half else torch.float32)
    out, times = TextStream(tokenizer, prompt), [time.perf_counter()]
    sys.stdout.write(text)
    for token in stream(
        model, prompt, arguments.max_tokens,
        sampling=Sampling(arguments.temperature, arguments.top_k or None, arguments.top_p),
        generator=torch.Generator().manual_seed(arguments.seed), plan_for=reader.plan_for,
        cached=not arguments.no_cache, block=reader.block, prefill_tokens=arguments.prefill,
        stop=None if arguments.past_end else tokenizer.eod,
        graphed=arguments.compile or (reader.device.type == "cuda" and not (arguments.eager or arguments.no_cache)),
        compiled=arguments.compile,
    ):  # fmt: skip
        times.append(time.perf_counter())
        if token < tokenizer.vocab_size:  # beyond it are rows of padding
            sys.stdout.write(out.add(token))
            sys.stdout.flush()
    sys.stdout.write(out.rest() + "\n")
    sys.stdout.flush()
    if len(times) > 2:
        first, rate = times[1] - times[0], (len(times) - 2) / (times[-1] - times[1])
        print(f"{len(prompt)} tokens read in {first:.2f} s, then {rate:.1f} tokens/s", file=sys.stderr)


def require_room(reader: Reader, prompt: int, new: int) -> None:
    """Refuse a text that does not fit the context: its beginning would be forgotten in silence.

    Raises:
        ValueError: saying what to do.
    """
    context, wanted = reader.model.seq_len, prompt + new
    if new < 1:
        raise ValueError(f"--max-tokens {new}: must be at least 1")
    if wanted <= context:
        return
    trained = reader.trained
    names = ", ".join(LEARNED if trained.model.positions == "learned" else ROTARY)
    raise ValueError(
        f"a prompt of {prompt} tokens and --max-tokens {new} need a context of {wanted}, and it is {context}: shorten "
        f"them, or give --context {wanted}; beyond the {trained.seq_len} tokens of its training the model needs "
        f"--extend ({names}) too, or further training: {ways_to_extend(trained.model, trained.seq_len, wanted)}"
    )


if __name__ == "__main__":
    sys.exit(main())
