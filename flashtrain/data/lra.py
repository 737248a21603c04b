"""The Long Range Arena's tasks on token sequences: ListOps, generated or from its files, and three from files alone.

    parts = open_task("text", path="aclImdb", ...)        # {"train": SequenceSet, "val": ..., "test": ...}

Sources and layouts are in data/lra.md. Bytes and grey levels become ids by adding 1, since 0 is padding.
"""

from __future__ import annotations

import csv
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from flashtrain.config.schema import SequencesConfig
from flashtrain.data import listops
from flashtrain.data.preparing import locked, progress_bar
from flashtrain.data.sequences import PARTS, SequenceSet

# Ids with the padding, and labels.
VOCABULARY = {"listops": len(listops.TOKENS), "text": 257, "retrieval": 257, "grey_images": 257}
CLASSES = {"listops": listops.CLASSES, "text": 2, "retrieval": 2, "grey_images": 10}
# The Arena's numbers of ListOps samples.
LISTOPS_COUNTS = {"train": 96_000, "val": 2_000, "test": 2_000}

_FORMAT = 1  # raised when the same files or rules would give other sequences
_VAL_SEED = 42  # of the tenth of IMDb's training part that is held out
_CHUNK = 250  # ListOps samples a task of a worker
_LUMA = np.array([0.2989, 0.587, 0.114], np.float32)  # of red, green and blue, as TensorFlow's rgb_to_grayscale
_CIFAR_ROW = 1 + 3 * 32 * 32


def open_task(config: SequencesConfig, seq_len: int, progress: bool = True) -> dict[str, SequenceSet]:
    """The three parts of a task, prepared now or by an earlier call; texts are cut at `seq_len` tokens.

    Raises:
        ValueError: files that are missing or are not what they should be, by name.
    """
    folder = None if config.path is None else Path(config.path).expanduser()
    make: Callable[[], dict[str, SequenceSet]]
    if config.source == "listops" and folder is None:
        wanted = (config.train_sequences, config.val_sequences, config.test_sequences)
        counts = {part: n or LISTOPS_COUNTS[part] for part, n in zip(PARTS, wanted, strict=True)}
        key = [_FORMAT, "listops", config.seed, counts]
        make = partial(_generate, config.seed, counts, progress)
    else:
        assert folder is not None
        key = [_FORMAT, config.source, seq_len, *_stamps(config.source, folder)]
        make = partial(_READERS[config.source], folder, seq_len)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    paths = {part: Path(config.prepared_dir) / f"{config.source}-{part}-{digest}.npz" for part in PARTS}
    if not all(path.exists() for path in paths.values()):
        paths["train"].parent.mkdir(parents=True, exist_ok=True)
        with locked(paths["train"]):
            if not all(path.exists() for path in paths.values()):  # else another process has just made them
                for part, found in make().items():
                    unfinished = paths[part].with_suffix(".unfinished")
                    found.save(unfinished)
                    unfinished.replace(paths[part])
    parts = {part: SequenceSet.load(path) for part, path in paths.items()}
    limits = {"train": config.train_sequences, "val": config.val_sequences, "test": config.test_sequences}
    return {part: found.first(limits[part]) for part, found in parts.items()}


def _generate(seed: int, counts: dict[str, int], progress: bool) -> dict[str, SequenceSet]:
    workers = os.cpu_count() or 1
    with (
        # Fresh processes: a fork of one that has threads or a GPU may hang.
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
        progress_bar("ListOps samples", sum(counts.values()), progress) as advance,
    ):
        parts = {}
        for part, count in counts.items():
            indices = [range(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK)]
            samples = []
            for chunk in pool.map(partial(_listops_chunk, seed, part), indices):
                samples += chunk
                advance(len(chunk))
            parts[part] = _set_of(iter(samples))
    return parts


def _listops_chunk(seed: int, part: str, indices: range) -> list[tuple[np.ndarray, int]]:
    return [listops.listops(seed, part, index) for index in indices]


def _set_of(samples: Iterator[tuple[np.ndarray, int]]) -> SequenceSet:
    texts, labels = [], []
    for text, label in samples:
        texts.append(text)
        labels.append(label)
    return SequenceSet.of(texts, labels)


def _read_listops(folder: Path, seq_len: int) -> dict[str, SequenceSet]:
    return {part: _set_of(_listops_lines(folder / f"basic_{part}.tsv", seq_len)) for part in PARTS}


def _listops_lines(path: Path, seq_len: int) -> Iterator[tuple[np.ndarray, int]]:
    for number, line in enumerate(_there(path).read_text().splitlines()):
        if number == 0 and line.startswith("Source"):
            continue
        source, _, target = line.partition("\t")
        try:
            yield listops.parse(source)[:seq_len], int(target)
        except ValueError as error:
            raise ValueError(f"{path}, line {number + 1}: {error}; the file needs `Source<tab>Target` lines") from error


def _read_imdb(folder: Path, seq_len: int) -> dict[str, SequenceSet]:
    """A tenth of the training part is held out for validation: the Arena and others validate on the test part."""
    train = list(_reviews(folder / "train", seq_len))
    order = np.random.Generator(np.random.Philox(_VAL_SEED)).permutation(len(train))
    held_out = len(train) // 10
    return {
        "train": _set_of(train[i] for i in np.sort(order[held_out:])),
        "val": _set_of(train[i] for i in np.sort(order[:held_out])),
        "test": _set_of(_reviews(folder / "test", seq_len)),
    }


def _reviews(folder: Path, seq_len: int) -> Iterator[tuple[np.ndarray, int]]:
    for label, name in enumerate(("neg", "pos")):
        files = sorted((folder / name).glob("*.txt"))
        if not files:
            raise ValueError(f"{folder / name}: no .txt files there; sequences.path is the unpacked folder aclImdb")
        yield from ((_bytes(file.read_bytes(), seq_len), label) for file in files)


def _read_aan(folder: Path, seq_len: int) -> dict[str, SequenceSet]:
    return {
        part: _pairs(folder / f"new_aan_pairs.{name}.tsv", seq_len)
        for part, name in zip(PARTS, ("train", "eval", "test"), strict=True)
    }


def _pairs(path: Path, seq_len: int) -> SequenceSet:
    texts, labels = [], []
    csv.field_size_limit(sys.maxsize)
    with _there(path).open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            if len(row) != 5 or row[0] not in ("0", "1", "0.0", "1.0"):
                raise ValueError(
                    f"{path}, line {number}: not `label<tab>id<tab>id<tab>text<tab>text` with a label 0 or 1"
                )
            labels.append(int(float(row[0])))
            texts += [_bytes(text.encode(), seq_len) for text in row[3:]]
    return SequenceSet.of(texts, labels)


def _read_cifar(folder: Path, seq_len: int) -> dict[str, SequenceSet]:
    """Of the 50,000 training images the last tenth is for validation, as in the Arena."""
    if seq_len != 32 * 32:
        raise ValueError(f"seq_len={seq_len}: CIFAR-10's images have 32 x 32 pixels; write seq_len=1k")
    batches = [_grey(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
    tokens, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    cut = len(labels) - len(labels) // 10
    return {
        "train": _rows(tokens[:cut], labels[:cut]),
        "val": _rows(tokens[cut:], labels[cut:]),
        "test": _rows(*_grey(folder / "test_batch.bin")),
    }


def _grey(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids uint16 [n, 1024] and labels int64 [n] of a batch of the binary version."""
    data = np.frombuffer(_there(path).read_bytes(), np.uint8)
    if not len(data) or len(data) % _CIFAR_ROW or data[::_CIFAR_ROW].max() > 9:
        raise ValueError(f"{path}: not a batch of CIFAR-10's binary version; take cifar-10-binary.tar.gz")
    rows = data.reshape(-1, _CIFAR_ROW)
    colours = rows[:, 1:].reshape(len(rows), 3, -1).astype(np.float32)
    return np.einsum("c,ncp->np", _LUMA, colours).astype(np.uint16) + 1, rows[:, 0].astype(np.int64)


def _rows(tokens: np.ndarray, labels: np.ndarray) -> SequenceSet:
    return SequenceSet(tokens.ravel(), np.arange(1, len(labels) + 1) * tokens.shape[1], labels)


def _bytes(text: bytes, seq_len: int) -> np.ndarray:
    return np.frombuffer(text[:seq_len], np.uint8).astype(np.uint16) + 1


def _there(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; sequences.path is the folder that data/lra.md describes")
    return path


def _stamps(source: str, folder: Path) -> list[object]:
    """What changes when the files do: the folder, and sizes and times of those in it."""
    if not folder.is_dir():
        raise ValueError(f"sequences.path={folder}: there is no such folder")
    places = (
        [folder]
        if source != "text"
        else [folder / part / name for part in ("train", "test") for name in ("neg", "pos")]
    )
    found = [(str(place), place.stat().st_mtime_ns) for place in places if place.is_dir()]
    files = sorted(folder.glob("*.tsv")) + sorted(folder.glob("*.bin"))
    return [found, [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]


_READERS: dict[str, Callable[[Path, int], dict[str, SequenceSet]]] = {
    "listops": _read_listops,
    "text": _read_imdb,
    "retrieval": _read_aan,
    "grey_images": _read_cifar,
}
