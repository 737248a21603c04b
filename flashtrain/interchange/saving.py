"""Our model as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from flashtrain.data.tokenizers import Tokenizer
from flashtrain.interchange.config_json import architecture_of, config_json
from flashtrain.interchange.tensors import write
from flashtrain.interchange.tokenizer_files import write_tokenizer
from flashtrain.interchange.weights import parts
from flashtrain.interchange.whole_folder import whole_folder
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.gpt import GPT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save(
    model: GPT,
    tokenizer: Tokenizer | None,
    folder: str | Path,
    *,
    window: int | None,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 2**30,
) -> str:
    """Write config.json, generation_config.json, the weights and the tokenizer's files; whole or not at all.

    A learned position table becomes n_positions rows; padding rows of the vocabulary are kept. Biases that the model
    goes without, where the architecture always has them, are written as zeros.

    Args:
        model: ours, on any device.
        tokenizer: None writes none.
        folder: must not exist, or be empty.
        window: keys that a query sees at most, its own included; None for all. It is no part of the model, so it has to
            be said: `read(path).window` is that of a stored one.
        dtype: of the weights: float32, bfloat16 or float16.
        max_shard_bytes: weights of more than this are split into several files.

    Returns:
        The architecture's model_type.

    Raises:
        ValueError: the folder holds something, or no architecture has the model's parts.
    """
    folder, config, sizes = Path(folder), model.config, Dimensions.of(model.config)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    model_type = architecture_of(config, window)
    lengths = {
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "mlp_size": sizes.mlp_size,
        "vocab_size": model.vocab_size,
        "seq_len": model.seq_len,
    }
    eod = None if tokenizer is None else tokenizer.eod
    bos = None if tokenizer is None else getattr(tokenizer, "bos", eod)
    ends = {"bos_token_id": bos, "eos_token_id": eod, "pad_token_id": None}
    # dtype is what transformers 5 reads and torch_dtype what earlier versions do.
    about = config_json(config, model_type, lengths, window) | ends | {"dtype": dtype, "torch_dtype": dtype}
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    theirs = {
        name: tensor.to(DTYPES[dtype])
        for part in parts(config, model_type, model.vocab_size, model.seq_len)
        for name, tensor in part.theirs(weights)
    }
    with whole_folder(folder) as partial:
        (partial / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        (partial / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        write(theirs, partial, max_shard_bytes)
        if tokenizer is not None:
            write_tokenizer(tokenizer, partial, model.seq_len)
    return model_type
