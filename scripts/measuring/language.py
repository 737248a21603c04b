"""How well a language model reads: loss on held-out text, by position, and what it finds again far behind."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from flashtrain.data.batch import IGNORE
from flashtrain.data.prepare import prepare
from flashtrain.data.recall import Example, associative_recall, induction, passkey, shortest_passkey, spread_depths
from flashtrain.models.token_losses import token_losses
from flashtrain.training.by_position import LossByPosition
from measuring.reading import Reader

ALL = ("perplexity", "position", "passkey", "associative", "induction")
_TOKENS_AT_ONCE = 2**15


class _Read(Protocol):
    @property
    def tokens(self) -> np.ndarray: ...


_Item = TypeVar("_Item", bound=_Read)


def evaluate_language(reader: Reader, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments ask for, by name.

    Raises:
        ValueError: arguments that do not fit the model, or held-out text that is not there.
    """
    judge, result = Judge(reader, _half(reader, arguments.precision)), dict[str, Any]()
    context, tasks = reader.model.seq_len, arguments.tasks or ALL
    unknown = sorted(set(tasks) - set(ALL))
    if unknown:
        raise ValueError(f"--tasks {','.join(unknown)}: there are {', '.join(ALL)}")
    lengths = arguments.lengths or _default_lengths(context)
    if max(lengths) > context:
        raise ValueError(f"--lengths {max(lengths)}: longer than the context of {context}; give --context too")
    for length in lengths if "passkey" in tasks and arguments.lengths else ():
        passkey(reader.tokenizer, length, 0.0, 0)  # raises where it has no room
    result["context"], result["precision"] = context, "bf16-mixed" if judge.half else "32-true"
    if "perplexity" in tasks or "position" in tasks:
        tokens, result["text"] = held_out(reader, arguments)
        stride = arguments.stride or max(1, context // 2)
        if "perplexity" in tasks:
            result["perplexity"] = sliding_perplexity(judge, tokens, context, stride)
        if "position" in tasks:
            result["position"] = by_position(judge, tokens, context)
    if "passkey" in tasks:
        room = lengths if arguments.lengths else [n for n in lengths if n >= shortest_passkey(reader.tokenizer)]
        result["passkey"] = passkey_grid(judge, room, arguments.depths, arguments.repeats, arguments.seed)
    vocab = reader.tokenizer.vocab_size
    makers = {"associative": associative_recall, "induction": induction}
    for name in [name for name in makers if name in tasks]:
        result[name] = recall_rows(judge, lengths, makers[name], vocab, arguments.repeats, arguments.seed)
    return result


class Judge:
    """Losses and hits of whole sequences.

    Args:
        half: bfloat16 arithmetic.
    """

    def __init__(self, reader: Reader, half: bool) -> None:
        self.reader, self.half = reader, half

    @torch.no_grad()
    def read(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, hits and targets on the device, [batch, seq] each, as `token_losses` gives them.

        tokens, targets: int64 [batch, seq], all of one length.
        """
        device, model = self.reader.device, self.reader.model
        asked = torch.from_numpy(targets).to(device)
        with self.reader.in_half(self.half):
            # Plans of one row serve any number of rows.
            plan = self.reader.plan_for(tokens.shape[1], tokens.shape[1])
            hidden = model(torch.from_numpy(tokens).to(device), plan)
            losses, right = token_losses(hidden, model.head_weight, asked)
        return losses, right, asked

    def examples(self, examples: Sequence[Example]) -> list[tuple[float, float, bool]]:
        """Of each example: mean loss in nats, share of the targets that are the likeliest, and whether all are."""
        found = []
        for batch in batches(examples):
            losses, right, asked = self.read(*(np.stack(each) for each in zip(*batch, strict=True)))
            counts = (asked != IGNORE).sum(dim=1)
            for loss, hits, count in zip(losses.sum(1).tolist(), right.sum(1).tolist(), counts.tolist(), strict=True):
                found.append((loss / count, hits / count, hits == count))
        return found


def batches(examples: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """As many examples at once as make `_TOKENS_AT_ONCE` tokens, and one at least."""
    size = max(1, _TOKENS_AT_ONCE // len(examples[0].tokens)) if examples else 1
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def held_out(reader: Reader, arguments: argparse.Namespace) -> tuple[np.ndarray, dict[str, Any]]:
    """Token ids to read, int64 [tokens], documents one behind the other; and what they are.

    Raises:
        ValueError: a Hugging Face folder without --text, or too little text.
    """
    limit, tokenizer = arguments.tokens, reader.tokenizer
    if arguments.text is not None:
        tokens = tokenizer.encode(arguments.text.read_bytes())[: limit + 1].astype(np.int64)
        about: dict[str, Any] = {"source": arguments.text.name}
    elif reader.run is None:
        raise ValueError(f"{reader.name}: a Hugging Face folder has no held-out text; give --text FILE")
    else:
        corpus = prepare(reader.run.config.data, tokenizer)
        tokens = corpus.val.read(0, min(limit + 1, corpus.val.num_tokens))
        about = {
            "source": f"held-out part of {corpus.description['name']}",
            "of_the_run": corpus.train.fingerprint == reader.run.corpus,
        }
    if len(tokens) < 2:
        raise ValueError("there is no held-out text to read; give --text FILE")
    return tokens, about | {"tokens": len(tokens) - 1}


def sliding_perplexity(judge: Judge, tokens: np.ndarray, window: int, stride: int) -> dict[str, Any]:
    """Perplexity where each window of the text scores its last `stride` targets only, the first one all.

    So each target but the first has at least window - stride tokens before it.

    Raises:
        ValueError: a stride outside 1 to window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"--stride {stride}: must lie between 1 and the context of {window}")
    count, total, ends = len(tokens) - 1, 0.0, 0
    starts = list(range(0, max(1, count - window + stride), stride))
    for start in progress(starts, "perplexity"):
        end = min(start + window, count)
        targets = tokens[start + 1 : end + 1].copy()
        targets[: ends - start] = IGNORE  # scored by the window before
        losses, _, _ = judge.read(tokens[None, start:end], targets[None])
        total, ends = total + float(losses.double().sum()), end
    loss = total / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "stride": stride, "window": window, "tokens": count}


def by_position(judge: Judge, tokens: np.ndarray, context: int) -> list[dict[str, float | int | None]]:
    """Mean loss of the targets in each bin of positions, over windows one behind the other."""
    length = min(context, len(tokens) - 1)
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].reshape(count, length)
    examples = [
        Example(*pair) for pair in zip(inputs, tokens[1 : count * length + 1].reshape(count, length), strict=True)
    ]
    bins = LossByPosition(length, judge.reader.device)
    for batch in progress(list(batches(examples)), "loss by position"):
        losses, _, asked = judge.read(*(np.stack(each) for each in zip(*batch, strict=True)))
        bins.add(losses, asked)
    return bins.rows()


def passkey_grid(
    judge: Judge, lengths: Sequence[int], depths: int, repeats: int, seed: int
) -> list[dict[str, float | int]]:
    """For each length and depth how often the whole number is found: what greedy decoding would write."""
    if depths < 1 or repeats < 1:
        raise ValueError(f"--depths {depths} and --repeats {repeats}: must be at least 1")
    places, rows = spread_depths(depths), []
    for length, depth in progress([(length, depth) for length in lengths for depth in places], "passkey"):
        seeds = [hash_of(seed, length, round(1000 * depth), number) for number in range(repeats)]
        found = judge.examples([passkey(judge.reader.tokenizer, length, depth, each) for each in seeds])
        loss = sum(loss for loss, _, _ in found) / repeats
        hits = sum(whole for _, _, whole in found)
        rows.append(
            {"length": length, "depth": depth, "found": hits, "of": repeats, "accuracy": hits / repeats, "loss": loss}
        )
    return rows


def recall_rows(
    judge: Judge, lengths: Sequence[int], make: Callable[[int, int, int], Example], vocab: int, repeats: int, seed: int
) -> list[dict[str, float | int]]:
    """Share of the asked tokens that are the likeliest, and their mean loss, at each length."""
    rows = []
    for length in progress(lengths, make.__name__.replace("_", " ")):
        found = judge.examples([make(vocab, length, hash_of(seed, length, number)) for number in range(repeats)])
        loss, right = (sum(each[index] for each in found) / repeats for index in (0, 1))
        rows.append({"length": length, "sequences": repeats, "accuracy": right, "loss": loss})
    return rows


def progress(items: Sequence[Any], what: str) -> Any:
    """The items, with a bar where someone looks on."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


def hash_of(*numbers: int) -> int:
    """A seed from several numbers, below 2^32."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _default_lengths(context: int) -> list[int]:
    """The context and its halves, down to an eighth."""
    return sorted({max(1, context // part) for part in (8, 4, 2, 1)})


def _half(reader: Reader, precision: str) -> bool:
    """bfloat16 arithmetic as the run trained, where nothing is asked for."""
    if precision != "auto":
        return precision == "bfloat16"
    return reader.device.type == "cuda" and (reader.run is None or reader.run.config.trainer.precision != "32-true")
