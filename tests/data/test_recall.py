"""Recall tasks: the answer is in the sequence, and the targets ask for nothing that is not."""

import numpy as np
import pytest

from flashtrain.data.batch import IGNORE
from flashtrain.data.recall import any_task, associative_recall, induction, passkey, shortest_passkey
from flashtrain.data.tokenizers import load_tokenizer


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_passkey_stands_at_its_depth_and_is_asked_for_at_the_end(name, depth):
    tokenizer = load_tokenizer(name)
    tokens, targets = passkey(tokenizer, 1000, depth, seed=4)
    assert tokens.shape == targets.shape == (1000,)
    asked = targets[targets != IGNORE]
    number = tokenizer.decode(asked).strip()
    assert len(number) == 5
    assert number.isdigit()
    text = tokenizer.decode(tokens)
    assert text.count(number) >= 2  # the needle, and whatever of the answer is input
    before = tokens[targets == IGNORE]
    place = text.index(number) / len(text)
    assert abs(place - depth) < 0.2
    assert tokenizer.decode(np.append(before, tokens[targets != IGNORE][:1])).endswith("The number of the safe is")
    # Each token is the one that the target before it asks for.
    places = np.flatnonzero(targets != IGNORE)
    assert places[-1] == 999
    assert (tokens[places[1:]] == targets[places[:-1]]).all()
    assert (passkey(tokenizer, 1000, depth, 4).tokens == tokens).all()
    assert (passkey(tokenizer, 1000, depth, 5).tokens != tokens).any()


def fits(tokenizer, length):
    try:
        return len(passkey(tokenizer, length, 0.5, 0).tokens) == length
    except ValueError:
        return False


def test_lengths_without_room_and_depths_outside_are_named():
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(ValueError, match="length=50: a passkey needs at least 1"):
        passkey(tokenizer, 50, 0.5, 0)
    with pytest.raises(ValueError, match=r"depth=1\.5"):
        passkey(tokenizer, 500, 1.5, 0)
    least = next(n for n in range(100, 200) if fits(tokenizer, n))
    assert 0 <= shortest_passkey(tokenizer) - least <= 21
    with pytest.raises(ValueError, match="length=3"):
        induction(10, 3, 0)
    with pytest.raises(ValueError, match="length=3"):
        associative_recall(10, 3, 0)


@pytest.mark.parametrize(("vocab", "length"), [(257, 64), (20, 200), (50_257, 101)])
def test_each_key_has_one_value_which_is_asked_for_when_it_comes_again(vocab, length):
    tokens, targets = associative_recall(vocab, length, seed=2)
    assert len(tokens) == length
    assert 0 <= tokens.min() <= tokens.max() < vocab
    asked = np.flatnonzero(targets != IGNORE)
    assert len(asked) == min(length // 4, vocab // 2)
    for place in asked:
        first = np.flatnonzero(tokens == tokens[place])
        assert len(first) == 2  # the key stands there once before
        assert tokens[first[0] + 1] == targets[place] == tokens[min(place + 1, length - 1)] or place + 1 == length


@pytest.mark.parametrize(("length", "once"), [(9, None), (10, None), (300, None), (300, 1), (300, 70), (300, 299)])
def test_induction_asks_for_what_followed_the_same_tokens_before(length, once):
    tokens, targets = induction(1000, length, 2, once)
    period = once or -(-(length + 1) // 2)
    places = np.flatnonzero(targets != IGNORE)
    assert (places == np.arange(period, length)).all()
    assert (tokens[places] == tokens[places - period]).all()
    assert (targets[places] == tokens[places - period + 1]).all()


@pytest.mark.parametrize("once", [0, 300])
def test_something_must_come_again(once):
    with pytest.raises(ValueError, match=f"once={once}: must lie between 1 and 299"):
        induction(1000, 300, 2, once)


def test_mixed_tasks_are_of_the_length_asked_for_and_each_comes():
    tokenizer = load_tokenizer("bytes")
    numbers = set()
    for seed in range(60):
        tokens, targets = any_task(tokenizer, 256, seed)
        assert len(tokens) == len(targets) == 256
        numbers.add(int((targets != IGNORE).sum()))
    assert {6, 64} < numbers
    # What comes again does so at many distances, short and long, up to half of the length.
    distances = {256 - number for number in numbers - {6, 64}}
    assert len(distances) >= 8
    assert 4 <= min(distances) < 20
    assert 64 < max(distances) <= 129
    assert all(
        len(any_task(tokenizer, length, seed).tokens) == length for length in (4, 5, 8, 40) for seed in range(30)
    )


def test_passkeys_of_training_stand_anywhere_and_also_at_the_very_ends():
    tokenizer, length = load_tokenizer("bytes"), 4096
    places = []
    for seed in range(600):
        text = tokenizer.decode(any_task(tokenizer, length, seed).tokens)
        if "number of the safe" in text:
            places.append(text.index(" Mind this:"))
    assert 240 < len(places) < 360
    last = max(places)
    assert last > length - 160
    assert 6 <= places.count(0) <= 30
    assert 6 <= places.count(last) <= 30
    within = [place for place in places if 0 < place < last]
    assert {4 * place // length for place in within} == {0, 1, 2, 3}
