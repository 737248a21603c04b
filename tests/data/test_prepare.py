from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import flashtrain.data.prepare as prepare_module
from flashtrain.config.schema import DataConfig
from flashtrain.data.document import Document
from flashtrain.data.prepare import prepare
from flashtrain.data.token_file import TokenFile
from flashtrain.data.tokenizers import load_tokenizer

Config = Callable[..., DataConfig]
BYTES = load_tokenizer("bytes")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """200 short files, an empty one among them, and one that is not UTF-8."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(198):
        (folder / f"{i:03}.txt").write_text(f"This is document {i}. " * (i % 7 + 1))
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    return str(folder)


def split_documents(file: TokenFile) -> list[bytes]:
    """The documents of a byte token file; each must end with the end-of-document token, and hold no other."""
    found = []
    for start, end in zip(file.offsets[:-1], file.offsets[1:], strict=True):
        ids = file.tokens[start:end]
        assert ids[-1] == 256
        assert ids[:-1].max() < 256
        found.append(ids[:-1].astype(np.uint8).tobytes())
    return found


def test_every_document_lands_in_one_split_ending_in_end_of_document(config: Config, corpus: str) -> None:
    prepared = prepare(config(path=corpus), BYTES)
    train, val = split_documents(prepared.train), split_documents(prepared.val)
    files = sorted(path.read_bytes() for path in Path(corpus).iterdir() if path.stat().st_size)
    assert sorted(train + val) == files
    assert 5 <= len(val) <= 40
    figures = prepared.description
    assert figures["documents"] == figures["train_documents"] + figures["val_documents"] == 199
    assert figures["empty_documents"] == 1
    assert figures["train_tokens"] == prepared.train.num_tokens
    assert len(figures["text_fingerprint"]) == 64


def test_the_held_out_documents_stay_so_when_the_corpus_grows(config: Config, corpus: str) -> None:
    before = set(split_documents(prepare(config(path=corpus), BYTES).val))
    (Path(corpus) / "000a.txt").write_text("a new document")
    after = set(split_documents(prepare(config(path=corpus), BYTES).val))
    assert before <= after <= before | {b"a new document"}


@pytest.mark.parametrize("number", [1, 2])
def test_a_corpus_of_few_documents_holds_out_the_end_of_its_tokens(config: Config, tmp_path: Path, number: int) -> None:
    for i in range(number):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 499)
    prepared = prepare(config(path=str(tmp_path / "*.txt")), BYTES)
    stream = np.concatenate([prepared.train.tokens, prepared.val.tokens])
    assert prepared.val.num_tokens == 50 * number
    assert sorted(stream.tolist()) == sorted([48] * 499 + [256] + ([49] * 499 + [256]) * (number - 1))
    assert prepared.val.tokens[-1] == 256
    assert "the last 0.1 of all tokens" in prepared.description["held_out"]


def test_one_document_held_out_by_its_hash_is_too_few_and_the_end_is_cut_instead(
    config: Config, tmp_path: Path
) -> None:
    held_out = next(text for i in range(999) if Document("", text := b"%03d" % i * 10).held_out(0.1))
    texts = [held_out, b"x" * 99, b"y" * 68]
    assert [Document("", text).held_out(0.1) for text in texts] == [True, False, False]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text)
    prepared = prepare(config(path=str(tmp_path / "*.txt")), BYTES)
    stream = [*texts[1], 256, *texts[2], 256, *held_out, 256]
    assert prepared.train.tokens.tolist() == stream[:180]
    assert prepared.val.tokens.tolist() == stream[180:]


def test_training_data_is_left_where_all_documents_would_be_held_out(config: Config, tmp_path: Path) -> None:
    text = next(text for i in range(99) if Document("", text := b"%02d" % i * 50).held_out(0.5))
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(text)
    prepared = prepare(config(path=str(tmp_path / "*.txt"), val_fraction=0.5), BYTES)
    assert prepared.train.num_tokens > 0
    assert prepared.val.num_tokens > 0


def test_nothing_is_held_out_at_a_fraction_of_zero(config: Config, corpus: str) -> None:
    prepared = prepare(config(path=corpus, val_fraction=0.0), BYTES)
    assert prepared.val.num_tokens == 0
    assert prepared.train.num_documents == 199
    with pytest.raises(ValueError, match=r"data\.val_fraction=1"):
        prepare(config(path=corpus, val_fraction=1.0), BYTES)


def test_it_is_prepared_once_and_anew_when_anything_changes(
    config: Config, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(config(path=corpus), BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_build", lambda *_: pytest.fail("prepared again"))
        again = prepare(config(path=corpus), BYTES)
    assert again.train.path == first.train.path
    assert again.description == first.description
    folders = {first.train.path.parent}
    folders.add(prepare(config(path=corpus, val_fraction=0.2), BYTES).train.path.parent)
    folders.add(prepare(config(path=corpus, min_document_tokens=30), BYTES).train.path.parent)
    (Path(corpus) / "latin.txt").unlink()
    folders.add(prepare(config(path=corpus), BYTES).train.path.parent)
    changed = load_tokenizer("bytes")
    changed.fingerprint = "0" * 64
    folders.add(prepare(config(path=corpus), changed).train.path.parent)
    assert len(folders) == 5


def test_short_documents_are_left_out_and_counted(config: Config, corpus: str) -> None:
    prepared = prepare(config(path=corpus, min_document_tokens=60), BYTES)
    kept = split_documents(prepared.train) + split_documents(prepared.val)
    assert min(map(len, kept)) >= 60
    assert prepared.description["short_documents"] == 199 - len(kept)
    with pytest.raises(ValueError, match=r"no document is left: 1 are empty, 199 have fewer.*min_document_tokens=9999"):
        prepare(config(path=corpus, min_document_tokens=9999), BYTES)


def test_text_that_is_not_utf8_names_file_and_byte(config: Config, corpus: str) -> None:
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 at byte 3.*data\.tokenizer=bytes"):
        prepare(config(path=corpus), load_tokenizer("gpt2"))
    assert not [path for path in Path(config().prepared_dir).iterdir() if path.is_dir()]


def test_gpt2_tokens_say_the_text(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello world")
    tokenizer = load_tokenizer("gpt2")
    prepared = prepare(config(path=str(tmp_path / "a.txt"), val_fraction=0.0), tokenizer)
    assert prepared.train.tokens.tolist() == [15496, 995, 50256]
    assert prepared.train.tokens.dtype == np.uint16
    prepared.train.check(50304, tokenizer.fingerprint)


def test_a_damaged_prepared_file_is_named_with_the_folder_to_delete(config: Config, corpus: str) -> None:
    path = prepare(config(path=corpus), BYTES).val.path
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=rf"val\.tokens: truncated.*delete {re.escape(str(path.parent))}"):
        prepare(config(path=corpus), BYTES)


def test_what_a_killed_process_left_is_replaced(config: Config, corpus: str) -> None:
    prepared = prepare(config(path=corpus), BYTES)
    folder = prepared.train.path.parent
    folder.rename(folder.with_name(f".{folder.name}.unfinished"))
    (folder.with_name(f".{folder.name}.unfinished") / "train.tokens").write_bytes(b"half")
    again = prepare(config(path=corpus), BYTES)
    assert again.train.fingerprint == prepared.train.fingerprint
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_processes_that_prepare_at_once_get_the_same_whole_files(config: Config, tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"{i}.txt").write_bytes(
            np.random.default_rng(i).integers(97, 123, 30_000, dtype=np.uint8).tobytes()
        )
    program = """
import json, pathlib, sys, time
from flashtrain.config.schema import DataConfig
from flashtrain.data.prepare import prepare
from flashtrain.data.tokenizers import load_tokenizer
config, tokenizer, start = DataConfig(**json.loads(sys.argv[1])), load_tokenizer("gpt2"), pathlib.Path(sys.argv[2])
start.with_name(sys.argv[3]).touch()
while not start.exists():
    time.sleep(0.001)
prepared = prepare(config, tokenizer)
prepared.train.check(tokenizer.vocab_size, tokenizer.fingerprint)
print(prepared.train.fingerprint, prepared.val.fingerprint, prepared.train.tokens.sum())
"""
    wanted, start = json.dumps(asdict(config(path=str(tmp_path / "*.txt")))), tmp_path / "start"
    commands = [[sys.executable, "-c", program, wanted, str(start), f"ready{i}"] for i in range(3)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        for command in commands
    ]
    while not all((tmp_path / f"ready{i}").exists() for i in range(3)) and all(p.poll() is None for p in running):
        time.sleep(0.01)
    start.touch()
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert len([path for path in Path(config().prepared_dir).iterdir() if path.is_dir()]) == 1
