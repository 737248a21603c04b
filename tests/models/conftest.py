"""A small GPT for the model tests, with PyTorch's own attention in the place of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.config.schema import ModelConfig
from flashtrain.models.gpt import GPT

GPT2_PARTS: dict[str, Any] = {
    "name": "test",
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 32,
    "num_kv_heads": None,
    "head_dim": None,
    "mlp_size": None,
    "positions": "learned",
    "rope_theta": 10_000.0,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "gelu",
    "qk_norm": False,
    "bias": True,
    "tie_embeddings": True,
    "dropout": 0.0,
    "init_std": 0.02,
    "tokenizer": "byte",
    "lr": 1e-3,
    "batch_tokens": 1024,
}
MODERN_PARTS = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "qk_norm": True,
    "bias": False,
    "num_kv_heads": 2,
}


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    """Causal attention, or a boolean mask given as the plan."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=plan, is_causal=plan is None, enable_gqa=True)


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """GPT-2's parts at a small size; modern=True takes today's; keywords change single keys."""

    def make(modern: bool = False, **changes: Any) -> ModelConfig:
        return ModelConfig(**(GPT2_PARTS | (MODERN_PARTS if modern else {}) | changes))

    return make


@pytest.fixture
def make_gpt(make_config: Callable[..., ModelConfig]) -> Callable[..., GPT]:
    """A GPT on the CPU with fixed weights and SDPA."""

    def make(vocab_size: int = 257, seq_len: int = 64, attend: Any = sdpa, seed: int = 0, **changes: Any) -> GPT:
        torch.manual_seed(seed)
        return GPT(make_config(**changes), vocab_size, seq_len, attend)

    return make
