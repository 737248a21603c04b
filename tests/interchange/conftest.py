"""Small transformers models with random weights, in memory and as folders; no hub."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 259
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": VOCAB} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
LLAMA3_RULE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
# One of each layout that is read, and of what varies within one.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 untied": ("GPT2Config", GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "layer_norm_epsilon": 1e-3}),
    "llama": ("LlamaConfig", LLAMA | {"rope_theta": 5000.0, "rms_norm_eps": 1e-3}),
    "llama 3": ("LlamaConfig", LLAMA | {"rope_scaling": LLAMA3_RULE, "tie_word_embeddings": True}),
    "llama yarn": (
        "LlamaConfig",
        LLAMA
        | {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
            "rope_theta": 100.0,
        },
    ),
    "llama stretched": (
        "LlamaConfig",
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", LLAMA | {"sliding_window": 7, "head_dim": 16}),
    "qwen3": ("Qwen3Config", LLAMA | {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", LLAMA | {"sliding_window": None}),
    "starcoder2 windowed": ("Starcoder2Config", LLAMA | {"sliding_window": 7}),
}
# Not read, but its attention can be ours: layers with a window and without in turn.
GEMMA3 = ("Gemma3TextConfig", LLAMA | {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 6})


@pytest.fixture
def make_theirs() -> Callable[..., nn.Module]:
    """A transformers model of one of `KINDS`, with changes to its config; float32, every weight random."""

    def make(kind: str, attention: str = "eager", **changes: Any) -> nn.Module:
        name, keys = (KINDS | {"gemma3": GEMMA3})[kind]
        torch.manual_seed(0)
        config = getattr(transformers, name)(**copy.deepcopy(keys | changes))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # biases begin at 0 and norms at 1, which hides what is mixed up
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        return model

    return make


@pytest.fixture
def make_folder(make_theirs: Callable[..., nn.Module], tmp_path: Path) -> Callable[..., Path]:
    """The folder that transformers writes of such a model."""

    def make(kind: str, name: str = "theirs", shard: str = "5GB", **changes: Any) -> Path:
        make_theirs(kind, **changes).save_pretrained(tmp_path / name, max_shard_size=shard)
        return tmp_path / name

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(7))
