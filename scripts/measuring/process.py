"""A row of a benchmark in a process of its own: its memory is its own, and a crash is a row."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

_RESULT = "RESULT "


def tell_row(row: dict[str, Any]) -> None:
    """Hand a row to the process that waits for it in `row_in_process`."""
    print(_RESULT + json.dumps(row), flush=True)


def row_in_process(command: Sequence[str], limit: float) -> dict[str, Any]:
    """The row that `command` tells within `limit` seconds, or {"failed": why there is none}."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit:.0f} s"}
    for text in process.stdout.splitlines():
        if text.startswith(_RESULT):
            found: dict[str, Any] = json.loads(text.removeprefix(_RESULT))
            return found
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    return {"failed": f"ended with {process.returncode}: {last[:300]}"}
