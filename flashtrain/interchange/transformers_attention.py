"""Our attention in any Hugging Face model: `attn_implementation="flashtrain"`, after `register()`.

    from flashtrain.interchange import transformers_attention
    transformers_attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flashtrain")

Goes through transformers' own interfaces for attention and masks, forward and backward: causal masks, sliding windows,
sequences packed by position_ids, padding before and behind the tokens of a row, grouped-query heads, and a growing
cache. Anything else is a ValueError.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.attention import Causal, Full, Mask, Plan, SlidingWindow, attention
from flashtrain.interchange.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashtrain.interchange.transformers_masks import MaskFunction, plan_of

NAME = "flashtrain"
# What models hand to their attention and ours has not.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "output_attentions")


def register() -> None:
    """Make `attn_implementation="flashtrain"` known to transformers; more than once does no harm.

    Raises:
        ValueError: transformers is missing or older than 5.
    """
    try:
        import transformers
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ValueError("flashtrain attention in transformers needs it: pip install 'transformers>=5'") from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ValueError(f"flashtrain attention needs transformers 5 or newer, and this is {transformers.__version__}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    _say_that_it_is_loaded()


def use(model: nn.Module) -> None:
    """Let a transformers model that is made already attend with ours.

    Raises:
        ValueError: as for `register`, or it is not a model of transformers.
    """
    register()
    if not hasattr(model, "config"):
        raise ValueError(f"{type(model).__name__} has no config: it is not a model of transformers")
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if config is not None:
            config._attn_implementation = NAME


def _say_that_it_is_loaded() -> None:
    """Fill in what transformers keeps of the flash-attn package that it loaded last.

    It takes every name with "flash" in it for such a package and looks for it when a model is made with that name, even
    if the name is registered. It does not look for one that is loaded, so ours is named there, with the functions that
    it would look for. Another package loaded since then takes the place: `register` again, or `use` the model.
    """
    loader: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    if not hasattr(loader, "_loaded_implementation"):
        return
    loader._loaded_implementation = NAME
    loader._flash_fn, loader._flash_varlen_fn, loader._flash_with_kvcache_fn = (
        flash_attn_func,
        flash_attn_varlen_func,
        None,
    )
    loader._pad_fn, loader._unpad_fn = loader._pad_input, loader._unpad_input
    loader._process_flash_kwargs_fn = loader._lazy_define_process_function(flash_attn_varlen_func)
    loader._process_with_kvcache_kwargs_fn = dict


# A mask is made once a forward pass, from numbers that only the host can read; layers compile around it.
@torch.compiler.disable
def attention_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Plan:
    """The plan for all layers of one kind, in the place of transformers' mask tensors.

    Raises:
        ValueError: a mask that is not causal, windowed, packed or padded, see `transformers_masks`.
    """
    if isinstance(q_offset, Tensor):
        raise ValueError(
            "flashtrain attention: a cache of fixed size is not supported; leave cache_implementation at its default"
        )
    return plan_of(
        batch_size,
        int(q_length),
        int(kv_length),
        q_offset,
        int(kv_offset),
        mask_function,
        attention_mask,
        torch.device(device),
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Plan | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call.

    Args:
        query: [batch, num_heads, seq_q, head_dim].
        key, value: [batch, num_kv_heads, seq_k, head_dim].
        attention_mask: the plan from `attention_mask`, windows included; None where the model makes no mask.

    Returns:
        [batch, seq_q, num_heads, head_dim], and no attention weights.

    Raises:
        ValueError: dropout, a mask given as a tensor, or another argument that our attention has not.
    """
    _refuse(dropout, others)
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            f"flashtrain attention: a mask given as a tensor of shape {tuple(attention_mask.shape)}; give a 2-D "
            "attention_mask for padding, or pack sequences with position_ids and no attention_mask"
        )
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask: Mask | Plan = _without_mask(causal, sliding_window, query.shape[2], key.shape[2])
    else:
        mask = attention_mask
    packed = isinstance(mask, Plan) and mask.rows is not None
    if others.get("cu_seq_lens_q") is not None and not packed:
        raise ValueError(
            "flashtrain attention: cu_seq_lens_q without packed position_ids; give position_ids that restart at each "
            "sequence, in a batch of one, and no attention_mask"
        )
    return attention(query, key, value, mask, scale=scaling).transpose(1, 2).contiguous(), None


def _without_mask(causal: bool, sliding_window: int | None, seq_q: int, seq_k: int) -> Mask:
    mask: Mask = Causal() if causal and seq_q > 1 else Full()
    if sliding_window is not None:
        mask = mask & SlidingWindow(sliding_window - 1, None if causal else sliding_window - 1)
    if seq_q not in (1, seq_k) and mask != Full():
        raise ValueError(
            f"flashtrain attention: {seq_q} queries and {seq_k} keys without a mask do not say where the queries "
            "stand; take attn_implementation='sdpa' for this model"
        )
    return mask


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"flashtrain attention: dropout={dropout} of the attention weights is not there; set the config's "
            "attention_dropout (attn_pdrop in GPT-2) to 0"
        )
    for name in _UNSUPPORTED:
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(
                f"flashtrain attention: {name} is not supported; take attn_implementation='eager' for this model"
            )
