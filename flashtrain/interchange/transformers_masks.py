"""transformers' masks as our plans.

transformers describes a mask by a function of (batch, head, query, key) that it composes of a few known pieces. They
are taken apart here, without an N x N tensor, and what comes out is held against the function itself at the borders of
what each query sees: a piece that means something else in another version is an error, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import Causal, Documents, Full, Mask, Plan, SlidingWindow, lower

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_MODULE = "transformers.masking_utils"
_HINT = "take attn_implementation='sdpa' for this model"


@dataclass(frozen=True)
class Pieces:
    """What a mask function is the conjunction of.

    mask: causal and windowed parts.
    packed: int [batch, seq], equal for the tokens of one packed sequence; None where nothing is packed.
    """

    mask: Mask
    packed: Tensor | None = None

    def __and__(self, other: Pieces) -> Pieces:
        if self.packed is not None and other.packed is not None:
            raise ValueError(f"flashtrain attention: sequences are packed twice over; {_HINT}")
        return Pieces(self.mask & other.mask, other.packed if self.packed is None else self.packed)


def plan_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: MaskFunction,
    padding: Tensor | None,
    device: torch.device,
) -> Plan:
    """The plan of one of transformers' masks.

    Args:
        q_offset, kv_offset: where the first query and the first key stand in the sequence.
        mask_function: as transformers composes it.
        padding: bool [batch, tokens so far], false where a token is padding; None without any.

    Raises:
        ValueError: a mask that no plan describes.
    """
    pieces = take_apart(mask_function)
    padding = _own_padding(padding, kv_length, kv_offset)
    mask, ordered = pieces.mask, pieces.mask != Full()
    if ordered and q_offset - kv_offset + q_length != kv_length:
        raise ValueError(
            "flashtrain attention: keys behind the last query, as in a cache of fixed size; leave cache_implementation "
            "at its default"
        )
    if pieces.packed is not None:
        if padding is not None:
            raise ValueError(f"flashtrain attention: packed sequences together with padding; {_HINT}")
        mask = mask & Documents(_runs(pieces.packed))
    elif padding is not None:
        mask = mask & _real_part(padding, batch_size, q_length, kv_length, ordered)
    plan = lower(mask, batch_size, q_length, kv_length, device)
    _check(plan, mask_function, batch_size, q_offset, kv_offset, padding, ordered, device)
    return plan


def take_apart(function: MaskFunction) -> Pieces:
    """The known pieces of a mask function.

    Raises:
        ValueError: a piece that is not known.
    """
    name, closed = _identity(function)
    if name == "causal_mask_function":
        return Pieces(Causal())
    if name == "bidirectional_mask_function":
        return Pieces(Full())
    if name == "and_masks":
        result = Pieces(Full())
        for member in closed["mask_functions"]:
            result = result & take_apart(member)
        return result
    if name == "sliding_window_overlay":
        return Pieces(SlidingWindow(int(closed["sliding_window"]) - 1, None))
    if name == "sliding_window_bidirectional_overlay":
        return Pieces(SlidingWindow(int(closed["sliding_window"]), int(closed["sliding_window"])))
    if name == "packed_sequence_mask_function":
        return Pieces(Full(), closed["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        # Within one packed sequence positions go up by one, so that a window over them is one over the tokens.
        return take_apart(closed["mask_function"])
    raise ValueError(
        f"flashtrain attention: this model's mask has a part {name!r}, which is neither causal, a sliding window, "
        f"packed sequences nor padding; {_HINT}"
    )


def _identity(function: Any) -> tuple[str, dict[str, Any]]:
    """Name of the function of transformers that made this one, and what it closes over."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(function, "__module__", None) != _MODULE:
        return name, {}
    code, cells = function.__code__, function.__closure__ or ()
    return name.split(".")[0], dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _own_padding(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """bool [batch, kv_length] on the CPU; None where no key is padding. Keys not written yet count as padding."""
    if padding is None:
        return None
    own = padding[:, kv_offset : kv_offset + kv_length].bool().cpu()
    own = torch.nn.functional.pad(own, (0, kv_length - own.shape[1]))
    return None if bool(own.all()) else own


def _runs(packed: Tensor) -> list[list[int]]:
    """Lengths of the runs of equal numbers in each row."""
    rows = []
    for row in packed.cpu():
        borders = (torch.nonzero(row[1:] != row[:-1]).flatten() + 1).tolist()
        rows.append([end - start for start, end in pairwise([0, *borders, len(row)])])
    return rows


def _real_part(padding: Tensor | None, batch_size: int, q_length: int, kv_length: int, ordered: bool) -> Documents:
    """Padding before, tokens, padding behind: three documents, of which the middle one alone is looked at.

    ordered: queries and keys are aligned at the end, and queries that are padding see padding. Otherwise the queries
        are another sequence, as when a decoder looks at an encoder, and all see the tokens.
    """
    queries, keys = [], []
    for first, last in _spans(padding, batch_size, kv_length):
        keys.append([first, last - first, kv_length - last])
        before, behind = (q_length - (kv_length - first), kv_length - last) if ordered else (0, 0)
        before = max(0, before)
        behind = min(behind, q_length - before)
        queries.append([before, q_length - before - behind, behind])
    return Documents(queries, keys)


def _spans(padding: Tensor | None, batch_size: int, kv_length: int) -> Sequence[tuple[int, int]]:
    """First and one past the last key of each row that is no padding."""
    if padding is None:
        return [(0, kv_length)] * batch_size
    spans = []
    for row in padding:
        real = torch.nonzero(row).flatten()
        first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else (kv_length, kv_length)
        if last - first != len(real):
            raise ValueError(
                "flashtrain attention: attention_mask hides tokens in the middle of a row; padding can stand before "
                f"and behind the tokens of a row. {_HINT}, or pack sequences with position_ids"
            )
        spans.append((first, last))
    return spans


def _check(
    plan: Plan,
    mask_function: MaskFunction,
    batch_size: int,
    q_offset: int,
    kv_offset: int,
    padding: Tensor | None,
    ordered: bool,
    device: torch.device,
) -> None:
    """Hold the plan against the function at the first and last key that each query sees, and just outside.

    padding: bool [batch, seq_k]; the function does not know of it.
    ordered: queries stand among the keys, and what padding sees is not looked at.

    Raises:
        ValueError: they differ.
    """
    lo, hi = (bound.to(device).long().expand(batch_size, -1) for bound in plan.intervals(device))
    batch = torch.arange(batch_size, device=device)[:, None, None]
    query = torch.arange(plan.seq_q, device=device)[None, :, None]
    key = torch.stack((lo - 1, lo, hi - 1, hi), dim=-1)
    looked_at = (key >= 0) & (key < plan.seq_k)
    key = key.clamp(0, plan.seq_k - 1)
    planned = (key >= lo[..., None]) & (key < hi[..., None])
    meant = mask_function(batch, torch.zeros_like(batch), query + q_offset, key + kv_offset).expand_as(planned)
    if padding is not None:
        real = padding.to(device)
        meant = meant & real[batch, key]
        if ordered:
            looked_at = looked_at & real[batch, query + (plan.seq_k - plan.seq_q)]
    if bool(((planned != meant) & looked_at).any()):
        raise ValueError(
            "flashtrain attention: this version of transformers composes its masks in a way that is not understood; "
            + _HINT
        )
