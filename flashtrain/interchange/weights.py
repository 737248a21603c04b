"""Which tensor of a Hugging Face model is which of ours: one table for both ways.

Ours holds queries, keys and values as the rows of one matrix, in this order, and a SwiGLU's gate before its values.
GPT-2's matrices are transposed (its Conv1D), and its fused projection has our order already. Rotary pairs are
(i, i + head_dim / 2) on both sides: Hugging Face's Llama checkpoints are permuted to that when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain.config.schema import ModelConfig
from flashtrain.models.dimensions import Dimensions

PREFIX = {"gpt2": "transformer."}  # of all but the head; the others have "model."


@dataclass(frozen=True)
class Part:
    """One tensor of ours.

    name: ours.
    sources: theirs, stacked by rows to make ours.
    shape: ours.
    rows: rows of each source.
    transposed: theirs is the transpose of ours.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    transposed: bool = False

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = [(rows, *self.shape[1:]) for rows in self.rows]
        return dict(zip(self.sources, (s[::-1] if self.transposed else s for s in shapes), strict=True))

    def ours(self, read: Callable[[str], Tensor]) -> Tensor:
        """Our tensor, from a function that reads one of theirs by name."""
        pieces = [read(source) for source in self.sources]
        if self.transposed:
            return pieces[0].T.contiguous()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def theirs(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Their tensors. A bias that our model goes without is zero."""
        lacks_bias = self.name.endswith(".bias") and self.name not in weights
        tensor = torch.zeros(self.shape) if lacks_bias else weights[self.name]
        for source, piece in zip(self.sources, tensor.split(self.rows), strict=True):
            yield source, (piece.T if self.transposed else piece).contiguous()


def parts(config: ModelConfig, model_type: str, vocab_size: int, seq_len: int) -> list[Part]:
    """All tensors of a model.

    Args:
        config: ours; biases are those of `model_type` where that always has them.
        model_type: as in config.json.
        vocab_size: rows of the embedding, padding included.
        seq_len: rows of a learned position table.
    """
    prefix, table = PREFIX.get(model_type, "model."), _Table()
    hidden, head = config.hidden_size, (vocab_size, config.hidden_size)
    names = ("wte", "ln_f") if model_type == "gpt2" else ("embed_tokens", "norm")
    table.add("token_embedding.weight", f"{prefix}{names[0]}.weight", head)
    if model_type == "gpt2":
        table.add("position_embedding.weight", f"{prefix}wpe.weight", (seq_len, hidden))
    for layer in range(config.num_layers):
        block = f"blocks.{layer}."
        if model_type == "gpt2":
            _gpt2_block(table, config, block, f"{prefix}h.{layer}.")
        else:
            _rotary_block(table, config, block, f"{prefix}layers.{layer}.", model_type)
    _norm(table, "final_norm", f"{prefix}{names[1]}", hidden, model_type)
    if not config.tie_embeddings:
        table.add("head.weight", "lm_head.weight", head)
    return table.parts


class _Table:
    def __init__(self) -> None:
        self.parts: list[Part] = []

    def add(self, name: str, source: str, shape: tuple[int, ...], transposed: bool = False) -> None:
        self.parts.append(Part(name, (source,), shape, (shape[0],), transposed))

    def stack(self, name: str, sources: Mapping[str, int], columns: int, bias: bool) -> None:
        """A matrix, and its bias, made of several by rows."""
        rows = tuple(sources.values())
        for kind, shape in (("weight", (sum(rows), columns)), ("bias", (sum(rows),))):
            if kind == "weight" or bias:
                own = tuple(f"{source}.{kind}" for source in sources)
                self.parts.append(Part(f"{name}.{kind}", own, shape, rows))


def _gpt2_block(table: _Table, config: ModelConfig, block: str, layer: str) -> None:
    sizes, hidden = Dimensions.of(config), config.hidden_size
    matrices = (
        ("attention.qkv", "attn.c_attn", sizes.qkv_size, hidden),
        ("attention.output", "attn.c_proj", hidden, hidden),
        ("mlp.up", "mlp.c_fc", sizes.mlp_size, hidden),
        ("mlp.down", "mlp.c_proj", hidden, sizes.mlp_size),
    )
    _norm(table, f"{block}attention_norm", f"{layer}ln_1", hidden, "gpt2")
    _norm(table, f"{block}mlp_norm", f"{layer}ln_2", hidden, "gpt2")
    for ours, theirs, rows, columns in matrices:
        table.add(f"{block}{ours}.weight", f"{layer}{theirs}.weight", (rows, columns), transposed=True)
        table.add(f"{block}{ours}.bias", f"{layer}{theirs}.bias", (rows,))


def _rotary_block(table: _Table, config: ModelConfig, block: str, layer: str, model_type: str) -> None:
    sizes, hidden = Dimensions.of(config), config.hidden_size
    bias, attention, mlp = model_type == "starcoder2" or config.bias, f"{layer}self_attn.", f"{layer}mlp."
    q_rows, kv_rows = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    projections = {f"{attention}q_proj": q_rows, f"{attention}k_proj": kv_rows, f"{attention}v_proj": kv_rows}
    up = {f"{mlp}gate_proj": sizes.mlp_size, f"{mlp}up_proj": sizes.mlp_size}
    down = f"{mlp}down_proj"
    if model_type == "starcoder2":
        up, down = {f"{mlp}c_fc": sizes.mlp_size}, f"{mlp}c_proj"
    _norm(table, f"{block}attention_norm", f"{layer}input_layernorm", hidden, model_type)
    _norm(table, f"{block}mlp_norm", f"{layer}post_attention_layernorm", hidden, model_type)
    table.stack(f"{block}attention.qkv", projections, hidden, bias)
    table.stack(f"{block}attention.output", {f"{attention}o_proj": hidden}, q_rows, bias)
    table.stack(f"{block}mlp.up", up, hidden, bias)
    table.stack(f"{block}mlp.down", {down: hidden}, sizes.mlp_size, bias)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            table.add(f"{block}attention.{name}.weight", f"{attention}{name}.weight", (sizes.head_dim,))


def _norm(table: _Table, name: str, source: str, hidden: int, model_type: str) -> None:
    table.add(f"{name}.weight", f"{source}.weight", (hidden,))
    if model_type in ("gpt2", "starcoder2"):
        table.add(f"{name}.bias", f"{source}.bias", (hidden,))
