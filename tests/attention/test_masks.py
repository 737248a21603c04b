"""Masks are values: they compare, hash, combine in any order, and refuse what makes no sense by name."""

import pytest

from flashtrain.attention import Causal, Documents, Full, SlidingWindow


def test_equal_masks_compare_and_hash_equal() -> None:
    assert Causal() == Causal() != SlidingWindow(3)
    assert SlidingWindow(3, 0) == SlidingWindow(3, 0) != SlidingWindow(3, 1)
    assert Documents([[3, 4]]) == Documents(((3, 4),)) != Documents(((4, 3),))
    assert len({Causal(), Causal(), Documents(((3, 4),)), Documents([(3, 4)])}) == 2


def test_the_order_of_a_conjunction_does_not_matter() -> None:
    a, b, c = Causal(), SlidingWindow(5), Documents(((3, 4),))
    assert a & b & c == c & (b & a) == (b & c) & a
    assert hash(a & b & c) == hash(c & b & a)
    assert a & b != a & c


def test_full_is_neutral_and_a_mask_joined_with_itself_is_itself() -> None:
    assert Full() & Causal() == Causal() & Causal()
    assert (Causal() & SlidingWindow(2)) & Full() == Causal() & SlidingWindow(2)


def test_documents_from_cumulative_lengths() -> None:
    assert Documents.from_offsets([0, 3, 3, 5]) == Documents(((3, 0, 2),))
    assert Documents.from_offsets([0, 3, 5], [0, 1, 9]) == Documents(((3, 2),), ((1, 8),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(-1), "left=-1"),
        (lambda: SlidingWindow(None, -2), "right=-2"),
        (lambda: Documents(()), r"lengths=\(\)"),
        (lambda: Documents(((3, -1),)), r"lengths\[0\]=\(3, -1\)"),
        (lambda: Documents(((3, 1),), ((3,),)), "pair them"),
        (lambda: Documents.from_offsets([1, 3]), "start at 0"),
        (lambda: Documents.from_offsets([]), "start at 0"),
        (lambda: Documents.from_offsets([0, 3, 2]), "never decrease"),
        (lambda: Documents.from_offsets([0, 3], [0, 4, 2]), "key_offsets"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_mask_combines_only_with_a_mask() -> None:
    with pytest.raises(TypeError):
        Causal() & 3  # type: ignore[operator]
