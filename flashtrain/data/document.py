"""A document of a corpus, and what identifies it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Document:
    """A text that stands by itself.

    name: where it comes from, relative to the corpus: a file, or a file and a row.
    text: as UTF-8; a text file's bytes are as they lie there, UTF-8 or not.
    """

    name: str
    text: bytes

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text, 32 bytes: the same for the same text whatever its name."""
        return hashlib.sha256(self.text).digest()

    def held_out(self, fraction: float) -> bool:
        """Whether this document belongs to the held-out ``fraction`` of all documents.

        Decided by the text alone: copies of a document fall on the same side, also where a file is renamed or a row
        moves.
        """
        return int.from_bytes(self.digest[:8], "big") < fraction * 2**64


class CorpusHash:
    """SHA-256 over the names and texts of a corpus, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        self._hash.update(hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest() + document.digest)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
