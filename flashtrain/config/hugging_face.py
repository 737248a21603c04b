"""A Hugging Face folder's config.json as our `model` section. Light: JSON, no torch.

Four layouts are one of our models each: gpt2; llama, with mistral's window; qwen3, which is llama with QK-norm; and
starcoder2, which is GPT-2 with rotary positions and grouped-query heads. Whatever else a config.json asks for is
refused by name: a model that almost fits would give wrong logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtrain.config.schema import ModelConfig, RopeScalingConfig

MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen3", "starcoder2")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # three names of the tanh form
# What a rule of rotary scaling has besides its factor and the length trained at, with transformers' defaults.
RULE_KEYS: dict[str, dict[str, float | None]] = {
    "llama3": {"low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
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


def has_tokenizer(folder: Path) -> bool:
    """Whether a Hugging Face folder brings its tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


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
            f"{keys.path}: attention_bias={bias} with mlp_bias={not bias} is not read: ours have all or none"
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
    if rule not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"{keys.path}: rope_type={rule!r} is not read; it can be default, linear, llama3 or yarn")
    if rule == "default":
        return theta, {"rule": "none"}
    wanted = {"factor": None, **RULE_KEYS.get(rule, {})}
    values: dict[str, Any] = {
        name: rope.get(name) if rope.get(name) is not None else default for name, default in wanted.items()
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"{keys.path}: rope_type={rule!r} needs {', '.join(missing)}; copy the file again")
    scaling: dict[str, Any] = {"rule": rule} | {name: float(value) for name, value in values.items()}
    if rule == "yarn":
        _check_yarn(keys, rope, scaling["factor"])
    if rule != "linear":
        trained = rope.get("original_max_position_embeddings") or keys.size("max_position_embeddings")
        scaling["original_seq_len"] = int(trained)
    return theta, scaling


def _check_yarn(keys: _Keys, rope: Mapping[str, Any], factor: float) -> None:
    """Ours has the paper's sharpening of attention, and whole pairs at both ends of the ramp."""
    sharpening = 0.1 * math.log(factor) + 1
    given = rope.get("attention_factor")
    if given is not None and abs(given - sharpening) > 1e-4:
        raise ValueError(f"{keys.path}: attention_factor={given} is not read: yarn has {sharpening:.4f} at this factor")
    for name, usual in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if rope.get(name, usual) != usual:
            raise ValueError(f"{keys.path}: {name}={rope[name]} is not read: yarn is the paper's here; leave it out")


def model_config(architecture: Architecture, name: str, tokenizer: str) -> ModelConfig:
    """Our model of this architecture; what is a recipe and not a shape gets neutral values."""
    shape = {"rope_theta": 10_000.0, **architecture.shape}
    scaling = RopeScalingConfig(**shape.pop("rope_scaling", {}))
    recipe: dict[str, Any] = {"dropout": 0.0, "init_std": 0.02, "lr": 1e-4, "batch_tokens": 2**15}
    return ModelConfig(name=name, tokenizer=tokenizer, rope_scaling=scaling, **shape, **recipe)
