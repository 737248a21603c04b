"""The yardstick of a byte model: held-out loss of a smoothed table of byte triples, counted on the same training data.

Interpolated Witten-Bell smoothing (Witten and Bell 1991; Chen and Goodman 1999, section 2.6): with c(h, w) the count of
byte w after history h, c(h) its sum and T(h) the number of different bytes seen after h,

    p(w | h) = (c(h, w) + T(h) p(w | h')) / (c(h) + T(h)),

where h' drops the oldest byte of h; below the single byte stands the uniform distribution.
"""

from __future__ import annotations

import numpy as np

from flashtrain.data.token_file import TokenFile

_MAX_VOCAB = 257
_CHUNK = 1 << 22


def byte_trigram_loss(train: TokenFile, val: TokenFile) -> float:
    """Mean held-out loss of the trigram table, in nats a token (see ``byte_ngram_losses``)."""
    return byte_ngram_losses(train, val)[2]


def byte_ngram_losses(train: TokenFile, val: TokenFile) -> tuple[float, float, float]:
    """Mean held-out loss of the tables of single bytes, pairs and triples, in nats a token.

    Every token of ``val`` counts, the end of a document too, but the first two, which lack a history; histories reach
    over document borders. Takes seconds and under 1 GB. ValueError for a vocabulary of more than 257 ids (the table
    has its cube) or fewer than three held-out tokens.
    """
    vocab = max(train.vocab_size, val.vocab_size)
    if vocab > _MAX_VOCAB:
        raise ValueError(f"the byte trigram table is for a byte tokenizer: vocabulary {vocab} is over {_MAX_VOCAB}")
    if val.num_tokens < 3:
        raise ValueError(f"{val.path}: {val.num_tokens} held-out tokens, a trigram loss needs at least 3")
    tables = [_counts(train, order, vocab) for order in (1, 2, 3)]
    # Of each history: how often it was seen, and how many different bytes followed it.
    histories = [(table.reshape(-1, vocab).sum(axis=1), (table > 0).reshape(-1, vocab).sum(axis=1)) for table in tables]
    total = np.zeros(3)
    for start in range(0, val.num_tokens - 2, _CHUNK):
        ids = val.read(start, min(start + _CHUNK + 2, val.num_tokens))
        probability = np.full(len(ids) - 2, 1 / vocab)
        for order in (1, 2, 3):
            codes = _codes(ids[3 - order :], order, vocab)
            seen, kinds = (figure[codes // vocab] for figure in histories[order - 1])
            # A history never seen has seen = kinds = 0: the shorter one speaks alone.
            mixed = (tables[order - 1][codes] + kinds * probability) / np.maximum(seen + kinds, 1)
            probability = np.where(seen > 0, mixed, probability)
            total[order - 1] -= np.log(probability).sum()
    unigram, bigram, trigram = (total / (val.num_tokens - 2)).tolist()
    return unigram, bigram, trigram


def _counts(file: TokenFile, order: int, vocab: int) -> np.ndarray:
    """How often each sequence of ``order`` tokens occurs, int64 [vocab ** order]."""
    counts = np.zeros(vocab**order, dtype=np.int64)
    for start in range(0, file.num_tokens - order + 1, _CHUNK):
        ids = file.read(start, min(start + _CHUNK + order - 1, file.num_tokens))
        counts += np.bincount(_codes(ids, order, vocab), minlength=vocab**order)
    return counts


def _codes(ids: np.ndarray, order: int, vocab: int) -> np.ndarray:
    """One number for each run of ``order`` tokens, the oldest most significant: int64 [len(ids) - order + 1]."""
    length = len(ids) - order + 1
    codes = np.zeros(length, dtype=np.int64)
    for place in range(order):
        codes = codes * vocab + ids[place : place + length]
    return codes
