"""The picture of benchmark_scaling.py."""

from __future__ import annotations

from typing import Any

from flashtrain.config.sizes import format_size
from measuring.drawing import COLOURS, figure

BLUE, ORANGE, GREEN, _, PURPLE, GREY, LIGHT_BLUE, _ = COLOURS


def scaling(result: dict[str, Any]) -> Any:
    """Tokens/s of each GPU, a panel for each model and length, a bar for each mesh: bars as high as the first one's are
    perfect scaling. On each stands its efficiency."""
    rows = [row for row in result["rows"] if row["failed"] is None]
    models = list(dict.fromkeys(row["model"] for row in rows))
    lengths = sorted({row["seq_len"] for row in rows})
    drawn, axes = figure(len(models), len(lengths), 3.9 * len(lengths), 3.2 * len(models))
    for i, model in enumerate(models):
        for j, seq_len in enumerate(lengths):
            axis = axes[i, j]
            axis.set_title(f"{model}, {format_size(seq_len)} tokens a sequence", fontsize=10)
            _panel(axis, [row for row in rows if (row["model"], row["seq_len"]) == (model, seq_len)])
        axes[i, 0].set_ylabel("thousand tokens/s a GPU")
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
