"""A token file: the tokens of one split, end to end, memory-mapped, with a header that says what they are.

Layout, little-endian:

    bytes 0..7       magic
    bytes 8..11      version, uint32
    bytes 12..15     length of the header, uint32
    bytes 16..16383  the header as JSON, then zeros
    from 16384       tokens, uint16 where the vocabulary has at most 65,536 ids, else uint32
    after them       zeros up to a multiple of 8, then int64 [documents + 1]: where each document starts, and the end
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from flashtrain.data.preparing import NO_SPACE

MAGIC = b"FLTOKENS"
VERSION = 1
_TOKENS_AT = 16384
_CHUNK = 1 << 24
_REQUIRED = {
    "dtype": str,
    "vocab_size": int,
    "tokenizer": str,
    "tokenizer_fingerprint": str,
    "eod": int,
    "num_tokens": int,
    "num_documents": int,
    "fingerprint": str,
    "corpus": dict,
}


def token_dtype(vocab_size: int) -> str:
    """The narrowest of "uint16" and "uint32" that holds the ids 0..vocab_size-1."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenFile:
    """An open token file. Nothing is read until it is asked for.

    tokens: uint16 or uint32 [num_tokens], memory-mapped.
    offsets: int64 [num_documents + 1], memory-mapped; document d is tokens[offsets[d]:offsets[d + 1]].
    header: the JSON header; ``header["fingerprint"]`` is the SHA-256 of the tokens.
    """

    def __init__(self, path: Path, header: dict[str, Any], tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.path = path
        self.header = header
        self.tokens = tokens
        self.offsets = offsets
        self.vocab_size: int = header["vocab_size"]
        self.eod: int = header["eod"]
        self.tokenizer: str = header["tokenizer"]
        self.tokenizer_fingerprint: str = header["tokenizer_fingerprint"]
        self.fingerprint: str = header["fingerprint"]
        self.num_tokens: int = header["num_tokens"]
        self.num_documents: int = header["num_documents"]

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Map the file at ``path``. Raises ValueError, naming it, when it is not a whole token file."""
        path = Path(path)
        header = _read_header(path)
        tokens_end = _TOKENS_AT + header["num_tokens"] * np.dtype(header["dtype"]).itemsize
        offsets_at = _round_up(tokens_end)
        expected = offsets_at + 8 * (header["num_documents"] + 1)
        actual = path.stat().st_size
        if actual != expected:
            what = "truncated" if actual < expected else "longer than it should be"
            raise ValueError(
                f"{path}: {what}: {actual:,} bytes, the header asks for {expected:,}; prepare the data again"
            )
        raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        tokens = raw[_TOKENS_AT:tokens_end].view(np.dtype(header["dtype"]).newbyteorder("<"))
        offsets = raw[offsets_at:].view("<i8")
        if offsets[0] != 0 or offsets[-1] != header["num_tokens"] or (np.diff(offsets) < 0).any():
            raise ValueError(f"{path}: damaged: the document offsets do not run from 0 to {header['num_tokens']}")
        return cls(path, header, tokens, offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile.open, (self.path,)  # a worker process maps the file itself

    def read(self, start: int, stop: int) -> np.ndarray:
        """tokens[start:stop] as int64; ValueError where one of them is outside the vocabulary."""
        tokens = self.tokens[start:stop].astype(np.int64)
        if tokens.size and tokens.max() >= self.vocab_size:
            self._raise_outside(self.vocab_size, start)
        return tokens

    def check(self, vocab_size: int, tokenizer_fingerprint: str | None = None) -> None:
        """Raise ValueError unless these tokens suit a model of ``vocab_size`` ids and this tokenizer.

        The largest id stands in the header; the tokens are scanned only when it is missing there or too large.
        """
        if tokenizer_fingerprint is not None and tokenizer_fingerprint != self.tokenizer_fingerprint:
            raise ValueError(
                f"{self.path}: made with another tokenizer: {self.tokenizer!r} ({self.tokenizer_fingerprint[:12]}), "
                f"not the one in use ({tokenizer_fingerprint[:12]}); prepare the data again or set data.tokenizer"
            )
        largest = self.header.get("max_token")
        if not isinstance(largest, int) or largest >= vocab_size:
            self._raise_outside(vocab_size, 0)

    def _raise_outside(self, vocab_size: int, start: int) -> None:
        """Raise ValueError for the first id from ``start`` on that is not below ``vocab_size``, if there is one."""
        for begin in range(start, self.num_tokens, _CHUNK):
            outside = np.flatnonzero(self.tokens[begin : begin + _CHUNK] >= vocab_size)
            if outside.size:
                position = begin + int(outside[0])
                raise ValueError(_outside(self.path, int(self.tokens[position]), position, vocab_size))


class TokenFileWriter:
    """Writes a token file document by document, beside its place, and moves it there when it is whole.

        with TokenFileWriter(path, vocab_size=257, eod=256, tokenizer="bytes", tokenizer_fingerprint="...") as writer:
            writer.add(ids)
            writer.finish({"name": "..."})

    Leaving the block without ``finish``, or by an exception, leaves nothing behind. A full disk is an OSError that
    names the path and the space left.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int, eod: int, tokenizer: str, tokenizer_fingerprint: str
    ) -> None:
        self.path = Path(path)
        self.num_tokens = 0
        self._offsets = [np.zeros(1, dtype="<i8")]
        self._ends: list[int] = []
        self._max_token = -1
        self._hash = hashlib.sha256()
        self._header: dict[str, Any] = {
            "dtype": token_dtype(vocab_size),
            "vocab_size": vocab_size,
            "tokenizer": tokenizer,
            "tokenizer_fingerprint": tokenizer_fingerprint,
            "eod": eod,
        }
        self._dtype = np.dtype(self._header["dtype"]).newbyteorder("<")
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with self._naming_the_disk():
            self._file = self._temporary.open("wb")
            self._file.write(bytes(_TOKENS_AT))

    @property
    def num_documents(self) -> int:
        return sum(len(part) for part in self._offsets) - 1 + len(self._ends)

    def add(self, ids: np.ndarray) -> None:
        """Append one document, an integer array [tokens]. ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"{self.path}: a document is a 1-D integer array, not {ids.dtype} {list(ids.shape)}")
        if ids.size:
            largest, smallest = int(ids.max()), int(ids.min())
            if smallest < 0 or largest >= self._header["vocab_size"]:
                outside = smallest if smallest < 0 else largest
                position = self.num_tokens + int((ids == outside).argmax())
                raise ValueError(_outside(self.path, outside, position, self._header["vocab_size"]))
            self._max_token = max(self._max_token, largest)
            data = ids.astype(self._dtype).tobytes()
            self._hash.update(data)
            with self._naming_the_disk():
                self._file.write(data)
        self.num_tokens += ids.size
        self._ends.append(self.num_tokens)
        if len(self._ends) == 1 << 16:  # Python integers would take four times the memory
            self._offsets.append(np.array(self._ends, dtype="<i8"))
            self._ends = []

    def finish(self, corpus: dict[str, Any]) -> TokenFile:
        """Write offsets and header, flush to the disk, move the file into place, and open it.

        corpus: JSON-able description of where the tokens come from.
        """
        offsets = np.concatenate([*self._offsets, np.array(self._ends, dtype="<i8")])
        header = self._header | {
            "num_tokens": self.num_tokens,
            "num_documents": len(offsets) - 1,
            "max_token": self._max_token,
            "fingerprint": self._hash.hexdigest(),
            "corpus": corpus,
        }
        text = json.dumps(header).encode()
        if len(text) > _TOKENS_AT - 16:
            raise ValueError(f"{self.path}: a header of {len(text)} bytes does not fit; shorten the corpus description")
        with self._naming_the_disk():
            end = self._file.tell()
            self._file.write(bytes(_round_up(end) - end) + offsets.tobytes())
            self._file.seek(0)
            self._file.write(MAGIC + VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
        return TokenFile.open(self.path)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        """Drop what is unfinished; after ``finish`` there is nothing to drop."""
        try:
            self._file.close()
        except OSError as error:  # what was still buffered does not fit either
            if error.errno not in NO_SPACE:
                raise
        finally:
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _naming_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            free = shutil.disk_usage(self.path.parent).free if self.path.parent.exists() else 0
            message = f"{error.strerror}: cannot write {self.path}, {free / 2**20:,.0f} MiB are free there"
            raise OSError(error.errno, message) from error


def _read_header(path: Path) -> dict[str, Any]:
    """The JSON header of ``path``, checked field by field."""
    try:
        with path.open("rb") as file:
            start = file.read(_TOKENS_AT)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such token file") from error
    if not start:
        raise ValueError(f"{path}: the file is empty")
    if not start.startswith(MAGIC):
        raise ValueError(f"{path}: not a flashtrain token file (it starts with {start[:8]!r})")
    if len(start) < _TOKENS_AT:
        raise ValueError(f"{path}: truncated within its header; prepare the data again")
    version, length = int.from_bytes(start[8:12], "little"), int.from_bytes(start[12:16], "little")
    if not 1 <= version <= VERSION:
        raise ValueError(f"{path}: token file version {version}, this flashtrain reads up to {VERSION}")
    try:
        header = json.loads(start[16 : 16 + length])
    except ValueError as error:
        raise ValueError(f"{path}: the header is damaged ({error}); prepare the data again") from error
    for key, kind in _REQUIRED.items():
        if not isinstance(header, dict) or not isinstance(header.get(key), kind):
            raise ValueError(f"{path}: the header has no valid {key!r}; prepare the data again")
    sizes = header["vocab_size"] - 1, header["num_tokens"], header["num_documents"]
    if min(sizes) < 0 or max(sizes) >= 2**63:
        raise ValueError(f"{path}: the header holds an impossible size; prepare the data again")
    if header["dtype"] != token_dtype(header["vocab_size"]):
        raise ValueError(f"{path}: dtype {header['dtype']} does not suit a vocabulary of {header['vocab_size']} ids")
    return header


def _outside(path: Path, token: int, position: int, vocab_size: int) -> str:
    return f"{path}: token id {token} at position {position} is outside the vocabulary of {vocab_size} ids"


def _round_up(size: int) -> int:
    return -(-size // 8) * 8
