"""Sizes and durations as people write them: 16k, 0.5M, 90s, 8m, 1h30m."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_size(value: object) -> int:
    """A number of tokens or steps. k, M and G are 1,024 and its powers: 16k = 16K = 16384, 0.5M = 524288.

    Raises:
        ValueError: anything else, negative numbers, and sizes that are not a whole number.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and value >= 0 and value.is_integer():
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a size such as 16384, 16k or 0.5M (k = 1024, M = 1024 * 1024)")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not size.is_integer():
        raise ValueError("expected a size that is a whole number")
    return int(size)


def format_size(size: int) -> str:
    """The short form where it is exact: 16384 is 16k, 1000 stays 1000."""
    for unit in ("m", "k"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{'M' if unit == 'm' else unit}"
    return str(size)


def parse_duration(value: object) -> float:
    """Seconds, from a number of seconds or a text such as 90s, 8m or 1h30m.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError("expected a duration such as 90s, 8m or 1h30m")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds
