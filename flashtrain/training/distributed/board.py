"""Words that the processes of a run leave for each other when something is wrong."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

_Answer = TypeVar("_Answer")
_PATIENCE = 5.0  # seconds for an answer that usually takes a millisecond


class Board:
    """Kept by the store in which the processes met, whose own process may be what was lost.

    A store that is held by a stopped process answers nothing, whatever its timeout: so a thread is what waits for it.

    Attributes:
        gone: nothing can be read or written any more.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self.gone = store, False

    def write(self, key: str, word: str) -> None:
        self._ask(lambda: self._store.set(key, word), None)

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]), False)

    def awaited(self, key: str, seconds: float) -> str | None:
        """What another process writes there in that time; None if none does."""
        end = time.monotonic() + seconds
        while not self.gone and time.monotonic() < end:
            if self.has(key):
                return self._ask(lambda: self._store.get(key).decode(), None)
            time.sleep(0.1)
        return None

    def _ask(self, what: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        if self.gone:
            return otherwise
        answers: list[_Answer] = []

        def ask() -> None:
            with contextlib.suppress(dist.DistError):
                answers.append(what())

        asking = threading.Thread(target=ask, name="board", daemon=True)
        asking.start()
        asking.join(_PATIENCE)
        self.gone = not answers
        return answers[0] if answers else otherwise


def held_by_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether process 0 holds the store, as under srun; torchrun and `launch` hold it themselves."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
