"""The picture of benchmark_scaling.py."""

from __future__ import annotations

from typing import Any

from flashtrain.config.sizes import format_size
from measuring.drawing import COLOURS, figure

BLUE, ORANGE, GREEN, _, PURPLE, GREY, LIGHT_BLUE, _ = COLOURS


def scaling(result: dict[str, Any]) -> Any:
    """Tokens/s of each GPU, a bar for each mesh, a panel for each model and length that was trained on several of them:
    bars as high as the first one's are perfect scaling. On each stands its efficiency."""
    panels: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["failed"] is None:
            panels.setdefault((row["model"], row["seq_len"]), []).append(row)
    compared = {of: rows for of, rows in panels.items() if len({row.get("mesh", "1") for row in rows}) > 1} or panels
    across = min(3, len(compared))
    down = -(-len(compared) // across)
    drawn, axes = figure(down, across, 3.9 * across, 3.4 * down)
    for axis, ((model, seq_len), rows) in zip(axes.flat, compared.items(), strict=False):
        axis.set_title(f"{model}, {format_size(seq_len)} tokens a sequence", fontsize=10)
        _panel(axis, rows)
    for axis in [*axes.flat][len(compared) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("thousand tokens/s a GPU")
    drawn.suptitle(f"Training on several GPUs ({result['gpu']})", fontsize=12)
    drawn.tight_layout()
    return drawn


def _panel(axis: Any, rows: list[dict[str, Any]]) -> None:
    named = {row.get("mesh", "1"): row for row in rows}  # of several calls the last one
    meshes = sorted(named, key=lambda mesh: named[mesh].get("devices", 1))
    rates = [named[mesh]["tokens_per_second"] / named[mesh].get("devices", 1) / 1000 for mesh in meshes]
    bars = axis.bar(range(len(meshes)), rates, width=0.7, color=[_colour(mesh) for mesh in meshes])
    shares = [named[mesh].get("efficiency") for mesh in meshes]
    axis.bar_label(
        bars,
        ["" if share is None else f"{share:.0%}" for share in shares],
        label_type="center",
        color="white",
        fontsize=8,
    )
    if "1" in named:
        axis.axhline(rates[meshes.index("1")], color=GREY, linewidth=1, linestyle="--")
    axis.set_xticks(range(len(meshes)), [mesh.replace(":", "\n") for mesh in meshes], fontsize=7)


def _colour(mesh: str) -> str:
    """By what is divided: nothing, sequences of a step, weights too, a sequence by each method, both."""
    kind = mesh.split(":")[0]
    if kind == "context":
        return LIGHT_BLUE if "ulysses" in mesh else BLUE
    return {"1": GREY, "ddp": ORANGE, "fsdp": GREEN}.get(kind, PURPLE)
