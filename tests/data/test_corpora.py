from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flashtrain.config.schema import DataConfig
from flashtrain.data.corpora import describe, documents
from flashtrain.data.document import Document

Config = Callable[..., DataConfig]


def read(config: DataConfig) -> list[tuple[str, str]]:
    """Names and texts, one character a byte."""
    return [(document.name, document.text.decode("latin-1")) for document in documents(config)]


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("no_network")
def test_a_file_a_folder_and_a_glob_give_each_file_as_one_document(config: Config, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9\r\n")
    (tmp_path / "deep" / "er" / "a.md").write_bytes(b"# a")
    (tmp_path / "deep" / "other.log").write_bytes(b"log")
    assert read(config(path=str(tmp_path / "b.txt"))) == [("b.txt", "café\r\n")]
    assert read(config(path=str(tmp_path))) == [("b.txt", "café\r\n"), ("deep/er/a.md", "# a")]
    assert read(config(path=str(tmp_path / "**" / "*.log"))) == [("other.log", "log")]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (None, "data.path is not set"),
        ("nowhere.txt", "no such file or folder"),
        ("none/*.txt", "no file matches"),
        ("folder", r"no file in it or its sub-folders ends in \.txt, \.md"),
        ("empty.txt", "the file is empty"),
    ],
)
def test_a_path_that_gives_nothing_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.rst").write_text("x")
    (tmp_path / "empty.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says) as error:
        read(config(path=path))
    assert str(path or "data.source=text") in str(error.value)


@pytest.mark.usefixtures("no_network")
def test_jsonl_and_parquet_rows_are_documents(config: Config, tmp_path: Path) -> None:
    rows = [{"id": i, "body": f"text {i}"} for i in range(5)]
    write_jsonl(tmp_path / "a [1].jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "zipped"}\n'))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    texts = [f"text {i}" for i in range(5)]
    jsonl = read(config(source="jsonl", path=str(tmp_path), text_key="body"))
    assert [text for _, text in jsonl] == [*texts, "zipped"]
    assert jsonl[1][0] == "a [1].jsonl:2"
    parquet = read(config(source="parquet", path=str(tmp_path / "c.parquet"), text_key="body"))
    assert [text for _, text in parquet] == texts


@pytest.mark.usefixtures("no_network")
def test_a_saved_data_set_is_read_without_network(config: Config, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    rows.save_to_disk(str(tmp_path / "set"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "sets"))
    assert [text for _, text in read(config(source="hub", name=str(tmp_path / "set")))] == ["one", "two"]
    sets = config(source="hub", name=str(tmp_path / "sets"), split="test")
    assert [text for _, text in read(sets)] == ["two"]
    assert describe(sets)["fingerprint"] != describe(config(source="hub", name=str(tmp_path / "sets")))["fingerprint"]
    with pytest.raises(ValueError, match="train, test"):
        read(config(source="hub", name=str(tmp_path / "sets"), split="valid"))


@pytest.mark.parametrize("source", ["jsonl", "parquet", "hub"])
def test_a_missing_column_lists_those_there_are(config: Config, tmp_path: Path, source: str) -> None:
    rows = [{"body": "a", "title": "b"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    where = {"name": str(tmp_path / "set")} if source == "hub" else {"path": str(tmp_path / f"a.{source}")}
    with pytest.raises(ValueError, match=r"no column 'text'.*data\.text_key.*body, title"):
        read(config(source=source, **where))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "y"', "not valid JSON"),
        (b'{"text": "y', "not valid JSON"),
        (b'{"text": "caf\xe9"}', "not UTF-8 at byte 13"),
        (b'"only a string"', "not a JSON object"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_json_line_is_named_with_its_file(config: Config, tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3: .*{says}"):
        read(config(source="jsonl", path=str(tmp_path / "bad.jsonl")))


def test_a_bad_line_far_into_a_large_file_is_still_named_by_its_line(config: Config, tmp_path: Path) -> None:
    good = json.dumps({"text": "x" * 1000}) + "\n"
    (tmp_path / "bad.jsonl").write_text(good * 30_000 + "{\n" + good)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 30001"):
        read(config(source="jsonl", path=str(tmp_path / "bad.jsonl")))


def test_a_column_that_is_not_text_is_refused(config: Config, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": 5}])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: data\.text_key=text holds int"):
        read(config(source="jsonl", path=str(tmp_path / "a.jsonl")))


def test_rows_may_be_very_long_and_differ_in_their_fields(config: Config, tmp_path: Path) -> None:
    rows = [
        {"text": "x" * 40_000_000, "meta": 1},
        {"text": None, "meta": "b"},
        {"text": "y", "meta": {"c": []}},
        {"d": 1},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    lengths = [len(text) for _, text in read(config(source="jsonl", path=str(tmp_path / "a.jsonl")))]
    assert lengths == [40_000_000, 0, 1, 0]


def test_one_json_list_in_a_file_is_read_as_its_rows(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}, {"text": "y"}], indent=2))
    wanted = config(source="jsonl", path=str(tmp_path / "a.json"))
    assert [text for _, text in read(wanted)] == ["x", "y"]
    (tmp_path / "a.json").write_text('[{"text": "x"},')
    with pytest.raises(ValueError, match=r"a\.json, from line 1 on: not valid JSON"):
        read(wanted)


def test_a_truncated_gzip_file_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-10])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: damaged gzip"):
        read(config(source="jsonl", path=str(tmp_path)))


def test_missing_values_of_a_parquet_column_are_empty_documents(config: Config, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    wanted = config(source="parquet", path=str(tmp_path))
    assert [text for _, text in read(wanted)] == ["a", "", "c"]
    with pytest.raises(ValueError, match=r"data\.text_key=n holds int"):
        read(config(source="parquet", path=str(tmp_path), text_key="n"))


def test_empty_parquet_files_and_row_groups_are_passed_over(config: Config, tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    none = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(none, tmp_path / "a.parquet")
    with pq.ParquetWriter(tmp_path / "b.parquet", schema) as writer:
        writer.write_table(none)
        writer.write_table(pa.table({"text": ["b"]}))
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "c.parquet")
    assert [text for _, text in read(config(source="parquet", path=str(tmp_path)))] == ["b", "c"]


def test_a_file_that_is_not_parquet_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet"):
        read(config(source="parquet", path=str(tmp_path / "a.parquet")))


@pytest.mark.usefixtures("no_network")
def test_a_hub_name_without_network_fails_within_seconds_and_names_the_way_out(config: Config) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"org/set.*cannot be reached.*HF_HUB_OFFLINE=1.*data\.path"):
        read(config(source="hub", name="org/set"))
    assert time.monotonic() - start < 20


def test_a_hub_name_where_the_hub_is_forbidden_names_the_way_out(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"data\.name=org/set.*HF_HUB_OFFLINE forbids the hub.*data\.path"):
        read(config(source="hub", name="org/set"))


def test_a_hub_set_is_described_without_the_hub(config: Config) -> None:
    prints = {
        describe(config(source="hub", **fields))["fingerprint"]
        for fields in ({"name": "org/set"}, {"name": "org/set@v1"}, {"name": "org/set", "subset": "en"})
    }
    assert len(prints) == 3


def test_the_fingerprint_follows_files_and_column(config: Config, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    wanted = config(source="jsonl", path=str(tmp_path))
    first = describe(wanted)["fingerprint"]
    assert describe(wanted)["fingerprint"] == first
    assert describe(config(source="jsonl", path=str(tmp_path), text_key="y"))["fingerprint"] != first
    write_jsonl(tmp_path / "b.jsonl", [{"text": "y"}])
    assert describe(wanted)["fingerprint"] != first


@pytest.mark.usefixtures("no_network")
def test_the_default_corpus_is_torch_and_the_standard_library(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dict(read(config(source="python")))
    assert "class Module" in real["torch/nn/modules/module.py"]
    assert "stdlib/json/decoder.py" in real
    assert not any("site-packages" in name or "/test/" in name for name in real if name.startswith("stdlib/"))
    assert list(real) == sorted(real)

    (tmp_path / "test").mkdir()
    for name, data in {"b.py": b"b", "a.py": b"a", "latin.py": b"\xe9", "empty.py": b"", "test/c.py": b"c"}.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    small = [item for item in read(config(source="python")) if item[0].startswith("stdlib/")]
    assert small == [("stdlib/a.py", "a"), ("stdlib/b.py", "b")]
    described = describe(config(source="python"))
    assert described["files"] == sum(name.startswith("torch/") for name in real) + 2
    assert "torch" in described["name"]
    (tmp_path / "a.py").write_bytes(b"A")
    assert describe(config(source="python"))["fingerprint"] != described["fingerprint"]


def test_copies_of_a_document_fall_on_the_same_side() -> None:
    sides = [Document(f"{i}", f"text {i}".encode()).held_out(0.1) for i in range(2000)]
    assert 130 < sum(sides) < 270
    assert sides == [Document("another name", f"text {i}".encode()).held_out(0.1) for i in range(2000)]
