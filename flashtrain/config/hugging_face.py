"""A Hugging Face folder's config.json as our `model` section, and back. Light: JSON in and out, no torch.

Four layouts are one of our models each: gpt2; llama, with mistral's window; qwen3, which is llama with QK-norm; and
starcoder2, which is GPT-2 with rotary positions and grouped-query heads. Whatever else a config.json asks for is
refused by name: a model that almost fits would give wrong logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtrain.config.schema import ModelConfig, RopeScalingConfig

MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen3", "starcoder2")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # three names of the tanh form
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


@dataclass(frozen=True)
class Architecture:
    """What a config.json says.

    model_type: one of `MODEL_TYPES`.
    shape: keys of `ModelConfig` that the weights settle, plain values, sizes never None.
    window: keys that a query sees at most, its own included; None for all.
    max_positions: rows of the position table, or the length that the model was made for.
    """

    model_type: str
    shape: dict[str, Any]
    window: int | None
    max_positions: int


def is_hugging_face_folder(path: Path) -> bool:
    """Whether `path` is a folder with a config.json that names a model_type."""
    try:
        return "model_type" in json.loads((path / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def read_architecture(folder: Path) -> Architecture:
    """The architecture in a folder's config.json.

    Raises:
        ValueError: no such file, not JSON, or a model that ours cannot be, naming the key, its value, and what is read.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{folder}: not a Hugging Face model, config.json cannot be read ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); copy the file again") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in MODEL_TYPES:
        raise ValueError(f"{path}: model_type={kind!r} is not read; there are {', '.join(MODEL_TYPES)}")
    keys = _Keys(path, raw)
    keys.must_be("quantization_config", None)
    return _gpt2(keys) if kind == "gpt2" else _rotary(keys, kind)


class _Keys:
    """The keys of a config.json, with complaints that name the file."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path, self.raw = path, raw

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value; the default where it is absent or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path}: {key}={value!r}: expected a whole number above 0")
        return value

    def must_be(self, key: str, *values: Any) -> None:
        """Refuse a value that the model cannot have; an absent key is the first of `values`."""
        value = self.raw.get(key, values[0])
        if value not in values:
            raise ValueError(f"{self.path}: {key}={value!r} is not read; it can be {' or '.join(map(repr, values))}")


def _gpt2(keys: _Keys) -> Architecture:
    keys.must_be("activation_function", *_TANH_GELU)
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("add_cross_attention", False)
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    shape = {
        "num_layers": keys.size("n_layer"),
        "num_heads": heads,
        "hidden_size": hidden,
        "num_kv_heads": heads,
        "head_dim": _head_dim(keys, hidden, heads),
        "mlp_size": keys.size("n_inner", 4 * hidden),
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": float(keys.get("layer_norm_epsilon", 1e-5)),
        "activation": "gelu",
        "qk_norm": False,
        "bias": True,
        "tie_embeddings": bool(keys.get("tie_word_embeddings", True)),
        "vocab_size": keys.size("vocab_size"),
    }
    return Architecture("gpt2", shape, None, keys.size("n_positions", 1024))


def _rotary(keys: _Keys, kind: str) -> Architecture:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    like_gpt2 = kind == "starcoder2"
    theta, scaling = _rope(keys)
    own_head_dim = {"qwen3": 128}.get(kind)
    shape = {
        "num_layers": keys.size("num_hidden_layers"),
        "num_heads": heads,
        "hidden_size": hidden,
        "num_kv_heads": keys.size("num_key_value_heads", heads),
        "head_dim": keys.size("head_dim", own_head_dim or _head_dim(keys, hidden, heads)),
        "mlp_size": keys.size("intermediate_size"),
        "positions": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm": "layernorm" if like_gpt2 else "rmsnorm",
        "norm_eps": float(keys.get("norm_epsilon", 1e-5) if like_gpt2 else keys.get("rms_norm_eps", 1e-6)),
        "activation": "gelu" if like_gpt2 else "swiglu",
        "qk_norm": kind == "qwen3",
        "bias": like_gpt2 or _llama_bias(keys, kind),
        "tie_embeddings": bool(keys.get("tie_word_embeddings", like_gpt2)),
        "vocab_size": keys.size("vocab_size"),
    }
    if like_gpt2:
        keys.must_be("hidden_act", *reversed(_TANH_GELU[:2]))
        keys.must_be("use_bias", True)
    else:
        keys.must_be("hidden_act", "silu", "swish")
    return Architecture(kind, shape, _window(keys, kind), keys.size("max_position_embeddings", 2048))


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"{keys.path}: a width of {hidden} is no multiple of {heads} heads, and head_dim is not given")
    return hidden // heads


def _llama_bias(keys: _Keys, kind: str) -> bool:
    """Our linear layers have a bias all together or not at all."""
    keys.must_be("attention_bias", False, *((True,) if kind == "llama" else ()))
    bias = bool(keys.get("attention_bias", False))
    if kind == "llama" and bool(keys.get("mlp_bias", False)) != bias:
        raise ValueError(
            f"{keys.path}: attention_bias={bias} with mlp_bias={not bias} is not read: our layers have biases all or none"
        )
    return bias


def _window(keys: _Keys, kind: str) -> int | None:
    if kind == "qwen3":
        keys.must_be("use_sliding_window", False)
    kinds = set(keys.get("layer_types", [])) - {"full_attention"}
    if kind == "mistral":
        kinds = set(keys.get("layer_types", [])) - {"sliding_attention"}
    if kinds:
        raise ValueError(f"{keys.path}: layer_types with {', '.join(sorted(kinds))} is not read: our layers are alike")
    # Mistral's own default is a window, which an explicit null takes away.
    if kind == "mistral" and "sliding_window" not in keys.raw:
        return 4096
    return keys.size("sliding_window") if kind != "qwen3" and keys.get("sliding_window") is not None else None


def _rope(keys: _Keys) -> tuple[float, dict[str, Any]]:
    """Base and scaling; transformers 5 writes them as rope_parameters, earlier versions as rope_theta, rope_scaling."""
    rope = {**keys.get("rope_scaling", {}), **keys.get("rope_parameters", {})}
    theta = float(rope.get("rope_theta") or keys.get("rope_theta", 10_000.0))
    if rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{keys.path}: partial_rotary_factor below 1 is not read: our heads turn as a whole")
    rule = rope.get("rope_type") or rope.get("type") or "default"
    if rule not in ("default", "linear", "llama3"):
        raise ValueError(f"{keys.path}: rope_type={rule!r} is not read; it can be default, linear or llama3")
    scaling: dict[str, Any] = {"rule": "none" if rule == "default" else rule}
    if rule != "default":
        scaling["factor"] = float(rope["factor"])
    if rule == "llama3":
        trained = rope.get("original_max_position_embeddings") or keys.size("max_position_embeddings")
        scaling["original_seq_len"] = int(trained)
        scaling |= {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    return theta, scaling


def model_config(architecture: Architecture, name: str, tokenizer: str) -> ModelConfig:
    """Our model of this architecture; what is a recipe and not a shape gets neutral values."""
    shape = {"rope_theta": 10_000.0, **architecture.shape}
    scaling = RopeScalingConfig(**shape.pop("rope_scaling", {}))
    recipe = {"dropout": 0.0, "init_std": 0.02, "lr": 1e-4, "batch_tokens": 2**15}
    return ModelConfig(name=name, tokenizer=tokenizer, rope_scaling=scaling, **shape, **recipe)


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
    own: dict[str, Any] = {
        "llama": {"attention_bias": config.bias, "mlp_bias": config.bias},
        "mistral": {"sliding_window": window},
        "qwen3": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
        "starcoder2": {
            "use_bias": True,
            "sliding_window": window,
            "residual_dropout": config.dropout,
            "embedding_dropout": config.dropout,
        },
    }[model_type]
    like_gpt2 = model_type == "starcoder2"
    return common | own | _rope_json(config) | {
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


def _rope_json(config: ModelConfig) -> dict[str, Any]:
    """Base and scaling in the earlier form, which all versions read."""
    scaling = config.rope_scaling
    if scaling.rule == "none":
        return {"rope_theta": config.rope_theta}
    rule: dict[str, Any] = {"rope_type": scaling.rule, "factor": scaling.factor}
    if scaling.rule == "llama3":
        rule |= {
            "original_max_position_embeddings": scaling.original_seq_len,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    return {"rope_theta": config.rope_theta, "rope_scaling": rule}
