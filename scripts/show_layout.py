"""A block layout as a picture: its blocks, its density in each row, and what it costs.

    python scripts/show_layout.py local_global window=4 --seq-len 16k --causal --out layout.png
    python scripts/show_layout.py bigbird random=3 seed=1 heads=12 --seq-len 4k --block 64 --out layout.png
    python scripts/show_layout.py tiles_2d height=64 width=64 tile=8,16 order=tile --out layout.png
    python scripts/show_layout.py from_mask visible=mask.npy --seq-len 4k --out layout.png

What follows the name are the layout's own parameters, those of its function in flashtrain.attention.layouts.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring.drawing import COLOURS, figure, save

from flashtrain.attention import BlockLayout, Causal, Full, Mask, Plan, SlidingWindow, layouts, lower
from flashtrain.config.sizes import format_size, parse_size

NAMES = [name for name in layouts.__all__ if name not in ("BlockLayout", "from_function", "per_head", "tile_order")]
# Squares a side of the picture: more blocks than these share one.
SQUARES = 512


@dataclass(frozen=True)
class Cost:
    """What a layout costs, with the rest of the mask: per head but for `flops`, which are of all heads and one batch
    row, forward (two products of 2 * head_dim a visible pair) and backward (five), and `list_bytes`, of all heads."""

    pairs: float
    dense_pairs: float
    flops: tuple[float, float]
    list_bytes: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES, help="a layout of flashtrain.attention.layouts")
    parser.add_argument("parameters", nargs="*", help="its own parameters, name=value")
    parser.add_argument("--seq-len", type=sizes, help="length, or queries,keys (16k; tiles_2d: height x width)")
    parser.add_argument("--block", type=sizes, default=128, help="64, 128 or 128,64 (128)")
    parser.add_argument("--causal", action="store_true", help="joined with Causal()")
    parser.add_argument("--window", type=int, help="joined with a causal window of so many tokens")
    parser.add_argument("--heads", type=int, default=12, help="query heads, for FLOPs (12)")
    parser.add_argument("--head-dim", type=int, default=64, help="for FLOPs (64)")
    parser.add_argument("--head", type=int, default=0, help="head to draw where each has blocks of its own (0)")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    arguments = parser.parse_args(argv)
    try:
        for name, least in (("window", 1), ("heads", 1), ("head_dim", 1)):
            if (value := getattr(arguments, name)) is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')}={value}: give a number >= {least}")
        layout = build(arguments.name, arguments.parameters, arguments.seq_len, arguments.block)
        if not layout.num_q_blocks or not layout.num_k_blocks:
            raise ValueError(f"{layout}: without queries or keys there is nothing to draw; give longer lengths")
        if layout.heads not in (1, arguments.heads):
            raise ValueError(f"--heads={arguments.heads}: the layout has {layout.heads} heads")
        if not 0 <= arguments.head < layout.heads:
            raise ValueError(f"--head={arguments.head}: the layout has heads 0 to {layout.heads - 1}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rest: Mask = Causal() if arguments.causal else Full()
    if arguments.window is not None:
        rest &= SlidingWindow(arguments.window - 1, 0)
    plan = lower(rest & layout, 1, layout.seq_q, layout.seq_k, "cpu")
    dense = lower(rest, 1, layout.seq_q, layout.seq_k, "cpu")
    price = cost(plan, dense, arguments.heads, arguments.head_dim)
    lines = describe(layout, plan, price)
    print("\n".join(lines))
    try:
        draw(layout, plan, arguments, lines)
    except (OSError, ValueError) as error:  # a folder that cannot be written, a name that is no picture's
        parser.error(f"--out={arguments.out}: {error}")
    return 0


def sizes(text: str) -> int | tuple[int, ...]:
    """16k, or a pair such as 4k,16k."""
    try:
        values = tuple(parse_size(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return values[0] if len(values) == 1 else values


def build(name: str, parameters: list[str], seq_len: Any, block: Any) -> BlockLayout:
    """The layout `name` with its own parameters, texts such as "window=4"; a seq_len of None is 16k.

    Raises:
        ValueError: a parameter that the layout does not have, or a value that it does not take.
    """
    function = getattr(layouts, name)
    known = [p for p in inspect.signature(function).parameters if p not in ("seq_len", "block", "device")]
    own: dict[str, Any] = {}
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key not in known or not value:
            raise ValueError(f"{parameter!r}: {name} takes {', '.join(f'{k}=...' for k in known)}")
        own[key] = torch.from_numpy(np.load(value)) if key == "visible" else parse(value)
    if "seq_len" in inspect.signature(function).parameters:
        own["seq_len"] = 16384 if seq_len is None else seq_len
    elif seq_len is not None:
        raise ValueError(f"--seq-len={seq_len}: the length of {name} is height x width; leave it out")
    try:
        layout: BlockLayout = function(block=block, **own)
    except (TypeError, IndexError, RuntimeError) as error:  # a value of another kind, such as tile=8
        raise ValueError(f"{name} {' '.join(parameters)}: {error}") from error
    return layout


def parse(text: str) -> Any:
    """A number, True, False, None, a pair, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def cost(plan: Plan, dense: Plan, heads: int, head_dim: int) -> Cost:
    assert plan.q_lists is not None and plan.k_lists is not None
    forward = 4.0 * heads * head_dim * plan.visible_pairs
    list_bytes = sum(lists.numel() * lists.element_size() for lists in (plan.q_lists, plan.k_lists))
    return Cost(plan.visible_pairs, dense.visible_pairs, (forward, 2.5 * forward), list_bytes)


def describe(layout: BlockLayout, plan: Plan, price: Cost) -> list[str]:
    """What to know about it, a line for each."""
    visited = torch.cat([full + partial for full, partial in counts(plan)]).double()
    share = price.pairs / max(1.0, price.dense_pairs)
    spread = [f"{v:g}" for v in (visited.min(), visited.median(), visited.max())] if len(visited) else ["0"] * 3
    return [
        f"{layout.seq_q:,} queries, {layout.seq_k:,} keys, blocks of {layout.block_q} x {layout.block_k}: "
        f"{100 * layout.density:.3g} % of the blocks, {layout.heads} {'head' if layout.heads == 1 else 'heads'}",
        f"blocks a row with the rest of the mask: {' / '.join(spread)} (least, median, most)",
        f"visible pairs a head: {price.pairs:,.0f}, {100 * share:.3g} % of those without the layout",
        f"FLOPs of all heads: {price.flops[0]:.3g} forward, {price.flops[1]:.3g} backward",
        f"lists: {price.list_bytes:,} bytes for a whole model",
    ]


def counts(plan: Plan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each head how many full and how many partial blocks each block of queries visits."""
    assert plan.q_lists is not None
    heads, num_blocks = plan.blocks[3], -(-plan.seq_q // plan.blocks[0])
    n = heads * num_blocks
    starts, full_ends = plan.q_lists[: n + 1], plan.q_lists[n + 1 : 2 * n + 1]
    full, partial = (
        (full_ends - starts[:-1]).split(max(1, num_blocks)),
        (starts[1:] - full_ends).split(max(1, num_blocks)),
    )
    return list(zip(full, partial, strict=True))


def image(plan: Plan, head: int) -> np.ndarray:
    """Share of each square's blocks that head visits in full and in part, [2, rows, columns] from 0 to 1."""
    assert plan.q_lists is not None
    block_q, block_k, _, heads = plan.blocks
    rows, columns = -(-plan.seq_q // block_q), -(-plan.seq_k // block_k)
    first, n = 3 * heads * rows + 1, heads * rows
    starts = plan.q_lists[: n + 1].long()
    entries = plan.q_lists[first : int(starts[-1])].numpy()
    place = torch.arange(first, int(starts[-1]))
    number = (torch.searchsorted(starts, place, right=True) - 1).numpy()
    is_full = (place < plan.q_lists[n + 1 : 2 * n + 1].long()[number]).numpy() if len(place) else np.zeros(0, bool)
    bins, limits = (min(rows, SQUARES), min(columns, SQUARES)), ((0, rows), (0, columns))
    own = number // rows == head
    area = rows * columns / (bins[0] * bins[1])
    return np.stack(
        [
            np.histogram2d(number[own & kind] % rows + 0.5, entries[own & kind] + 0.5, bins, limits)[0] / area
            for kind in (is_full, ~is_full)
        ]
    ).clip(0, 1)


def draw(layout: BlockLayout, plan: Plan, arguments: argparse.Namespace, lines: list[str]) -> None:
    """The blocks on the left, the density of each row on the right, the cost below."""
    drawn, axes = figure(1, 2, 10.5, 5.0, width_ratios=(3, 2))
    blocks, density = axes[0]
    shares = image(plan, arguments.head)[..., None]
    full, partial = (np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for colour in COLOURS[:2])
    picture = 1 - shares[0] * (1 - full) - shares[1] * (1 - partial)
    blocks.imshow(picture.clip(0, 1), extent=(0, layout.seq_k, layout.seq_q, 0), aspect="auto", interpolation="nearest")
    blocks.grid(False)
    blocks.set_xlabel("keys")
    blocks.set_ylabel("queries")
    for colour, label in zip(COLOURS, ("full block", "partial block"), strict=False):
        blocks.plot([], [], "s", color=colour, label=label)
    blocks.legend(frameon=False, fontsize=9, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    rows = torch.stack([full + partial for full, partial in counts(plan)]).double().numpy()
    percent, place = 100 * rows / max(1, layout.num_k_blocks), np.arange(rows.shape[1]) * layout.block_q
    density.plot(place, percent.mean(0), color=COLOURS[0], label="mean of the heads" if layout.heads > 1 else None)
    if layout.heads > 1:
        density.fill_between(place, percent.min(0), percent.max(0), color=COLOURS[0], alpha=0.2, linewidth=0)
        density.legend(frameon=False, fontsize=9)
    density.set_ylim(bottom=0)
    density.set_xlabel("query")
    density.set_ylabel("blocks visited, % of the row")
    length = format_size(layout.seq_q) if layout.seq_q == layout.seq_k else f"{layout.seq_q} x {layout.seq_k}"
    drawn.suptitle(f"{' '.join([arguments.name, *arguments.parameters])}, {length} tokens", fontsize=12)
    drawn.tight_layout()
    drawn.text(0.02, 0.0, "\n".join(lines[1:]), fontsize=9, va="top")
    save(drawn, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
