"""Small corpora and token files for the tests of the data package."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtrain.config.schema import DataConfig
from flashtrain.data.token_file import TokenFile, TokenFileWriter

EOD = 256


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A DataConfig of the byte tokenizer, prepared in the test's own folder; keywords replace its fields."""
    base = DataConfig(
        source="text",
        path=None,
        name=None,
        subset=None,
        split="train",
        text_key="text",
        tokenizer=None,
        prepared_dir=str(tmp_path / "prepared"),
        val_fraction=0.1,
        packing="concat",
        document_borders=False,
        min_document_tokens=0,
        num_workers=0,
    )
    return lambda **fields: replace(base, **fields)


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., TokenFile]:
    """Writes documents, given as id lists or as lengths, to a token file.

    Lengths give the tokens 0, 1, 2, ... over all documents, so that a token's value is its place in the stream.
    """

    def write(documents: Sequence[Any], vocab_size: int = 257, name: str = "a.tokens") -> TokenFile:
        with TokenFileWriter(
            tmp_path / name, vocab_size=vocab_size, eod=EOD, tokenizer="bytes", tokenizer_fingerprint="f" * 64
        ) as writer:
            for document in documents:
                if isinstance(document, int):
                    document = np.arange(writer.num_tokens, writer.num_tokens + document)
                writer.add(np.asarray(document, dtype=np.int64))
            return writer.finish({"name": "test"})

    return write


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up a host or connecting to one fails, as on a machine without a network."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no network in this test")

    for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
