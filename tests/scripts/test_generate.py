"""Text from a trained run: streamed, the same with and without the cache, and never past the context in silence."""

from __future__ import annotations

from pathlib import Path

import generate
import pytest
import torch
from measuring.reading import load_reader
from measuring.text_stream import TextStream

from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.interchange.tokenizer_files import write_tokenizer
from flashtrain.models.graphed import why_not

from .conftest import train_run

SMALL = (
    "model.num_layers=2", "model.num_heads=2", "model.hidden_size=32", "seq_len=64", "data=text", "logger=csv",
    "trainer.accelerator=cpu", "trainer.batch_tokens=1024", "trainer.max_steps=30", "trainer.sample_tokens=0",
    "schedule.warmup_steps=2", "data.val_fraction=0.2",
)  # fmt: skip


def fit(folder: Path, run_id: str, *changes: str) -> Path:
    """A small run's folder, trained in this process on lines that repeat."""
    (folder / "text").mkdir(exist_ok=True)
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"the cat {number} sat on the mat. déjà vu. " * 20)
    places = f"data.prepared_dir={folder / 'prepared'}", f"data.path={folder / 'text'}"
    return train_run(folder / "runs", run_id, *SMALL, *places, *changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def rotary(folder) -> Path:
    return fit(folder, "rotary")


def texts(capfd, *arguments: object) -> str:
    capfd.readouterr()
    assert generate.main([*map(str, arguments), "--device", "cpu"]) == 0
    return capfd.readouterr().out


def refusal(capfd, *arguments: object) -> str:
    with pytest.raises(SystemExit):
        generate.main([*map(str, arguments), "--device", "cpu"])
    return capfd.readouterr().err


@pytest.mark.parametrize("how", [("--temperature", 0), ("--top-p", 0.9, "--top-k", 0)])
def test_the_text_is_the_same_with_and_without_the_cache_and_from_a_checkpoint(rotary, capfd, how):
    asked = ("the cat", "--max-tokens", 40, *how)
    text = texts(capfd, rotary, *asked)
    assert text.startswith("the cat")
    assert texts(capfd, rotary, *asked, "--no-cache") == text
    assert texts(capfd, rotary, *asked, "--prefill", 3) == text
    assert texts(capfd, next((rotary / "checkpoints").glob("*.ckpt")), *asked) == text


def test_seeds_differ(rotary, capfd):
    drawn = {texts(capfd, rotary, "--temperature", 1, "--max-tokens", 30, "--seed", seed) for seed in (1, 2, 1)}
    assert len(drawn) == 2


def test_what_does_not_fit_the_context_is_refused_with_the_ways_to_extend(rotary, folder, capfd):
    told = refusal(capfd, rotary, "the cat", "--max-tokens", 100)
    assert "a prompt of 7 tokens and --max-tokens 100 need a context of 107, and it is 64" in told
    assert "--context 107" in told
    assert "--extend (extrapolate, linear, ntk, yarn, llama3)" in told
    told = refusal(capfd, rotary, "the cat", "--max-tokens", 100, "--context", 128)
    assert "the model's positions reach 64 tokens" in told
    for how in ("yarn", "extrapolate"):
        assert texts(capfd, rotary, "the cat", "--max-tokens", 100, "--context", 128, "--extend", how)
    learned = fit(folder, "learned", "model.positions=learned")
    assert "take one of duplicate, interpolate" in refusal(capfd, learned, "--context", 128, "--extend", "yarn")
    asked = ("the cat", "--max-tokens", 100, "--context", 128, "--extend", "interpolate", "--temperature", 0)
    assert texts(capfd, learned, *asked) == texts(capfd, learned, *asked, "--no-cache")
    assert texts(capfd, learned, "--context", 32, "--max-tokens", 20)


def test_a_run_whose_tokenizer_has_become_another_is_refused(folder, tmp_path, capfd):
    write_tokenizer(ByteTokenizer(), tmp_path, 64)
    own = fit(folder, "own", f"model.tokenizer={tmp_path}", "trainer.max_steps=1")
    assert texts(capfd, own, "the cat", "--max-tokens", 3)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97'))
    assert "is not the one that the run was trained with" in refusal(capfd, own, "the cat", "--max-tokens", 3)


def test_block_sparse_layers_write_the_same_with_and_without_the_cache(folder, capfd):
    sparse = fit(
        folder, "sparse", "seq_len=256", "attention=block_sparse", "attention.layout.name=window_sinks",
        "attention.layout.block=64", "attention.layout.window=1", "attention.dense_every=2", "trainer.max_steps=6",
    )  # fmt: skip
    asked = (sparse, "the cat sat on the mat" * 6, "--max-tokens", 90, "--past-end")
    text = texts(capfd, *asked)
    assert texts(capfd, *asked, "--no-cache") == text
    assert texts(capfd, *asked, "--prefill", 50) == text  # rounded up to a block


def test_characters_are_shown_whole_and_a_prompt_from_a_file_is_read(rotary, tmp_path, capfd):
    stream, text = TextStream(ByteTokenizer(), list(b"abc")), "déjà — 🙂 vu"
    shown = [stream.add(byte) for byte in text.encode()]
    assert "".join(shown) == text
    assert all("\ufffd" not in part for part in shown)
    assert [len(part) for part in shown] == [1, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    stream = TextStream(ByteTokenizer(), [])
    assert "".join([*map(stream.add, b"a\xff\xff\xff\xffb\xc3"), stream.rest()]).count("\ufffd") == 5
    (tmp_path / "prompt.txt").write_text("the mat.")
    assert texts(capfd, rotary, "--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 3).startswith("the mat.")


def test_a_hugging_face_folder_writes_too(tmp_path, capfd):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("the", "cat", "sat", "on", "mat", "<eos>"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=6, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=24,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    reader = load_reader(tmp_path, None, None, torch.device("cpu"))
    assert why_not(reader.model, [reader.plan_for(1, 3)] * 2) is None  # a GPU's graph serves it as it does runs
    asked = (tmp_path, "the cat sat", "--max-tokens", 20, "--past-end", "--temperature", 1)
    text = texts(capfd, *asked)
    assert len(text.split()) >= 20
    assert texts(capfd, *asked, "--no-cache") == text
    told = refusal(capfd, *asked, "--context", 64, "--extend", "yarn")
    assert "its positions reach 24 tokens; to extend it, make it a run of ours first" in told
    assert f"model.init_from={tmp_path} seq_len=64" in told and "model.rope_scaling.rule=linear, ntk, yarn" in told
    assert "reaches 24 tokens as it is; leave --extend out" in refusal(capfd, *asked, "--extend", "yarn")
