"""Is the Hugging Face hub within reach? Asked briefly: its own libraries retry for most of a minute."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request


def require_hub(what: str, instead: str, seconds: float = 5.0) -> None:
    """Return when the hub answers; otherwise raise ValueError within ``seconds``, naming ``what`` was wanted.

    instead: what the user can do without the hub.
    """
    if hub_is_off():
        raise ValueError(f"{what}: not on this machine, and HF_HUB_OFFLINE forbids the hub; {instead}")
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not _answers(address, seconds):
        raise ValueError(f"{what}: the Hugging Face hub ({address}) cannot be reached from here; {instead}")


def hub_is_off() -> bool:
    """Whether the environment asks for no hub access."""
    wanted = (os.environ.get(key, "").upper() for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(value in {"1", "ON", "YES", "TRUE"} for value in wanted)


def _answers(address: str, seconds: float) -> bool:
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds).close()
            answered.set()
        except urllib.error.HTTPError:
            answered.set()  # a refusal is an answer: the hub can be reached
        except (OSError, ValueError):
            return

    # In a thread, since looking up the host's name obeys no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answered.is_set()
