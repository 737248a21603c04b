"""Made-up sequences whose answer stands far behind in them: what a long context is for, generated on the spot.

Passkey retrieval after Mohtashami and Jaggi (2023): a number hidden at some depth of a text that has nothing to do with
it. Associative recall after Arora et al. (2023, MQAR): keys with values, then the keys again. Induction after Olsson et
al. (2022): random tokens, then the same again. Each sequence is a function of its arguments.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from flashtrain.data.batch import IGNORE
from flashtrain.data.tokenizers import Tokenizer

TASKS = ("passkey", "associative", "induction")

_DIGITS = 5
# Sentences that say nothing of numbers, in any order.
_FILLER = (
    "A narrow path leads from the mill down to the lake.",
    "In the morning the fog lies over the fields until the sun is high.",
    "Someone has left a ladder against the old apple tree.",
    "The ferry goes over to the island when the wind allows it.",
    "Behind the barn the grass has grown taller than the fence.",
    "Two dogs sleep in the shade and do not look up.",
    "On market days the road is full of carts and voices.",
    "The baker opens early and closes when the bread is gone.",
    "Rain has washed the writing off the sign at the bridge.",
    "At dusk the swallows come back under the roof.",
)
_NEEDLE = " Mind this: the number of the safe is {0}. Nobody else knows that it is {0}."
_QUESTION = " Which number opens the safe? The number of the safe is"
_ANSWER = " {0}"


class Example(NamedTuple):
    """tokens, targets: int64 [length]; a target is the token that follows, IGNORE where nothing is asked."""

    tokens: np.ndarray
    targets: np.ndarray


def passkey(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> Example:
    """A text of `length` tokens that hides a number of five digits and asks for it at its end.

    Args:
        depth: where the number stands, 0 at the beginning and 1 just before the question.
        seed: of the number and the text around it.

    Raises:
        ValueError: the length has no room for number, question and answer, or depth is outside 0 to 1.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth}: must lie between 0 and 1")
    draw = random.Random(f"passkey {seed}")
    number = f"{draw.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)}"
    needle, question, answer = (
        tokenizer.encode(text.format(number)).astype(np.int64) for text in (_NEEDLE, _QUESTION, _ANSWER)
    )
    room = length + 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"length={length}: a passkey needs at least {length - room} tokens of this tokenizer")
    filler = _filler(tokenizer, room, draw)
    at = round(depth * room)
    text = np.concatenate((filler[:at], needle, filler[at:], question, answer))
    targets = np.full(length, IGNORE, dtype=np.int64)
    targets[-len(answer) :] = answer
    return Example(text[:-1], targets)


def associative_recall(vocab_size: int, length: int, seed: int) -> Example:
    """Keys with values, random tokens that are none of the keys, and each key again, asking for its value.

    Keys are ids of the lower half of the vocabulary, values and the rest of the upper. A quarter of the tokens are
    keys, or as many as there are different ones.

    Raises:
        ValueError: a length below 4, or a vocabulary below 2.
    """
    if length < 4 or vocab_size < 2:
        raise ValueError(f"length={length} with vocab_size={vocab_size}: a key and its value twice take 4 tokens of 2")
    draw = np.random.default_rng((3, seed))
    half = vocab_size // 2
    pairs = min(length // 4, half)
    keys, values = draw.permutation(half)[:pairs], draw.integers(half, vocab_size, pairs)
    again = draw.permutation(pairs)
    given = np.stack((keys, values), axis=1).reshape(-1)
    asked = np.stack((keys[again], values[again]), axis=1).reshape(-1)
    between = draw.integers(half, vocab_size, length - 4 * pairs)
    tokens = np.concatenate((given, between, asked)).astype(np.int64)
    targets = np.full(length, IGNORE, dtype=np.int64)
    targets[length - 2 * pairs :: 2] = values[again]
    return Example(tokens, targets)


def induction(vocab_size: int, length: int, seed: int, once: int | None = None) -> Example:
    """Random tokens, and the same again until the end: all that comes again, but its first token, follows from before.

    Args:
        once: tokens until it comes again; half of the length, rounded up, where nothing is said.

    Raises:
        ValueError: a length below 4, or `once` outside 1 to length - 1.
    """
    if length < 4:
        raise ValueError(f"length={length}: something and the same again take at least 4 tokens")
    once = -(-(length + 1) // 2) if once is None else once
    if not 1 <= once < length:
        raise ValueError(f"once={once}: must lie between 1 and {length - 1}, so that something comes again")
    draw = np.random.default_rng((5, seed))
    text = np.resize(draw.integers(0, vocab_size, once), length + 1).astype(np.int64)
    targets = text[1:].copy()
    targets[:once] = IGNORE
    return Example(text[:-1], targets)


def any_task(tokenizer: Tokenizer, length: int, seed: int) -> Example:
    """One of the three, by the seed: half of them passkeys at any depth, where the length has room for one."""
    draw = random.Random(f"task {seed}")
    kind = draw.choice(("passkey", "passkey", "associative", "induction"))
    if kind == "passkey" and length >= shortest_passkey(tokenizer):
        # One in twenty at the very beginning and as many at the very end, where a place drawn from all of a long text
        # hardly ever is: what stands before all else, or has no text behind it, is a case of its own.
        return passkey(tokenizer, length, min(max(draw.uniform(-0.05, 1.05), 0.0), 1.0), seed)
    if kind == "induction":
        # At any distance, short ones as often as long ones: always at the same one, a model learns where to look and
        # not what to look for.
        once = round(2 ** draw.uniform(2, math.log2(max(4, length // 2 + 1))))
        return induction(tokenizer.vocab_size, length, seed, min(once, length - 1))
    return associative_recall(tokenizer.vocab_size, length, seed)


def spread_depths(count: int) -> list[float]:
    """So many depths of a passkey, spread evenly from 0 to 1."""
    return [index / max(1, count - 1) for index in range(count)]


def shortest_passkey(tokenizer: Tokenizer) -> int:
    """Tokens of a passkey without any text around it; more than any number of five digits needs."""
    text = (_NEEDLE + _QUESTION + _ANSWER).format("9" * _DIGITS)
    return len(tokenizer.encode(text)) + 4 * _DIGITS


def _filler(tokenizer: Tokenizer, length: int, draw: random.Random) -> np.ndarray:
    """Sentences in random order, int64 [length]; the first one may lack its beginning."""
    sentences = [tokenizer.encode(f" {sentence}").astype(np.int64) for sentence in _FILLER]
    parts, have = list[np.ndarray](), 0
    while have < length:
        parts.append(draw.choice(sentences))
        have += len(parts[-1])
    return np.concatenate(parts)[have - length :] if parts else np.zeros(0, dtype=np.int64)
