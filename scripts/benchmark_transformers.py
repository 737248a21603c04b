"""A transformers model trained with our attention in place of its own: the same losses, and how fast.

    python scripts/benchmark_transformers.py --seq-len 16k

A Llama of GPT-2 small's size (12 layers of 768, 12 heads of 64, GPT-2's vocabulary, random weights), one sequence of
real text a step, AdamW, bfloat16 autocast, no torch.compile: what a script with `model(input_ids, labels=...)` does. It
is trained from the same weights on the same tokens with attn_implementation "sdpa" (whatever kernel PyTorch takes),
with "sdpa" held to FlashAttention-2, and with "flashtrain". The first two are both PyTorch, so how far their losses
part is what bfloat16 does to a training; ours may part from "sdpa" by at most twice as much, plus one part in a
thousand, or the script ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any

import torch
from measuring.environment import choose_device
from measuring.report import Report, parse_arguments, reason, say, table
from measuring.timing import spread
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.config.sizes import parse_size
from flashtrain.data.python_sources import describe_python, python_documents
from flashtrain.data.tokenizers import Gpt2Tokenizer
from flashtrain.interchange import transformers_attention

IMPLEMENTATIONS = ("sdpa", "sdpa_flash_attention2", "flashtrain")
HEADERS = ("attention", "tokens/s", "ms a step", "peak GiB", "first loss", "last loss", "from sdpa", "note")
WARM = 3  # steps that compile and choose kernels, and are not timed


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("transformers", arguments, device)
    report.content["spread"] = f"ms a step: median, minimum and quartiles over the steps after the first {WARM}"
    report.content["settings"] = {name: getattr(arguments, name) for name in ("seq_len", "steps", "layers", "lr")}
    report.content["corpus"] = describe_python()
    try:
        transformers_attention.register()
    except ValueError as error:
        say(str(error))
        return 1
    tokens = text(arguments.seq_len * arguments.steps).view(arguments.steps, 1, arguments.seq_len).to(device)
    for name in IMPLEMENTATIONS:
        report.rows.append(measure(name, tokens, arguments, device))
        report.write()
    wrong = judge(report.content)
    say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
    report.finish()
    if wrong:
        say(wrong)
    return 1 if wrong else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=parse_size, default=16384, help="tokens in a sequence, one a step (16k)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-4)
    arguments = parse_arguments(parser, argv, "transformers")
    if arguments.dry_run:
        arguments.seq_len, arguments.steps, arguments.layers = 96, 5, 2
    arguments.head_dim = 16 if arguments.dry_run else 64
    return arguments


def text(count: int) -> Tensor:
    """int64 [count]: the first tokens of the default corpus, long documents one behind the other."""
    tokenizer, parts, have = Gpt2Tokenizer(), list[Tensor](), 0
    for document in python_documents():
        parts.append(torch.from_numpy(tokenizer.encode(document.text).astype("int64")))
        have += len(parts[-1])
        if have >= count:
            break
    return torch.cat(parts)[:count]


def build(name: str, arguments: argparse.Namespace, device: torch.device) -> Any:
    """The model, float32; the same weights for every name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=12 * arguments.head_dim, intermediate_size=32 * arguments.head_dim,
        num_hidden_layers=arguments.layers, num_attention_heads=12, vocab_size=50_257, tie_word_embeddings=True,
        max_position_embeddings=arguments.seq_len, use_cache=False,
        attn_implementation="flashtrain" if name == "flashtrain" else "sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def measure(name: str, tokens: Tensor, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A row: losses of all steps, and the time of those after the warm-up."""
    row: dict[str, Any] = {"implementation": name, "failed": None}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = name == "sdpa_flash_attention2" and device.type == "cuda"
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if held else contextlib.nullcontext():
            losses, times = train(build(name, arguments, device), tokens, arguments.lr)
    except (RuntimeError, ValueError) as error:
        return row | {"failed": reason(error)}
    ms = spread([1000 * each for each in times[WARM:]])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return row | {
        "losses": losses, "ms": ms, "tokens_per_second": 1000 * arguments.seq_len / ms["median"], "peak_gib": peak,
    }  # fmt: skip


def train(model: Any, tokens: Tensor, lr: float) -> tuple[list[float], list[float]]:
    """Losses, and seconds of each step, which ends when its loss is there."""
    fused = tokens.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=fused)
    losses, times = list[float](), list[float]()
    for ids in tokens:
        start = time.perf_counter()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    return losses, times


def judge(content: dict[str, Any]) -> str | None:
    """Largest difference of the losses from those with SDPA, into the rows; what is wrong with ours, or None."""
    rows = {row["implementation"]: row for row in content["rows"]}
    failed = [f"{name}: {row['failed']}" for name, row in rows.items() if row["failed"]]
    if failed:
        return "; ".join(failed)
    plain = rows["sdpa"]["losses"]
    for row in rows.values():
        row["from_sdpa"] = max(abs(a - b) for a, b in zip(row["losses"], plain, strict=True))
    allowed = 2 * rows["sdpa_flash_attention2"]["from_sdpa"] + 1e-3 * max(plain)
    content["allowed_from_sdpa"] = allowed
    found = rows["flashtrain"]["from_sdpa"]
    return (
        None if found <= allowed else f"losses part from SDPA's by {found:.3g}, and {allowed:.3g} is bfloat16's share"
    )


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    if row["failed"]:
        return (row["implementation"], *[None] * 6, row["failed"])
    first, last = row["losses"][0], row["losses"][-1]
    return (
        row["implementation"], row["tokens_per_second"], row["ms"]["median"], row["peak_gib"], first, last,
        row.get("from_sdpa"), None,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
