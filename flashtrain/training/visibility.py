"""What each layer of a run may attend to: one mask that all share, and block layouts by layer.

Layouts are built once, and masks lowered once a micro-batch, outside the compiled model (those that are always the same
only once). Layers of one layout share one plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import BlockLayout, Documents, Mask, Plan, lower
from flashtrain.config import Config
from flashtrain.config.schema import LayoutConfig
from flashtrain.training.layouts import build_layout, corner, layouts_of_layers, part

# One plan for all layers, or one a layer.
Plans = Plan | tuple[Plan, ...]


class LayerMasks:
    """The masks of a model's layers.

    Args:
        config: the run's, or its stage's.
        shared: what limits all layers, without the documents of a batch.
        positional: the layouts belong to the positions of a sequence of config.seq_len, so that a shorter one sees the
            beginning of them; otherwise they are made for each length, as for images of several sizes.

    Attributes:
        layers: the layout of each layer.

    Raises:
        ValueError: a layout that cannot be made for config.seq_len.
    """

    def __init__(self, config: Config, shared: Mask, *, positional: bool) -> None:
        self.config, self.shared, self.positional = config, shared, positional
        self.layers = layouts_of_layers(config)
        self._built: dict[tuple[LayoutConfig, int], BlockLayout | None] = {}
        for layout in self.layers:
            self.layout(layout, config.seq_len)

    def layout(self, layout: LayoutConfig, seq_len: int) -> BlockLayout | None:
        """The blocks of a layout for sequences of `seq_len`, built once; None for a dense one."""
        key = layout, seq_len
        if key not in self._built:
            whole = self._built.get((layout, self.config.seq_len))
            if whole is not None and self.positional and seq_len < self.config.seq_len:
                self._built[key] = corner(whole, seq_len)
            else:
                self._built[key] = build_layout(self.config, layout, seq_len)
        return self._built[key]

    def lower(
        self,
        rows: int,
        seq_len: int,
        device: torch.device,
        documents: Documents | None = None,
        by: Callable[[Mask, int, int, torch.device], Any] | None = None,
    ) -> Plans:
        """The plans of `rows` sequences of `seq_len` tokens; `by` lowers a mask where sequences are shared."""
        by = by or _lower_whole
        shared = self.shared if documents is None else self.shared & documents
        plans = {}
        for each in dict.fromkeys(self.layers):
            layout = self.layout(each, seq_len)
            plans[each] = by(shared if layout is None else shared & layout, rows, seq_len, device)
        return plans[self.layers[0]] if len(plans) == 1 else tuple(plans[each] for each in self.layers)

    def lower_last(self, queries: int, keys: int, device: torch.device) -> Plans:
        """The plans of one sequence's last `queries` tokens, and all `keys` tokens of it as keys.

        Raises:
            ValueError: block layouts, and the queries lie in several blocks and do not begin with one.
        """
        plans = {}
        for each in dict.fromkeys(self.layers):
            layout = self.layout(each, max(keys, self.config.seq_len))
            mask = self.shared if layout is None else self.shared & part(layout, keys - queries, queries)
            plans[each] = lower(mask, 1, queries, keys, device)
        return plans[self.layers[0]] if len(plans) == 1 else tuple(plans[each] for each in self.layers)

    @property
    def block(self) -> int:
        """Queries in the largest block of any layout; 1 where all layers are dense."""
        return max((64 if layout.block == 64 else 128) if layout.block else 1 for layout in self.layers)


def _lower_whole(mask: Mask, rows: int, seq_len: int, device: torch.device) -> Plan:
    return lower(mask, rows, seq_len, seq_len, device)


def visible_pairs(plans: Plans) -> float | Tensor:
    """Visible (query, key) pairs a sequence and head, the mean over layers: what FLOPs count.

    A tensor on the device where block layouts are among them: a step must not wait for it.
    """
    plans = plans if isinstance(plans, tuple) else (plans,)
    total: float | Tensor = 0.0
    for plan, layers in Counter(plans).items():
        pairs = plan.counted_pairs if isinstance(plan.counted_pairs, Tensor) else plan.visible_pairs
        total = total + pairs * layers
    return total / len(plans)
