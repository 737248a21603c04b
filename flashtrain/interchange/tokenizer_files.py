"""A tokenizer as the files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashtrain.data.tokenizers import (
    END_OF_TEXT,
    ByteTokenizer,
    Gpt2Tokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    gpt2_merges,
    visible_bytes,
)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, or, of a Hugging Face tokenizer, all its own files.

    Raises:
        ValueError: a tokenizer that cannot be written, or whose own files are gone.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(folder)
        return
    if isinstance(tokenizer, ByteTokenizer):
        vocabulary, merges = visible_bytes(), []
    elif isinstance(tokenizer, Gpt2Tokenizer):
        merges = gpt2_merges().splitlines()[1:]
        tokens = [*visible_bytes(), *(merge.replace(" ", "") for merge in merges)]
        vocabulary = {token: number for number, token in enumerate(tokens)}
    else:
        raise ValueError(f"tokenizer {tokenizer.name!r} has no form that transformers reads")
    definition = _byte_level(vocabulary, merges, tokenizer.eod)
    (folder / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_level(vocabulary: dict[str, int], merges: list[str], eod: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE; without merges every byte is a token, and no text is split into words."""
    end = {"id": eod, "content": END_OF_TEXT, "special": True, "normalized": False}
    sides = {"single_word": False, "lstrip": False, "rstrip": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": bool(merges)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | sides],
        "normalizer": None,
        "pre_tokenizer": bytes_only,
        "post_processor": None,
        "decoder": bytes_only,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary | {END_OF_TEXT: eod},
            "merges": merges,
        },
    }
