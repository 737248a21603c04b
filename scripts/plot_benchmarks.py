"""Pictures of what the benchmarks measured: benchmark_attention.py, benchmark_memory.py, benchmark_training.py,
benchmark_longest.py, benchmark_scaling.py, benchmark_block_sparse.py and benchmark_approximate.py.

python scripts/plot_benchmarks.py benchmarks/attention.json --out docs/attention.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring.drawing import COLOURS, figure, save
from measuring.scaling_drawing import scaling

from flashtrain.config.sizes import format_size

# Ours is blue in every picture.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, LIGHT_BLUE, BLACK = COLOURS
STYLES: dict[str, tuple[str, ...]] = {
    "ours": ("flashtrain", BLUE),
    "hopper": ("flashtrain (Hopper)", BLACK),
    "hopper_deterministic": ("flashtrain (Hopper), deterministic", BLACK, ":"),
    "portable": ("flashtrain (Triton)", BLUE),
    "standard": ("standard attention", RED),
    "sdpa_cudnn": ("PyTorch SDPA, cuDNN", GREEN),
    "sdpa_flash": ("PyTorch SDPA, FlashAttention-2", ORANGE),
    "flex": ("FlexAttention", PURPLE),
    "flash_attn4": ("flash-attn 4", LIGHT_BLUE),
    "butterfly": ("flashtrain, butterfly", PURPLE, "-"),
    "butterfly_narrow": ("flashtrain, three blocks of it", PURPLE, "--"),
    "local": ("local attention", ORANGE, ":"),
    "linear": ("linear attention", GREY, ":"),
    "linformer": ("Linformer", LIGHT_BLUE, ":"),
    "nanogpt": ("nanoGPT, compiled", ORANGE),
    "huggingface": ("Hugging Face", GREY),
    "ours_full": ("flashtrain, memory=full", LIGHT_BLUE),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a benchmark's JSON")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    arguments = parser.parse_args(argv)
    plot(json.loads(arguments.result.read_text()), arguments.out)
    return 0


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a benchmark's content into `path`.

    Raises:
        ValueError: a benchmark that has no picture, or no row to draw.
    """
    draw = DRAWINGS.get(result["benchmark"])
    if draw is None:
        raise ValueError(f"no picture for the benchmark {result['benchmark']!r}; there is one of {', '.join(DRAWINGS)}")
    if all(row["failed"] is not None for row in result["rows"]):
        raise ValueError("every row of this benchmark failed: there is nothing to draw")
    save(draw(result), path)


def attention(result: dict[str, Any]) -> Any:
    """TFLOP/s of forward and backward over length: a panel for each head dim and mask."""
    rows = [row for row in result["rows"] if row["failed"] is None]
    head_dims, masks = sorted({row["head_dim"] for row in rows}), sorted({row["causal"] for row in rows}, reverse=True)
    drawn, axes = figure(len(masks), len(head_dims), 4.6 * len(head_dims), 3.1 * len(masks), sharex=True, sharey=True)
    styles = style_of([row["implementation"] for row in rows])
    for i, causal in enumerate(masks):
        for j, head_dim in enumerate(head_dims):
            axis, panel = axes[i, j], [r for r in rows if r["head_dim"] == head_dim and r["causal"] == causal]
            for name, style in styles.items():
                line = sorted((r["seq_len"], r["tflops"]["both"]) for r in panel if r["implementation"] == name)
                axis.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=4, **style)
            axis.set_title(f"head dim {head_dim}, {'causal' if causal else 'full'}", fontsize=10)
            length_axis(axis, sorted({row["seq_len"] for row in rows}))
    for axis in axes[:, 0]:
        axis.set_ylim(bottom=0)
        axis.set_ylabel("TFLOP/s, forward + backward")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    legend_below(drawn, axes[0, 0])
    drawn.suptitle(f"Attention in {result['settings']['dtype']} on {result['gpu']}", fontsize=12)
    drawn.tight_layout()
    return drawn


def memory(result: dict[str, Any]) -> Any:
    """Peak memory over length, and where it ran out."""
    drawn, axes = figure()
    axis = axes[0, 0]
    rows = [row for row in result["rows"] if "peak_gib" in row and row["failed"] is None]
    for name, style in style_of([row["implementation"] for row in rows]).items():
        line = sorted((row["seq_len"], row["peak_gib"]) for row in rows if row["implementation"] == name)
        axis.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=4, **style)
        lost = [r for r in result["rows"] if r["implementation"] == name and r["failed"] == "out of memory"]
        for at in [(row["seq_len"], result["gpu_memory_gib"]) for row in lost]:
            axis.plot(*at, marker="x", markersize=9, color=style["color"])
            text = f"out of memory at {format_size(at[0])}"
            axis.annotate(text, at, xytext=(6, -16), textcoords="offset points", fontsize=9)
    if "gpu_memory_gib" in result:
        axis.axhline(result["gpu_memory_gib"], color="#666666", linewidth=1, linestyle="--", label="memory of the GPU")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    length_axis(axis, sorted({row["seq_len"] for row in rows}))
    axis.set_xlabel("sequence length")
    axis.set_ylabel("peak memory, GiB")
    axis.set_title(f"One attention layer, forward + backward ({result['settings']['shape']})", fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    return drawn


def training(result: dict[str, Any]) -> Any:
    """Tokens/s by length, a bar for each model."""
    drawn, axes = figure()
    axis = axes[0, 0]
    lengths = sorted({row["seq_len"] for row in result["rows"]})
    styles = style_of([row["model"] for row in result["rows"]])
    width = 0.8 / len(styles)
    for i, (name, style) in enumerate(styles.items()):
        rates = {r["seq_len"]: r["tokens_per_second"] for r in result["rows"] if r["model"] == name and not r["failed"]}
        places = [at + (i + 0.5) * width - 0.4 for at, n in enumerate(lengths) if n in rates]
        bars = axis.bar(places, [rates[n] / 1000 for n in lengths if n in rates], width=0.92 * width, **style)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    axis.set_xticks(range(len(lengths)), [format_size(n) for n in lengths])
    axis.set_xlabel("sequence length")
    axis.set_ylabel("thousand tokens/s")
    axis.set_title(f"Training GPT-2 small on {result['gpu']}", fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    return drawn


def longest(result: dict[str, Any]) -> Any:
    """Peak memory of a step over length, a panel for each model: to the longest that trained, and where it ran out."""
    rows = [row for row in result["rows"] if row.get("how") != "confirmed"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    drawn, axes = figure(1, len(models), 5.2 * len(models), 4.0, sharey=True)
    capacity = result.get("gpu_memory_gib")
    for axis, model in zip(axes[0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        for index, (name, style) in enumerate(style_of([row["implementation"] for row in rows]).items()):
            tried = [row for row in own if row["implementation"] == name]
            line = sorted((row["seq_len"], row["peak_gib"]) for row in tried if "peak_gib" in row)
            axis.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=4, **style)
            if line:
                place, side = ((-4, 4), "right") if index % 2 == 0 else ((5, -10), "left")
                about = {"xytext": place, "textcoords": "offset points", "fontsize": 8, "ha": side}
                axis.annotate(format_size(line[-1][0]), line[-1], color=style["color"], **about)
            lost = min((row["seq_len"] for row in tried if row["failed"] == "out of memory"), default=None)
            if lost is not None and capacity is not None:
                axis.plot(lost, capacity, marker="x", markersize=8, color=style["color"])
        if capacity is not None:
            axis.axhline(capacity, color="#666666", linewidth=1, linestyle="--", label="memory of the GPU")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        length_axis(axis, sorted({row["seq_len"] for row in own}), doublings=2)
        axis.set_xlabel("sequence length")
        axis.set_title(model, fontsize=10)
    axes[0, 0].set_ylabel("peak memory of a training step, GiB")
    legend_below(drawn, axes[0, 0])
    drawn.suptitle(f"One sequence a step on {result['gpu']}", fontsize=12)
    drawn.tight_layout()
    return drawn


def block_sparse(result: dict[str, Any]) -> Any:
    """Time over density: a panel for each head dim and length, with what density times our dense time would be; of the
    first block size that was measured."""
    first = next((row["block"] for row in result["rows"] if row.get("block") is not None), None)
    rows = [row for row in result["rows"] if row["failed"] is None and row.get("block") in (None, first)]
    panels = sorted({(r["head_dim"], r["seq_len"]) for r in rows if r["density_asked"] is not None})
    drawn, axes = figure(1, len(panels), 3.6 * len(panels), 3.6)
    styles = style_of([row["implementation"] for row in rows if row["density_asked"] is not None])
    for axis, (head_dim, seq_len) in zip(axes[0], panels, strict=True):
        own = [r for r in rows if (r["head_dim"], r["seq_len"]) == (head_dim, seq_len)]
        for name, style in styles.items():
            line = sorted((r["density"], r["ms"]["both"]["median"]) for r in own if r["implementation"] == name)
            axis.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=4, **style)
        dense = {r["implementation"]: r["ms"]["both"]["median"] for r in own if r["density_asked"] is None}
        ours, densities = next(iter(dense.values())), sorted({r["density"] for r in own})
        ideal = [ours * density for density in densities]
        axis.plot(densities, ideal, linestyle=":", color=GREY, label="density x our dense time")
        if "sdpa_cudnn" in dense:
            axis.axhline(dense["sdpa_cudnn"], color=GREEN, linewidth=1, linestyle="--", label="cuDNN, dense")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(densities, [f"{100 * density:.3g}" for density in densities])
        axis.minorticks_off()
        axis.set_xlabel("visible blocks, %")
        axis.set_title(f"{format_size(seq_len)} tokens, head dim {head_dim}", fontsize=10)
    axes[0, 0].set_ylabel("forward + backward, ms")
    legend_below(drawn, axes[0, 0])
    drawn.suptitle(f"Block-sparse attention on {result['gpu']}", fontsize=12)
    drawn.tight_layout()
    return drawn


def block_sparse_figure(result: dict[str, Any]) -> Any:
    """Time over the share of visible blocks, both from zero, beside dense attention: figure 2 (right) of the paper."""
    drawn, axes = figure(1, 1, 6.4, 4.2)
    axis, rows = axes[0, 0], [row for row in result["rows"] if row["failed"] is None]
    for name, style in style_of([row["implementation"] for row in rows]).items():
        own = [(row["density_asked"], row["ms"]["both"]["median"]) for row in rows if row["implementation"] == name]
        line = sorted((100 * density, ms) for density, ms in own if density is not None)
        if line:
            axis.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=4, **style)
        for ms in (ms for density, ms in own if density is None):
            label = f"{style['label']}, dense"
            axis.axhline(ms, color=style["color"], linewidth=1, linestyle="--", label=label)
    axis.set_xlim(0, 102)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("visible blocks, %")
    axis.set_ylabel("forward + backward, ms")
    shape = max(rows, key=lambda row: row["seq_len"])
    sizes = (
        f"{format_size(shape['seq_len'])} tokens, {shape['batch']} x {shape['num_heads']} heads of {shape['head_dim']}"
    )
    axis.set_title(f"{sizes}, {result['gpu']}", fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    return drawn


def by_length(result: dict[str, Any]) -> Any:
    """Time and memory over length, a line for each implementation."""
    rows = [row for row in result["rows"] if row["failed"] is None]
    drawn, axes = figure(1, 2, 10.5, 4.4)
    figures = ("forward + backward, ms", both_ms), ("peak memory, GiB", lambda row: row.get("peak_gib"))
    for axis, (label, value) in zip(axes[0], figures, strict=True):
        for name, style in style_of([row["implementation"] for row in rows]).items():
            line = sorted((row["seq_len"], value(row)) for row in rows if row["implementation"] == name and value(row))
            axis.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=3, **style)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        length_axis(axis, sorted({row["seq_len"] for row in rows}))
        axis.set_xlabel("sequence length")
        axis.set_ylabel(label)
    legend_below(drawn, axes[0, 0])
    drawn.suptitle(f"{result['settings']['shape']}\n{result['gpu']}", fontsize=9)
    drawn.tight_layout()
    return drawn


def both_ms(row: dict[str, Any]) -> float:
    return row["ms"]["both"]["median"] if "ms" in row else row["forward_ms"] + row["backward_ms"]


DRAWINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "attention": attention,
    "memory": memory,
    "training": training,
    "longest": longest,
    "scaling": scaling,
    "block_sparse": block_sparse,
    "block_sparse_figure": block_sparse_figure,
    "approximate": by_length,
    "memory_sparse": by_length,
}


def style_of(names: list[str]) -> dict[str, dict[str, Any]]:
    """Label, colour and where it is not drawn through the line of each name, in the order in which they come."""
    keys = ("label", "color", "linestyle")
    return {name: dict(zip(keys, STYLES.get(name, (name, GREY)), strict=False)) for name in names}


def length_axis(axis: Any, lengths: list[int], doublings: int = 1) -> None:
    """Powers of two get a label, one in so many `doublings`; lengths between them stand where they belong."""
    axis.set_xscale("log", base=2)
    powers = [length for length in lengths if length & (length - 1) == 0]
    labelled = [length for length in powers if (length.bit_length() - 1) % doublings == 0] or lengths
    axis.set_xticks(labelled, [format_size(length) for length in labelled])
    axis.minorticks_off()


def legend_below(drawn: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=9)


if __name__ == "__main__":
    sys.exit(main())
