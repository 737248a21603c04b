"""ListOps: nested lists of digits, and the one digit that they come to.

    tokens, value = listops(seed=0, split="train", index=7)

The rules are those of the Long Range Arena (Tay et al., 2020), after Nangia and Bowman (2018): a node is a digit with
probability 3/4, and always so at the tenth level; else an operator, MIN, MAX, MED (the median, rounded down) or SM (the
sum modulo 10), over two to ten nodes. Kept are trees whose tokens number more than 500 and fewer than 2,000.

One sample is a function of seed, split and number. The Arena leaves out repeated samples; among trees of more than 500
tokens there are none.
"""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Sequence

import numpy as np

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# Ids of tokens; 0 is padding. Brackets that only group are not tokens, which leaves these fifteen.
TOKENS = ("", *map(str, range(10)), *OPERATORS, "]")
IDS = {token: number for number, token in enumerate(TOKENS) if token}
SHORTEST, LONGEST = 500, 2000  # both excluded
CLASSES = 10

_DEEPEST = 10
_MOST_ARGUMENTS = 10
_DIGIT_SHARE = 0.75


class _TooLong(Exception):
    pass


def listops(seed: int, split: str, index: int) -> tuple[np.ndarray, int]:
    """Token ids uint8 [length], and the value 0 to 9."""
    digest = hashlib.sha256(repr(("listops", seed, split, index)).encode()).digest()
    draw = random.Random(int.from_bytes(digest, "little"))
    while True:
        tokens: list[int] = []
        try:
            value = _grow(draw, 1, tokens)
        except _TooLong:
            continue
        if len(tokens) > SHORTEST:
            return np.array(tokens, np.uint8), value


def _grow(draw: random.Random, depth: int, tokens: list[int]) -> int:
    """Append a random node; its value."""
    if len(tokens) >= LONGEST - 1:  # the tree would be left out whatever follows
        raise _TooLong
    if depth == _DEEPEST or draw.random() < _DIGIT_SHARE:
        digit = draw.randrange(10)
        tokens.append(IDS[str(digit)])
        return digit
    operator = draw.choice(OPERATORS)
    tokens.append(IDS[operator])
    values = [_grow(draw, depth + 1, tokens) for _ in range(draw.randint(2, _MOST_ARGUMENTS))]
    if len(tokens) >= LONGEST - 1:
        raise _TooLong
    tokens.append(IDS["]"])
    return apply(operator, values)


def apply(operator: str, values: Sequence[int]) -> int:
    """An operator's value over its arguments."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[MED":
        return int(statistics.median(values))
    return sum(values) % 10


def parse(text: str) -> np.ndarray:
    """Token ids uint8 of a line of the Arena's files: grouping brackets left out.

    Raises:
        ValueError: a word that is no token.
    """
    words = [word for word in text.split() if word not in ("(", ")")]
    unknown = next((word for word in words if word not in IDS), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is no token of ListOps")
    return np.array([IDS[word] for word in words], np.uint8)


def evaluate(tokens: Sequence[int]) -> int:
    """The value of a tree given by its token ids."""
    open_lists: list[tuple[str, list[int]]] = [("", [])]
    for number in tokens:
        token = TOKENS[number]
        if token in OPERATORS:
            open_lists.append((token, []))
        elif token == "]":
            operator, values = open_lists.pop()
            open_lists[-1][1].append(apply(operator, values))
        else:
            open_lists[-1][1].append(int(token))
    ((_, (value,)),) = open_lists
    return value
