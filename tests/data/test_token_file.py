from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashtrain.data.token_file import TokenFile, TokenFileWriter

Write = Callable[..., TokenFile]


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 65_537, 128_256])
def test_ids_survive_at_the_edge_of_sixteen_bits(token_file: Write, vocab_size: int) -> None:
    ids = [i for i in (0, 50_257, 65_534, 65_535, 65_536, 128_000) if i < vocab_size]
    file = token_file([ids, ids[::-1]], vocab_size=vocab_size)
    assert file.tokens.tolist() == ids + ids[::-1]
    assert file.tokens.dtype == (np.uint16 if vocab_size <= 65_536 else np.uint32)
    assert file.offsets.tolist() == [0, len(ids), 2 * len(ids)]
    file.check(vocab_size, "f" * 64)


@pytest.mark.parametrize("bad", [-1, 257, 65_536 + 3])
def test_an_id_outside_the_vocabulary_is_never_written(token_file: Write, tmp_path: Path, bad: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {bad} at position 4 .* 257 ids"):
        token_file([[1, 2, 3], [4, bad]])
    assert list(tmp_path.iterdir()) == []


def test_the_header_and_many_documents_survive(token_file: Write) -> None:
    lengths = [3, 0, 1] * 50_000
    file = token_file([np.zeros(length) for length in lengths])
    assert np.diff(file.offsets).tolist() == lengths
    assert file.num_documents == 150_000
    assert file.header["corpus"] == {"name": "test"}
    assert file.eod == 256
    assert file.tokenizer == "bytes"


def test_equal_tokens_have_equal_fingerprints(token_file: Write) -> None:
    first, second, third = (token_file([ids]) for ids in ([1, 2], [1, 2], [2, 1]))
    assert first.fingerprint == second.fingerprint != third.fingerprint


def test_a_pickled_file_maps_the_same_tokens_without_carrying_them(token_file: Write) -> None:
    file = token_file([np.zeros(100_000)])
    assert len(pickle.dumps(file)) < 1000
    assert np.array_equal(pickle.loads(pickle.dumps(file)).tokens, file.tokens)


@pytest.mark.parametrize("drop", [1, 8, 100, 30_000])
def test_a_truncated_file_is_refused(token_file: Write, drop: int) -> None:
    path = token_file([5_000, 5_000], vocab_size=20_000).path
    path.write_bytes(path.read_bytes()[:-drop])
    with pytest.raises(ValueError, match=r"a\.tokens: truncated"):
        TokenFile.open(path)


def test_surplus_bytes_are_refused(token_file: Write) -> None:
    path = token_file([10]).path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="longer than it should be"):
        TokenFile.open(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\x00\x01" * 50_000, "not a flashtrain token file"),
        (b"FLTOKENS" + (99).to_bytes(4, "little") + bytes(20_000), "version 99"),
        (b"FLTOKENS" + (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"{'a':" + bytes(20_000), "damaged"),
        (b"FLTOKENS" + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"{}" + bytes(20_000), "'dtype'"),
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "foreign.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"foreign\.bin: .*{says}"):
        TokenFile.open(tmp_path / "foreign.bin")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.tokens"):
        TokenFile.open(tmp_path / "gone.tokens")


def _rewrite(path: Path, change: Callable[[dict], None]) -> None:
    data = path.read_bytes()
    header = json.loads(data[16:16384].rstrip(b"\0"))
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(data[:12] + len(text).to_bytes(4, "little") + text + bytes(16368 - len(text)) + data[16384:])


def test_a_dtype_that_does_not_suit_the_vocabulary_is_refused(token_file: Write) -> None:
    path = token_file([10]).path
    _rewrite(path, lambda header: header.update(vocab_size=128_256))
    with pytest.raises(ValueError, match="uint16"):
        TokenFile.open(path)


def test_damaged_offsets_are_refused(token_file: Write) -> None:
    path = token_file([4, 4]).path
    data = bytearray(path.read_bytes())
    data[-16:-8] = (9).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="offsets"):
        TokenFile.open(path)


def test_another_tokenizer_is_refused(token_file: Write) -> None:
    file = token_file([[1]])
    file.check(257, "f" * 64)
    with pytest.raises(ValueError, match=r"a\.tokens: made with another tokenizer"):
        file.check(257, "0" * 64)


def test_an_id_too_large_for_the_model_is_named_with_its_place(token_file: Write) -> None:
    file = token_file([[1, 2, 102], [5]], vocab_size=103)
    file.check(103)
    file.check(128)
    for vocab_size in (100, 102):
        with pytest.raises(ValueError, match=rf"a\.tokens: token id 102 at position 2 .*{vocab_size} ids"):
            file.check(vocab_size)


def test_a_foreign_writers_wrong_id_is_found_by_check(token_file: Write) -> None:
    path = token_file([[1, 2, 200]]).path
    _rewrite(path, lambda header: (header.pop("max_token"), header.update(vocab_size=150)))
    with pytest.raises(ValueError, match="token id 200 at position 2"):
        TokenFile.open(path).check(150)


def test_an_id_damaged_on_disk_never_reaches_a_batch(token_file: Write) -> None:
    path = token_file([[1, 2, 3, 4]]).path
    data = bytearray(path.read_bytes())
    data[16384 + 4 : 16384 + 6] = b"\xff\xff"
    path.write_bytes(data)
    file = TokenFile.open(path)
    assert file.read(0, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"token id 65535 at position 2"):
        file.read(1, 4)


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_half(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
import numpy as np
from flashtrain.data.token_file import TokenFileWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with TokenFileWriter(sys.argv[1], vocab_size=257, eod=256, tokenizer="bytes", tokenizer_fingerprint="") as writer:
    for _ in range(1000):
        writer.add(np.zeros(1000, dtype=np.int64))
    writer.finish({})
"""
    path = tmp_path / "full.tokens"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "OSError" in done.stderr
    assert f"cannot write {path}" in done.stderr
    assert "MiB are free" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_the_old_file(token_file: Write) -> None:
    old = token_file([[1, 2, 3]])
    with (
        pytest.raises(KeyboardInterrupt),
        TokenFileWriter(old.path, vocab_size=257, eod=256, tokenizer="bytes", tokenizer_fingerprint="") as writer,
    ):
        writer.add(np.zeros(10, dtype=np.int64))
        raise KeyboardInterrupt
    assert TokenFile.open(old.path).tokens.tolist() == [1, 2, 3]
    assert list(old.path.parent.iterdir()) == [old.path]
