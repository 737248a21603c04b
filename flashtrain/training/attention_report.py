"""What a run says of its attention before it starts: kernels, which layers are sparse, and how dense each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashtrain.attention import BlockLayout, Plan, choose_backend, lower
from flashtrain.config.layout_rules import PARAMETERS
from flashtrain.config.schema import LayoutConfig
from flashtrain.models.dimensions import Dimensions
from flashtrain.training.layouts import DENSE
from flashtrain.training.visibility import LayerMasks

# A layout that leaves out less than this share of the pairs saves nothing.
_NOTHING = 0.005


class AttentionReport:
    """The attention of a model's layers on sequences of seq_len, without the borders of documents.

    Args:
        masks: what each layer may attend to.
        precision: Lightning's name of the number format.
        device: where the model will be.

    Attributes:
        backends: names of the kernels that the layers take, each once.
        density: visible share of all query-key pairs, the mean over layers.

    Raises:
        ValueError: a backend that cannot do what is asked of it.
    """

    def __init__(self, masks: LayerMasks, precision: str, device: torch.device) -> None:
        self.masks, config = masks, masks.config
        plans = masks.lower(1, config.seq_len, device)
        layer_plans = plans if isinstance(plans, tuple) else (plans,) * len(masks.layers)
        self.plans: dict[LayoutConfig, Plan] = dict(zip(masks.layers, layer_plans, strict=True))
        self.dense = lower(masks.shared, 1, config.seq_len, config.seq_len, device)
        sizes = Dimensions.of(config.model)
        dtype = torch.float32 if precision == "32-true" else torch.bfloat16
        head = torch.empty(1, 1, 1, sizes.head_dim, dtype=dtype, device=device)
        group = sizes.num_heads // sizes.num_kv_heads
        chosen = [choose_backend(config.attention.backend, head, False, p.blocks, group) for p in self.plans.values()]
        self.backends = list(dict.fromkeys(chosen))
        self.density = sum(plan.density for plan in layer_plans) / len(layer_plans)

    def facts(self) -> dict[str, Any]:
        """What the summary says of it."""
        facts: dict[str, Any] = {"attention_backend": " and ".join(self.backends), "attention_density": self.density}
        if self._sparse:
            facts["attention_layers"] = [
                {"layout": layout.name, "block": layout.block, "layers": layers, "density": self.plans[layout].density}
                for layout, layers in self._groups()
            ]
        return facts

    def lines(self) -> Iterator[str]:
        """Which layers are sparse, how dense they are, and what is odd about that; nothing where all are dense."""
        if not self._sparse:
            return
        for layout, layers in self._groups():
            of = f"attention of layer{'s' if len(layers) > 1 else ''} {_ranges(layers)}"
            share = f"{self._share(self.plans[layout]):.3g} % of the pairs of dense attention"
            yield f"{of}: dense" if layout == DENSE else f"{of}: {_name(layout)} in blocks of {layout.block}, {share}"
        if len(self.plans) > 1:
            share = f"{100 * self.density / self.dense.density:.3g} %"
            yield f"attention of all {len(self.masks.layers)} layers: {share} of the pairs of dense attention"
        if {"sdpa", "standard"} & set(self.backends):
            by = " and ".join(self.backends)
            yield f"attention by {by} holds layouts as dense masks, which saves no time or memory"
        for layout, _ in self._groups():
            yield from self._oddities(layout)

    @property
    def _sparse(self) -> bool:
        return any(layout != DENSE for layout in self.plans)

    def _groups(self) -> Iterator[tuple[LayoutConfig, list[int]]]:
        """Each layout with the numbers of its layers, from 1."""
        for layout in self.plans:
            yield layout, [number for number, other in enumerate(self.masks.layers, 1) if other == layout]

    def _share(self, plan: Plan) -> float:
        return 100 * plan.visible_pairs / max(1.0, self.dense.visible_pairs)

    def _oddities(self, layout: LayoutConfig) -> Iterator[str]:
        blocks = self.masks.layout(layout, self.masks.config.seq_len)
        if blocks is None:
            return
        if self._share(self.plans[layout]) > 100 * (1 - _NOTHING):
            yield (
                f"{layout.name} leaves nothing out at seq_len={self.masks.config.seq_len}: take attention=flash, a "
                "longer seq_len, or let its blocks see fewer others"
            )
        if blind := _hidden_by_the_rest(blocks, self.plans[layout]):
            yield (
                f"{layout.name}: {blind} of {len(blocks.starts) - 1} blocks of queries (heads counted) see nothing at "
                "all, since the blocks that they would see come after them or lie outside of attention.window; their "
                "output is 0"
            )


def _hidden_by_the_rest(layout: BlockLayout, plan: Plan) -> int:
    """Blocks of queries, heads counted, that have blocks in the layout and none in the plan that joins other masks."""
    assert plan.q_lists is not None
    visited = plan.q_lists[: len(layout.starts)].diff().cpu()
    return int(((visited == 0) & (layout.starts.diff() > 0)).sum())


def _name(layout: LayoutConfig) -> str:
    """The layout with the parameters that are given: local_global(window=2)."""
    given = {name: getattr(layout, name) for name in PARAMETERS[layout.name]}
    inside = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    return f"{layout.name}({inside})" if inside else layout.name


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 5 as 1-3, 5."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
