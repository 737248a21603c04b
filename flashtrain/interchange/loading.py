"""A model and its tokenizer from a run's folder, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import Causal, Mask, SlidingWindow, attention
from flashtrain.config import Config, build
from flashtrain.config.hugging_face import has_tokenizer, is_hugging_face_folder, model_config, read_architecture
from flashtrain.config.schema import ModelConfig
from flashtrain.data.tokenizers import Tokenizer, load_tokenizer
from flashtrain.interchange import stored
from flashtrain.interchange.tensors import Tensors
from flashtrain.interchange.weights import PREFIX, parts
from flashtrain.models.gpt import GPT
from flashtrain.models.longer import reach


@dataclass(frozen=True)
class Loaded:
    """A language model as it was stored.

    model: float32 on the CPU, in evaluation mode. Called without a plan it attends as it was trained: causally, within
        `window`. Any mask or plan of `flashtrain.attention` can be given instead.
    tokenizer: None where a Hugging Face folder has none.
    window: keys that a query sees at most, its own included; None for all.
    layouts: whether it was trained with block layouts, which no other program knows; it wants plans with them.
    """

    model: GPT
    tokenizer: Tokenizer | None
    window: int | None
    layouts: bool


def load(path: str | Path) -> tuple[GPT, Tokenizer | None]:
    """The language model at `path`, and its tokenizer.

    `model(tokens)` gives hidden states and `model.logits(hidden)` the logits; attention is causal, within the window
    that the model was trained with. More tokens than its positions reach are refused.

    Args:
        path: `runs/<run_id>`, a checkpoint file, or a folder with config.json and safetensors (gpt2, llama, mistral,
            qwen3, starcoder2).

    Raises:
        ValueError: nothing of the kind is there; tensors are missing, left over or of another shape; a file is cut
            short; the architecture is another; or the tokenizer does not fit. Nothing is half loaded.
    """
    loaded = read(path)
    return loaded.model, loaded.tokenizer


def read(path: str | Path) -> Loaded:
    """Like `load`, with the window and whether there are block layouts."""
    path = Path(path)
    if is_hugging_face_folder(path):
        return _from_hugging_face(path)
    return _from_checkpoint(*_checkpoint(path))


def read_weights(folder: Path, model_type: str, config: ModelConfig, seq_len: int) -> dict[str, Tensor]:
    """Our weights by name, float32, from a Hugging Face folder.

    Args:
        config: the model of the folder's config.json, with its vocab_size.
        seq_len: rows of a learned position table.

    Raises:
        ValueError: as for `load`.
    """
    assert config.vocab_size is not None
    wanted = parts(config, model_type, config.vocab_size, seq_len)
    tensors = Tensors(folder, PREFIX.get(model_type, "model."))
    tensors.check(wanted, config.tie_embeddings)
    # A copy of each: what safetensors hands out may be the file itself, mapped into memory.
    return {part.name: part.ours(tensors.read).to(torch.float32, copy=True) for part in wanted}


def _from_hugging_face(folder: Path) -> Loaded:
    architecture = read_architecture(folder)
    config = model_config(architecture, folder.resolve().name, str(folder))
    weights = read_weights(folder, architecture.model_type, config, architecture.max_positions)
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer(folder) else None
    assert config.vocab_size is not None
    check_vocabulary(tokenizer, config.vocab_size, str(folder))
    model = _model(config, weights, architecture.max_positions, _attend(architecture.window))
    return Loaded(model, tokenizer, architecture.window, layouts=False)


def check_vocabulary(tokenizer: Tokenizer | None, vocab_size: int, where: str) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows. Fewer are padding.

    Raises:
        ValueError: naming both.
    """
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{where}: the embedding has {vocab_size} rows and tokenizer {tokenizer.name!r} {tokenizer.vocab_size} "
            "ids; take the tokenizer that the model was trained with"
        )


_PROBE = "The 3 dogs' café: x = [1.5, 2]\n\tif  a_b != 'naïve': 東京 🙂"


def check_same_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Refuse another tokenizer than the one in a Hugging Face folder, unless it gives the same ids.

    Raises:
        ValueError: naming both.
    """
    if not is_hugging_face_folder(folder) or not has_tokenizer(folder) or tokenizer.name == str(folder):
        return
    if not _same_ids(tokenizer, load_tokenizer(str(folder))):
        raise ValueError(
            f"model.init_from={folder}: its tokenizer gives other ids than {tokenizer.name!r}; leave data.tokenizer "
            "and model.tokenizer out, to take the folder's"
        )


def check_vocabulary_of_run(tokenizer: str, fingerprint: str, about: Mapping[str, Any], where: str) -> None:
    """Refuse to start from a run's weights with another tokenizer than the run's, unless it gives the same ids.

    Args:
        tokenizer, fingerprint: of the run that starts.
        about: `flashtrain` of the other one's checkpoint.

    Raises:
        ValueError: naming both.
    """
    trained: str = about["identity"]["tokenizer"]
    if fingerprint == about["identity"]["tokenizer_fingerprint"]:
        return
    try:
        own = own_tokenizer(trained, about, where)
    except ValueError as error:
        raise ValueError(f"{where}: was not trained with tokenizer {tokenizer!r}. {error}") from error
    if not _same_ids(load_tokenizer(tokenizer), own):
        raise ValueError(
            f"{where}: was trained with tokenizer {trained!r}, which gives other ids than {tokenizer!r}; write "
            f"model.tokenizer={trained}"
        )


def own_tokenizer(name: str, about: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer of a checkpoint, by its name.

    Raises:
        ValueError: what bears the name today gives other ids, or is gone.
    """
    tokenizer = load_tokenizer(name)
    if tokenizer.fingerprint != about["identity"]["tokenizer_fingerprint"]:
        raise ValueError(
            f"{where}: tokenizer {name!r} is not the one that the run was trained with, though it has its name; put "
            "the same files there"
        )
    return tokenizer


def _same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    return one.eod == other.eod and one.encode(_PROBE).tolist() == other.encode(_PROBE).tolist()


def _checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest of the run there."""
    if stored.is_checkpoint(path):
        return path, stored.load(path)
    if (path / "checkpoints").is_dir():
        found = stored.newest(path / "checkpoints")
        if found is not None:
            return found
        raise ValueError(f"{path}: the run stopped before its first checkpoint; train it on with resume={path.name}")
    what = "has neither checkpoints/ nor a config.json with a model_type" if path.is_dir() else "does not exist"
    raise ValueError(f"{path} {what}; give runs/<run_id>, a checkpoint file, or a Hugging Face folder")


def _from_checkpoint(path: Path, checkpoint: dict[str, Any]) -> Loaded:
    about = checkpoint["flashtrain"]
    config: Config = build(about["config"])
    if config.task != "language":
        raise ValueError(f"{path}: task={config.task}; only language models are loaded this way")
    tokenizer = own_tokenizer(config.tokenizer, about, str(path))
    weights, _ = stored.weights_of(checkpoint)
    weights = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
    embedding = weights.get("token_embedding.weight")
    if embedding is None:
        raise ValueError(f"{path}: has no token_embedding.weight; it is not the checkpoint of a language model")
    check_vocabulary(tokenizer, len(embedding), str(path))
    own = replace(config.model, vocab_size=len(embedding))
    layouts = bool(config.attention.layouts)
    attend = _no_plan if layouts else _attend(config.attention.window)
    return Loaded(_model(own, weights, config.seq_len, attend), tokenizer, config.attention.window, layouts)


def _model(config: ModelConfig, weights: dict[str, Tensor], seq_len: int, attend: Callable[..., Tensor]) -> GPT:
    """The weights themselves become the parameters: nothing is initialised first, nor held twice.

    Raises:
        ValueError: they are not those of the config.
    """
    assert config.vocab_size is not None
    with torch.device("meta"):
        model = GPT(config, config.vocab_size, seq_len, attend)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights are not those of the stored configuration: {error}") from error
    model.longest = reach(config, seq_len)
    return model.eval()


def _attend(window: int | None) -> Callable[..., Tensor]:
    mask: Mask = Causal() if window is None else Causal() & SlidingWindow(window - 1, 0)
    return functools.partial(_attend_as_trained, mask)


def _attend_as_trained(mask: Mask, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    return attention(q, k, v, mask if plan is None else plan)


def _no_plan(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    if plan is None:
        raise ValueError(
            "this model was trained with block layouts: hand it one plan for each layer, lowered from its layouts, or "
            "a mask such as Causal() for dense attention"
        )
    return attention(q, k, v, plan)
