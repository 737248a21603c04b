from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

import flashtrain.data.ngram as ngram
from flashtrain.data.ngram import byte_ngram_losses, byte_trigram_loss
from flashtrain.data.token_file import TokenFile

Write = Callable[..., TokenFile]
TEXT = [b"the cat sat on the mat; the dog sat on the log. " * 20, b"a rolling stone gathers no moss. " * 20]
HELD_OUT = [b"the log sat on a rolling cat. the moss!", b"\xff\x00"]


def slow_losses(train: list[int], val: list[int]) -> tuple[float, ...]:
    """Witten-Bell smoothing written down as its formula, one token at a time."""
    counts = {n: Counter(tuple(train[i : i + n]) for i in range(len(train) - n + 1)) for n in (1, 2, 3)}

    def probability(history: tuple[int, ...], token: int) -> float:
        below = probability(history[1:], token) if history else 1 / 257
        followers = {run[-1]: count for run, count in counts[len(history) + 1].items() if run[:-1] == history}
        if not followers:
            return below
        seen, kinds = sum(followers.values()), len(followers)
        return (followers.get(token, 0) + kinds * below) / (seen + kinds)

    return tuple(
        sum(-math.log(probability(tuple(val[i - n + 1 : i]), val[i])) for i in range(2, len(val))) / (len(val) - 2)
        for n in (1, 2, 3)
    )


@pytest.fixture
def files(token_file: Write) -> tuple[TokenFile, TokenFile]:
    documents = [[[*text, 256] for text in texts] for texts in (TEXT, HELD_OUT)]
    return token_file(documents[0], name="train.tokens"), token_file(documents[1], name="val.tokens")


def test_the_losses_are_those_of_the_formula(files: tuple[TokenFile, TokenFile]) -> None:
    train, val = files
    expected = slow_losses(train.tokens.tolist(), val.tokens.tolist())
    assert byte_ngram_losses(train, val) == pytest.approx(expected, rel=1e-12)
    assert byte_trigram_loss(train, val) == pytest.approx(expected[2], rel=1e-12)


def test_chunks_change_nothing(files: tuple[TokenFile, TokenFile], monkeypatch: pytest.MonkeyPatch) -> None:
    for val in files:
        with monkeypatch.context() as patch:
            whole = byte_ngram_losses(files[0], val)
            patch.setattr(ngram, "_CHUNK", 301)
            assert byte_ngram_losses(files[0], val) == pytest.approx(whole, rel=1e-12)


def test_longer_histories_predict_better(token_file: Write) -> None:
    text = list(ngram.__doc__.encode() * 3)
    train, val = token_file([text], name="train.tokens"), token_file([text[:500]], name="val.tokens")
    unigram, bigram, trigram = byte_ngram_losses(train, val)
    assert trigram < bigram < unigram < math.log(257)


def test_noise_is_no_better_than_uniform(token_file: Write) -> None:
    rng = np.random.default_rng(0)
    train = token_file([rng.integers(0, 256, 20_000)], name="train.tokens")
    val = token_file([rng.integers(0, 256, 5_000)], name="val.tokens")
    assert all(loss > math.log(256) - 0.01 for loss in byte_ngram_losses(train, val))


def test_a_large_vocabulary_is_refused(token_file: Write) -> None:
    file = token_file([[1, 2, 3]], vocab_size=258)
    with pytest.raises(ValueError, match="258"):
        byte_trigram_loss(file, file)


def test_too_little_held_out_text_is_refused(token_file: Write) -> None:
    file = token_file([[1, 2]])
    with pytest.raises(ValueError, match="2 held-out tokens"):
        byte_trigram_loss(file, file)
