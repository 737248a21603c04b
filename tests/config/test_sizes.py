import pytest

from flashtrain.config import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16k", 16384),
        ("16K", 16384),
        ("16384", 16384),
        (16384, 16384),
        ("1.5k", 1536),
        ("0.5M", 524288),
        ("1m", 1048576),
    ],
)
def test_a_size_means_the_same_however_it_is_written(text, size):
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize("text", ["16 k", "16kb", "-1k", "1k.5", "16k16", "", "k", "0.3k", -1, 1.5, True, None, [1]])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_a_size_is_shown_short_only_where_that_is_exact():
    assert [format_size(n) for n in (512, 1000, 1024, 16384, 1048576, 1536 * 1024)] == [
        "512", "1000", "1k", "16k", "1M", "1536k",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("8m", 480), ("1h30m", 5400), (30, 30), ("2h", 7200)])
def test_a_duration_is_read_in_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "8 m", "m", "1x", -3])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)
