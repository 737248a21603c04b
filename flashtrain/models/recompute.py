"""What a block keeps for its backward pass, and what it computes again: activation checkpointing (Chen et al. 2016).

Whatever is chosen, loss and gradients are those of keeping all; with dropout too, except that an MLP in pieces draws
other masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashtrain.attention.op  # noqa: F401 (registers the operator that is named below)
from flashtrain.models.offload import Offload

Blocks = Literal["none", "selective", "full"]

# What `selective` keeps: out and lse of attention, which takes longer to compute again than all the rest together.
_ATTENTION = [
    torch.ops.flashtrain.attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass(frozen=True)
class Recompute:
    """How the blocks of a model save memory.

    Attributes:
        blocks: none keeps all; full keeps a block's input, float32 or the weights' dtype; selective keeps attention's
            out and lse besides. `standard` attention has no such operator, so that selective is full there.
        offload: the blocks' inputs wait in host memory; needs full or selective.
        mlp_chunk_tokens: the MLP takes so many tokens at once and computes each piece again in its backward pass, so
            that its wide activations never stand for a whole sequence; 0 for all at once.
        compiled: selective blocks are compiled, each a graph, see `compile_blocks`.
    """

    blocks: Blocks = "none"
    offload: bool = False
    mlp_chunk_tokens: int = 0
    compiled: bool = False

    def __post_init__(self) -> None:
        assert not (self.offload and self.blocks == "none"), "there is nothing to offload"

    @classmethod
    def of(cls, choice: Recompute | bool) -> Recompute:
        """The choice itself; True is full, False none."""
        return choice if isinstance(choice, Recompute) else cls("full" if choice else "none")


def run_blocks(blocks: nn.ModuleList, x: Tensor, plan: Any, turn: Any, *, recompute: Recompute | bool) -> Tensor:
    """x [batch, seq, hidden_size] through all blocks.

    Args:
        plan: for every block, or a list or tuple of one a block.
        turn: rotary angles for every block, or None.
        recompute: what is computed again in the backward pass; True is full, False none.

    Raises:
        ValueError: another number of plans than of blocks.
    """
    plans = plan_of_each(blocks, plan)
    how = Recompute.of(recompute)
    if how.blocks == "none" or not torch.is_grad_enabled():
        for block, layer_plan in zip(blocks, plans, strict=True):
            x = block(x, layer_plan, turn, how.mlp_chunk_tokens)
        return x
    forward = _forward_of(how)
    parking = Offload(x.device) if how.offload else None
    for index, (block, layer_plan) in enumerate(zip(blocks, plans, strict=True), 1):
        # The last block's input is needed again at once.
        with nullcontext() if parking is None or index == len(blocks) else parking.of(x):
            x = forward(block, x, layer_plan, turn, how.mlp_chunk_tokens)
    if parking is not None:
        parking.finish()
    return x


def plan_of_each(blocks: nn.ModuleList, plan: Any) -> Sequence[Any]:
    """The plan of each block, from one for all or one for each.

    Raises:
        ValueError: another number of plans than of blocks.
    """
    plans = plan if isinstance(plan, list | tuple) else [plan] * len(blocks)
    if len(plans) != len(blocks):
        raise ValueError(f"plan: {len(plans)} plans for model.num_layers={len(blocks)}; give one, or one a layer")
    return plans


def compile_blocks(blocks: nn.ModuleList, how: Recompute) -> Recompute:
    """Compile each block by itself; attention is one node in it, and a graph break is an error.

    Where blocks are computed again that takes less memory than one graph of the model, in which the compiler begins to
    compute several of them again at once. Pieces of an MLP would be unrolled in a graph: there the MLP is compiled
    alone, and attention with its projections unless its outputs are kept apart.

    Returns:
        `how`, for `run_blocks`.
    """
    if how.blocks == "selective" and not how.mlp_chunk_tokens:
        return replace(how, compiled=True)
    names = ["attention", "mlp"] if how.mlp_chunk_tokens else [""]  # of the parts; "" is the whole block
    if how.blocks == "selective":
        names.remove("attention")
    for block in blocks:
        for name in names:
            block.get_submodule(name).compile(fullgraph=True, dynamic=False)
    return how


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, chunk_tokens: int) -> Tensor:
    """function(x) for a function of each token alone, `chunk_tokens` at a time; only x is kept for the backward pass.

    Args:
        function: [batch, seq, hidden_size] -> the same shape.
        x: [batch, seq, hidden_size].
        chunk_tokens: tokens that `function` gets at once; 0 for all, which then are not computed again.
    """
    if chunk_tokens == 0 or x.shape[0] * x.shape[1] <= chunk_tokens:
        return function(x)
    if torch.is_grad_enabled():
        function = functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=True)
    pieces = x.flatten(0, 1).split(chunk_tokens)
    return torch.cat([function(piece[None]) for piece in pieces], dim=1).view_as(x)


def also_keep(operator: Any) -> None:
    """Let `selective` keep the results of another operator that computes attention."""
    if operator not in _ATTENTION:
        _ATTENTION.append(operator)


def _full(block: nn.Module, *inputs: Any) -> Tensor:
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=True)


def _selective(block: nn.Module, *inputs: Any) -> Tensor:
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=True, context_fn=_keep_attention)


_keep_attention = functools.partial(create_selective_checkpoint_contexts, _ATTENTION)
_selective_graph = torch.compile(_selective, fullgraph=True, dynamic=False)


def _forward_of(how: Recompute) -> Callable[..., Tensor]:
    if how.blocks == "full":
        return _full
    return _selective_graph if how.compiled else _selective
