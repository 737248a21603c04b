"""Our model as a Hugging Face folder's config.json: the way back of `config.hugging_face`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashtrain.config.hugging_face import RULE_KEYS
from flashtrain.config.schema import ModelConfig

_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


def architecture_of(config: ModelConfig, window: int | None) -> str:
    """The model_type that our model can be written as.

    Raises:
        ValueError: none of them has these parts, naming the ones in the way.
    """
    kv_heads, gelu = config.num_kv_heads or config.num_heads, config.norm == "layernorm" and config.activation == "gelu"
    if config.positions == "learned" and gelu and not config.qk_norm and window is None:
        plain_heads = (config.head_dim or 0) in (0, config.hidden_size // config.num_heads)
        if kv_heads == config.num_heads and plain_heads:
            return "gpt2"
    if config.positions == "rope" and gelu and not config.qk_norm:
        return "starcoder2"
    if config.positions == "rope" and config.norm == "rmsnorm" and config.activation == "swiglu":
        if config.qk_norm and not config.bias and window is None:
            return "qwen3"
        if not config.qk_norm and (window is None or not config.bias):
            return "llama" if window is None else "mistral"
    given = (
        f"positions={config.positions}, norm={config.norm}, activation={config.activation}, qk_norm={config.qk_norm}, "
        f"bias={config.bias}, num_kv_heads={kv_heads}, attention.window={window}"
    )
    raise ValueError(
        f"no architecture of transformers that is written here has these parts together: {given}. There are gpt2 "
        "(learned, layernorm, gelu), starcoder2 (rope, layernorm, gelu), llama and mistral (rope, rmsnorm, swiglu), "
        "and qwen3 (the same with qk_norm)"
    )


def config_json(config: ModelConfig, model_type: str, sizes: Mapping[str, int], window: int | None) -> dict[str, Any]:
    """config.json of our model.

    Args:
        config: its parts.
        model_type: from `architecture_of`.
        sizes: num_kv_heads, head_dim, mlp_size, vocab_size and seq_len, all settled.
        window: keys that a query sees at most, or None.
    """
    common = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": sizes["vocab_size"],
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }
    if model_type == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.dropout)
        return common | drops | {
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_embd": config.hidden_size,
            "n_inner": sizes["mlp_size"],
            "n_positions": sizes["seq_len"],
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
        }  # fmt: skip
    choices: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": config.bias, "mlp_bias": config.bias},
        "mistral": {"sliding_window": window},
        "qwen3": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
        "starcoder2": {
            "use_bias": True,
            "sliding_window": window,
            "residual_dropout": config.dropout,
            "embedding_dropout": config.dropout,
        },
    }
    own, like_gpt2 = choices[model_type], model_type == "starcoder2"
    return common | own | _rope_json(config, sizes["head_dim"]) | {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": sizes["num_kv_heads"],
        "hidden_size": config.hidden_size,
        "head_dim": sizes["head_dim"],
        "intermediate_size": sizes["mlp_size"],
        "max_position_embeddings": sizes["seq_len"],
        "hidden_act": "gelu_pytorch_tanh" if like_gpt2 else "silu",
        "norm_epsilon" if like_gpt2 else "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
    }  # fmt: skip


def _rope_json(config: ModelConfig, head_dim: int) -> dict[str, Any]:
    """Base and scaling in the earlier form, which all versions read. NTK-aware scaling is another base."""
    scaling, theta = config.rope_scaling, config.rope_theta
    if scaling.rule == "ntk":
        theta *= scaling.factor ** (head_dim / max(1, head_dim - 2))
    if scaling.rule in ("none", "ntk"):
        return {"rope_theta": theta}
    rule: dict[str, Any] = {"rope_type": scaling.rule, "factor": scaling.factor}
    if scaling.rule in RULE_KEYS:
        rule["original_max_position_embeddings"] = scaling.original_seq_len
        rule |= {name: getattr(scaling, name) for name in RULE_KEYS[scaling.rule]}
    return {"rope_theta": theta, "rope_scaling": rule}
