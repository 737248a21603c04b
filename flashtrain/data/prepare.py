"""Corpus to token files: once for each corpus, tokenizer and split, kept under ``data.prepared_dir``."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import DownloadColumn

from flashtrain.config.schema import DataConfig
from flashtrain.data.corpora import describe, documents
from flashtrain.data.document import CorpusHash, Document
from flashtrain.data.preparing import locked, progress_bar
from flashtrain.data.token_file import TokenFile, TokenFileWriter
from flashtrain.data.tokenizers import Tokenizer

_log = logging.getLogger(__name__)

_FORMAT = 1  # raised when the same corpus would be prepared to other tokens
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True)
class PreparedCorpus:
    """The two splits of a corpus, and what they are: ``describe()`` of the corpus, with documents, tokens and split."""

    train: TokenFile
    val: TokenFile
    description: dict[str, Any]


def prepare(config: DataConfig, tokenizer: Tokenizer, *, progress: bool = True) -> PreparedCorpus:
    """Tokenise the corpus of ``config`` into train and held-out token files, or open those of an earlier call.

    Each document becomes its tokens and one end-of-document token. Documents are held out by a hash of their text,
    about ``data.val_fraction`` of them; where that gives fewer than two, the end of the token stream is held out
    instead. The files lie in ``<prepared_dir>/<name>-<hash>/``, made whole or not at all: several processes may call
    this at once.

    Raises ValueError for bad input, naming file and place, and OSError when the disk is full.
    """
    if not 0 <= config.val_fraction < 1:
        raise ValueError(f"data.val_fraction={config.val_fraction}: must be at least 0 and below 1")
    corpus = describe(config)
    folder = Path(config.prepared_dir) / _folder_name(config, tokenizer, corpus)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not folder.exists():  # else another process has just made it
                _build(folder, config, tokenizer, corpus, progress)
    try:
        train, val = TokenFile.open(folder / "train.tokens"), TokenFile.open(folder / "val.tokens")
        for file in (train, val):
            file.check(tokenizer.vocab_size, tokenizer.fingerprint)
    except ValueError as error:
        raise ValueError(f"{error}: delete {folder}, and the next run makes it anew") from error
    return PreparedCorpus(train, val, train.header["corpus"])


def _folder_name(config: DataConfig, tokenizer: Tokenizer, corpus: dict[str, Any]) -> str:
    """Readable, and different whenever the tokens would be."""
    key = [_FORMAT, corpus["fingerprint"], tokenizer.fingerprint, config.val_fraction, config.min_document_tokens]
    readable = config.source if config.source == "python" else Path(corpus["name"]).name
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{readable} {Path(tokenizer.name).name}").strip("-")[:60]
    return f"{readable}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}"


def _build(folder: Path, config: DataConfig, tokenizer: Tokenizer, corpus: dict[str, Any], progress: bool) -> None:
    """Make ``folder`` in one rename. The caller holds its lock, so an unfinished one is a killed process's and goes."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        _write_splits(unfinished, config, tokenizer, corpus, progress)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_splits(
    folder: Path, config: DataConfig, tokenizer: Tokenizer, corpus: dict[str, Any], progress: bool
) -> None:
    """Write train.tokens and val.tokens, each with the whole description in its header."""
    description = corpus | {"documents": 0, "empty_documents": 0, "short_documents": 0}
    content = CorpusHash()
    with _writer(folder / "train.tokens", tokenizer) as train, _writer(folder / "val.tokens", tokenizer) as val:
        # The size of the text, where it is known.
        total = corpus["bytes"] if corpus["source"] in ("python", "text") else None
        with progress_bar(f"preparing {corpus['source']} data", total, progress, DownloadColumn()) as advance:
            for document, ids in _tokenised(documents(config), tokenizer):
                advance(len(document.text))
                if not ids.size:
                    description["empty_documents"] += 1
                elif ids.size < config.min_document_tokens:
                    description["short_documents"] += 1
                else:
                    description["documents"] += 1
                    content.add(document)
                    split = val if document.held_out(config.val_fraction) else train
                    split.add(np.append(ids, np.uint32(tokenizer.eod)))
        _check_not_empty(config, description)
        description |= {"text_fingerprint": content.hexdigest(), "tokenizer": tokenizer.name}
        if config.val_fraction == 0 or (val.num_documents >= 2 and train.num_documents):
            description |= _figures(f"{config.val_fraction} of the documents, by a hash of their text", train, val)
            train.finish(description)
            val.finish(description)
        else:
            _split_tail(train.finish(description), val.finish(description), config, tokenizer)


def _split_tail(train: TokenFile, val: TokenFile, config: DataConfig, tokenizer: Tokenizer) -> None:
    """Rewrite both files: the end of all tokens is held out, and a document across the cut is divided."""
    held_out = max(1, round((train.num_tokens + val.num_tokens) * config.val_fraction))
    cut = train.num_tokens + val.num_tokens - held_out
    start = 0
    with _writer(train.path, tokenizer) as new_train, _writer(val.path, tokenizer) as new_val:
        for file in (train, val):
            for begin, end in zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True):
                border = min(max(begin, cut - start), end)
                if begin < border:
                    new_train.add(file.tokens[begin:border])
                if border < end:
                    new_val.add(file.tokens[border:end])
            start += file.num_tokens
        how = f"the last {config.val_fraction} of all tokens (too few documents to hold out whole ones)"
        description = train.header["corpus"] | _figures(how, new_train, new_val)
        new_train.finish(description)
        new_val.finish(description)


def _tokenised(corpus: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids, in order, encoded by threads: the tokenizer libraries work outside Python's lock."""
    workers = min(os.cpu_count() or 1, 16)
    waiting: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for group in _groups(corpus):
            waiting.append((group, pool.submit(_encode, group, tokenizer)))
            if len(waiting) > 2 * workers:
                group, ids = waiting.popleft()
                yield from zip(group, ids.result(), strict=True)
        for group, ids in waiting:
            yield from zip(group, ids.result(), strict=True)


def _groups(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about a megabyte, so that millions of short ones do not each cost a task."""
    group, size = [], 0
    for document in corpus:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: list[Document], tokenizer: Tokenizer) -> list[np.ndarray]:
    encoded = []
    for document in group:
        try:
            encoded.append(tokenizer.encode(document.text))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{document.name}: not UTF-8 at byte {error.start} ({error.reason}); convert this document, "
                "or use data.tokenizer=bytes, which takes any bytes"
            ) from error
        _ = document.digest  # hashed here, in the thread, and kept
    return encoded


def _writer(path: Path, tokenizer: Tokenizer) -> TokenFileWriter:
    return TokenFileWriter(
        path,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )


def _figures(split: str, train: TokenFileWriter, val: TokenFileWriter) -> dict[str, Any]:
    return {
        "held_out": split,
        "train_documents": train.num_documents,
        "train_tokens": train.num_tokens,
        "val_documents": val.num_documents,
        "val_tokens": val.num_tokens,
    }


def _check_not_empty(config: DataConfig, description: dict[str, Any]) -> None:
    if not description["documents"]:
        raise ValueError(
            f"data.source={config.source} ({description['name']}): no document is left: "
            f"{description['empty_documents']} are empty, {description['short_documents']} have fewer tokens than "
            f"data.min_document_tokens={config.min_document_tokens}"
        )
