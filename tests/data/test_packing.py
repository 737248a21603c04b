from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flashtrain.data.batch import IGNORE
from flashtrain.data.packing import best_fit, pack
from flashtrain.data.token_file import TokenFile

Write = Callable[..., TokenFile]
VOCAB = 60_000


@pytest.mark.parametrize("tokens", [0, 1, 10, 16])
def test_a_corpus_shorter_than_one_sequence_says_what_it_has_and_needs(token_file: Write, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"data has {tokens} tokens, seq_len=16 needs at least 17"):
        pack(token_file([tokens]), 16, "concat", False)


@pytest.mark.parametrize(("tokens", "number"), [(17, 1), (18, 1), (32, 1), (33, 2)])
def test_sequences_are_consecutive_windows_with_targets_one_later(token_file: Write, tokens: int, number: int) -> None:
    sequences = pack(token_file([tokens]), 16, "concat", False)
    assert len(sequences) == number
    for i in range(number):
        tokens_, targets, lengths, positions = sequences.sequence(i)
        assert tokens_.tolist() == list(range(16 * i, 16 * i + 16))
        assert targets.tolist() == list(range(16 * i + 1, 16 * i + 17))
        assert lengths == (16,)
        assert positions.tolist() == list(range(16))
    with pytest.raises(IndexError):
        sequences.sequence(number)


def test_the_last_token_is_a_target_where_the_windows_fit(token_file: Write) -> None:
    assert pack(token_file([33]), 16, "concat", False).sequence(1).targets[-1] == 32


def test_two_documents_in_one_row_have_a_label_less_each(token_file: Write) -> None:
    sequence = pack(token_file([7, 9, 16]), 16, "concat", True).sequence(0)
    assert sequence.document_lengths == (7, 9)
    assert sequence.positions.tolist() == [*range(7), *range(9)]
    assert np.flatnonzero(sequence.targets == IGNORE).tolist() == [6, 15]
    assert np.count_nonzero(sequence.targets != IGNORE) == (7 - 1) + (9 - 1)


def test_without_borders_every_token_has_its_successor_as_target(token_file: Write) -> None:
    sequence = pack(token_file([7, 9, 16]), 16, "concat", False).sequence(0)
    assert sequence.targets.tolist() == list(range(1, 17))


def test_a_document_cut_at_the_end_of_a_row_goes_on_in_the_next(token_file: Write) -> None:
    sequences = pack(token_file([10, 12, 11]), 16, "concat", True)
    first, second = sequences.sequence(0), sequences.sequence(1)
    assert (first.document_lengths, second.document_lengths) == ((10, 6), (6, 10))
    assert first.targets[-1] == 16  # the document goes on: its next token is known
    assert second.positions.tolist() == [*range(6), *range(10)]
    assert second.targets[5] == IGNORE


def test_empty_documents_leave_no_trace(token_file: Write) -> None:
    with_empty = pack(token_file([0, 7, 0, 0, 9, 1, 0], name="b.tokens"), 16, "concat", True).sequence(0)
    without = pack(token_file([7, 9, 1]), 16, "concat", True).sequence(0)
    assert with_empty.document_lengths == without.document_lengths
    assert with_empty.targets.tolist() == without.targets.tolist()
    whole = pack(token_file([0, 7, 0, 0, 9, 1, 0], name="b.tokens"), 16, "whole", True)
    assert all(length > 0 for i in range(len(whole)) for length in whole.sequence(i).document_lengths)


@pytest.mark.parametrize("borders", [False, True])
@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_each_token_is_seen_once_and_predicts_its_own_successor(token_file: Write, packing: str, borders: bool) -> None:
    lengths = [*np.random.default_rng(0).integers(0, 90, 400).tolist(), 33]
    file = token_file(lengths, vocab_size=VOCAB)
    last_of_document = set((file.offsets[1:] - 1).tolist())
    seq_len = 32
    sequences = pack(file, seq_len, packing, borders)
    seen = []
    for i in range(len(sequences)):
        tokens, targets, document_lengths, positions = sequences.sequence(i)
        assert sum(document_lengths) == seq_len
        assert positions.tolist() == [place for length in document_lengths for place in range(length)]
        padding = padding_of(document_lengths, tokens, targets)
        assert padding == 0 or packing == "whole"
        for place in range(seq_len - padding):
            token, target = int(tokens[place]), int(targets[place])
            seen.append(token)
            if token not in last_of_document:
                assert target == token + 1
            elif borders:
                assert target == IGNORE
            else:  # the next document of the row, or nothing
                next_token = int(tokens[place + 1]) if place + 1 < seq_len - padding else None
                assert target == next_token or (next_token is None and target in (IGNORE, token + 1))
    expected = file.num_tokens if packing == "whole" else len(sequences) * seq_len
    assert sorted(seen) == list(range(expected))


def padding_of(document_lengths: tuple[int, ...], tokens: np.ndarray, targets: np.ndarray) -> int:
    """The length of the last document where it is padding: end-of-document tokens without targets."""
    last = document_lengths[-1]
    is_padding = (tokens[-last:] == 256).all() and (targets[-last:] == IGNORE).all()
    return last if is_padding else 0


def test_whole_packing_never_cuts_a_document_that_fits(token_file: Write) -> None:
    lengths = [*np.random.default_rng(1).integers(1, 33, 500).tolist(), 32, 31, 1]
    file = token_file(lengths, vocab_size=VOCAB)
    sequences = pack(file, 32, "whole", True)
    starts = {int(start): length for start, length in zip(file.offsets[:-1], lengths, strict=True)}
    found = []
    for i in range(len(sequences)):
        tokens, _, document_lengths, _ = sequences.sequence(i)
        at = 0
        for length in document_lengths:
            if starts.get(int(tokens[at])) == length and tokens[at + length - 1] == tokens[at] + length - 1:
                found.append(int(tokens[at]))
            at += length
    assert sorted(found) == sorted(starts)
    # Best fit, longest first, comes close to the least number of rows.
    assert len(sequences) <= 1.02 * sum(lengths) / 32 + 1


def test_whole_packing_cuts_a_long_document_into_full_rows_that_lose_no_target(token_file: Write) -> None:
    sequences = pack(token_file([40, 8]), 16, "whole", True)
    rows = sorted((sequences.sequence(i) for i in range(len(sequences))), key=lambda row: int(row.tokens[0]))
    assert [row.document_lengths for row in rows] == [(16,), (16,), (8, 8)]
    assert rows[0].targets.tolist() == list(range(1, 17))
    assert rows[1].targets.tolist() == list(range(17, 33))
    assert rows[2].targets.tolist() == [*range(33, 40), IGNORE, *range(41, 48), IGNORE]


def test_padding_is_end_of_document_without_targets(token_file: Write) -> None:
    sequence = pack(token_file([5]), 16, "whole", True).sequence(0)
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4] + [256] * 11
    assert sequence.targets.tolist() == [1, 2, 3, 4] + [IGNORE] * 12
    assert sequence.document_lengths == (5, 11)


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_best_fit_overfills_no_row_and_leaves_none_empty(capacity: int) -> None:
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, capacity + 1, seed * 7 + 1)
        rows = best_fit(lengths, capacity)
        filled = np.bincount(rows, weights=lengths)
        assert filled.max() <= capacity
        assert filled.min() > 0
        assert np.count_nonzero(filled * 2 <= capacity) <= 1  # two rows half empty would have been one


def test_best_fit_is_the_textbook_algorithm() -> None:
    """The row count of placing one item at a time, longest first, into the fullest row that takes it."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 40, 200)
        free: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [(space, row) for row, space in enumerate(free) if space >= length]
            if fitting:
                free[min(fitting)[1]] -= length
            else:
                free.append(50 - length)
        filled = np.bincount(best_fit(lengths, 50), weights=lengths)
        assert sorted((50 - filled).astype(int).tolist()) == sorted(free)
