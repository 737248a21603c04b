"""Tokens a second behind a long context: our key-value cache beside transformers with SDPA, the same weights.

    python scripts/benchmark_generation.py --lengths 4k,16k,64k

A Llama of GPT-2 small's size (12 layers of 768, 12 query heads of 64, fewer key heads by --kv-heads), random weights
in bfloat16, one sequence, greedy. The prompt is read in pieces of --prefill tokens; then --new tokens are timed, each
waiting for the one before, as when text is streamed. Ours reads a token by one CUDA graph, as `flashtrain_compiled` by
one of fused kernels, and as `flashtrain_eager` kernel by kernel. transformers runs eagerly with its DynamicCache, which
grows by a copy at each token, and with its StaticCache, which does not; and with that one and the step of a token
compiled into CUDA graphs, as its manual advises.

Before anything is timed the two models' hidden states are compared, and at the shortest length, in float32, the tokens
that ours writes with its cache, in all three ways, and without; a difference gives no time and ends the script with 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring.environment import choose_device
from measuring.report import Report, Unavailable, names, parse_arguments, reason, say, sizes, table
from torch import Tensor

from flashtrain.attention import Causal, lower
from flashtrain.config.sizes import format_size, parse_size
from flashtrain.interchange.loading import read
from flashtrain.models.decoding import decoding_attention
from flashtrain.models.generate import Sampling, generate, stream
from flashtrain.models.gpt import GPT

OURS: dict[str, dict[str, bool]] = {
    "flashtrain": {"graphed": True},
    "flashtrain_compiled": {"graphed": True, "compiled": True},
    "flashtrain_eager": {},
}
IMPLEMENTATIONS = (*OURS, "transformers_dynamic", "transformers_static", "transformers_compiled")
HEADERS = ("context", "implementation", "prompt s", "ms a token", "tokens/s", "peak GiB", "note")
# Of hidden states in bfloat16 after all layers, whose entries are near 1.
TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 1e-3}


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("generation", arguments, device)
    report.content["spread"] = "ms a token is the median over --new tokens; p25 and p75 stand beside it"
    report.content["settings"] = {
        name: getattr(arguments, name) for name in ("lengths", "kv_heads", "layers", "new", "prefill", "vocab")
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        ours, theirs = build(arguments, device)
    except Unavailable as error:
        say(str(error))
        return 1
    wrong = compare(ours, theirs, arguments, dtype)
    report.content |= {"same_tokens_without_cache": not wrong, "hidden_difference": wrong or "within tolerance"}
    if wrong:
        report.finish()
        say(wrong)
        return 1
    for length, name in itertools.product(sorted(arguments.lengths, reverse=True), arguments.implementations):
        row = measure(name, ours.to(dtype), theirs.to(dtype), length, arguments)
        report.rows.append(row)
        report.write()
        say("  ".join(str(cell) for cell in cells(row) if cell is not None))
    say("\n" + table(HEADERS, [cells(row) for row in sorted(report.rows, key=lambda row: row["context"])]))
    report.finish()
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", type=names, default=list(IMPLEMENTATIONS),
                        help=f"of {', '.join(IMPLEMENTATIONS)}")  # fmt: skip
    parser.add_argument("--lengths", type=sizes, default=sizes("4k,16k,64k"), help="tokens in the prompt (4k,16k,64k)")
    parser.add_argument("--kv-heads", type=int, default=12, help="key and value heads, of 12 query heads (12)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--new", type=int, default=64, help="tokens that are timed (64)")
    parser.add_argument("--prefill", type=parse_size, default=8192, help="prompt tokens read at once (8k)")
    parser.add_argument("--vocab", type=int, default=32_000)
    arguments = parse_arguments(parser, argv, "generation")
    unknown = sorted(set(arguments.implementations) - set(IMPLEMENTATIONS))
    if unknown:
        parser.error(f"--implementations {','.join(unknown)}: there are {', '.join(IMPLEMENTATIONS)}")
    if arguments.dry_run:
        arguments.lengths, arguments.layers, arguments.vocab = [32, 64], 2, 100
        arguments.new, arguments.prefill = 4, 24
    arguments.head_dim = 16 if arguments.dry_run else 64
    return arguments


def build(arguments: argparse.Namespace, device: torch.device) -> tuple[GPT, Any]:
    """Our model and transformers', float32, of the same random weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise Unavailable("transformers is not installed: pip install 'flashtrain[hf]'") from None
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=12 * arguments.head_dim, intermediate_size=32 * arguments.head_dim,
        num_hidden_layers=arguments.layers, num_attention_heads=12,
        num_key_value_heads=arguments.kv_heads, vocab_size=arguments.vocab, tie_word_embeddings=True,
        max_position_embeddings=max(arguments.lengths) + arguments.new + 1, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = read(Path(folder)).model
    ours.attend_by(decoding_attention)
    return ours.to(device), theirs.to(device)


def plan_for(device: torch.device) -> Any:
    return lambda queries, keys: lower(Causal(), 1, queries, keys, device)


@torch.no_grad()
def compare(ours: GPT, theirs: Any, arguments: argparse.Namespace, dtype: torch.dtype) -> str | None:
    """What differs: hidden states between the two models, or tokens with and without our cache; None if nothing."""
    length, device = min(arguments.lengths), ours.head_weight.device
    tokens = prompt(length, arguments.vocab).to(device)
    plans = plan_for(device)
    found = ours(tokens, plans(length, length)).float()
    expected = theirs.model(tokens).last_hidden_state.float()
    difference = float((found - expected).abs().max())
    if difference > TOLERANCE[torch.float32]:
        return f"hidden states differ by {difference:.3g} in float32"
    ids, new = tokens[0].tolist(), min(8, arguments.new)
    how: dict[str, Any] = {
        "sampling": Sampling(temperature=0), "generator": torch.Generator(), "plan_for": plans,
        "prefill_tokens": arguments.prefill,
    }  # fmt: skip
    plain = generate(ours, ids, new, cached=False, **how)
    for name in OURS:
        if generate(ours, ids, new, **OURS[name], **how) != plain:
            return f"tokens of {name} differ from those without a cache, in float32"
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    found = ours(tokens, plans(length, length)).float()
    difference = float((found - theirs.model(tokens).last_hidden_state.float()).abs().mean())
    return None if difference <= TOLERANCE[dtype] else f"hidden states differ by {difference:.3g} on average in {dtype}"


def prompt(length: int, vocab: int) -> Tensor:
    """int64 [1, length]."""
    return torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(length))


def measure(name: str, ours: GPT, theirs: Any, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row: seconds for the prompt, then milliseconds of each new token. The first pass warms up and is not timed."""
    device = ours.head_weight.device
    row: dict[str, Any] = {"context": length, "implementation": name, "failed": None}
    ids = prompt(length, arguments.vocab)
    try:
        for _ in range(2):
            torch.compiler.reset()  # what was compiled holds the cache that it ran with
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            times = [time.perf_counter()]
            for _ in tokens_of(name, ours, theirs, ids, arguments.new, arguments.prefill):
                times.append(time.perf_counter())
    except Exception as error:  # versions of transformers differ, and other rows are to be had all the same
        return row | {"failed": reason(error)}
    each = sorted(1000 * (end - start) for start, end in itertools.pairwise(times[1:]))
    quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return row | {
        "prompt_s": times[1] - times[0], "ms_a_token": quartiles[1], "p25": quartiles[0], "p75": quartiles[2],
        "tokens_per_second": 1000 / quartiles[1], "peak_gib": peak,
    }  # fmt: skip


def tokens_of(name: str, ours: GPT, theirs: Any, ids: Tensor, new: int, prefill: int) -> Iterator[int]:
    """New tokens, one by one."""
    if name in OURS:
        return stream(
            ours, ids[0].tolist(), new, sampling=Sampling(temperature=0), generator=torch.Generator(),
            plan_for=plan_for(ours.head_weight.device), prefill_tokens=prefill, **OURS[name],
        )  # fmt: skip
    return _theirs(theirs, ids, new, prefill, cache=name.removeprefix("transformers_"))


@torch.no_grad()
def _theirs(model: Any, ids: Tensor, new: int, prefill: int, cache: str) -> Iterator[int]:
    """cache: dynamic, static, or compiled, which is static with a compiled step."""
    from transformers import DynamicCache, StaticCache

    held: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    if cache == "dynamic":
        held["past_key_values"] = DynamicCache(config=model.config)
    else:
        held["past_key_values"] = StaticCache(config=model.config, max_cache_len=ids.shape[1] + new)
    step = model
    if cache == "compiled":
        # On the CPU, where there are no graphs to gain, the compiler only looks whether it could.
        how: dict[str, Any] = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {"backend": "eager"}
        step = torch.compile(model.forward, fullgraph=True, dynamic=False, **how)
    for piece in ids.to(model.device).split(prefill, dim=1):
        logits = model(input_ids=piece, **held).logits
    for _ in range(new):
        token = logits[0, -1].argmax()
        yield int(token)
        logits = step(input_ids=token.view(1, 1), **held).logits


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    keys = ("prompt_s", "ms_a_token", "tokens_per_second", "peak_gib", "failed")
    return (format_size(row["context"]), row["implementation"], *(row.get(key) for key in keys))


if __name__ == "__main__":
    sys.exit(main())
