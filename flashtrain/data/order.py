"""The order of training: a random permutation that is computed, never stored.

Position and epoch in, sequence number out, so the state of the data is one integer, the step, whatever the number of
workers or ranks.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Which part of each step's samples is meant, and how many equal parts there are: what one of several processes takes.
Share = tuple[int, int]
WHOLE: Share = (0, 1)

_ROUNDS = 8


def shuffled(index: int, length: int, seed: int, epoch: int) -> int:
    """Where ``index`` goes in the permutation of [0, length) that belongs to (seed, epoch). A pure function."""
    return int(shuffled_many(np.array([index]), length, seed, epoch)[0])


def shuffled_many(indices: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """``shuffled`` of each of ``indices``; int64, same shape.

    A Feistel network (Luby and Rackoff, 1988) permutes the numbers of 2h bits, the smallest such range that holds
    ``length``; a result outside [0, length) is sent through again until it falls inside ("cycle walking", Black and
    Rogaway, 2002), fewer than four passes on average. Raises ValueError for an index outside [0, length).
    """
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < length:
        raise ValueError(f"indices {indices.min()} to {indices.max()} are outside [0, {length})")
    half = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch)
    values = _feistel(indices.astype(np.uint64).reshape(-1), half, keys)
    outside = np.flatnonzero(values >= np.uint64(length))
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= np.uint64(length)]
    return values.astype(np.int64).reshape(indices.shape)


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
