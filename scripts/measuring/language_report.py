"""What `language` finds, as tables and a picture: loss by position, and a heat map of passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtrain.config.sizes import format_size
from measuring.report import say, table


def tell(name: str, step: int | None, result: dict[str, Any]) -> None:
    """Print a result for people."""
    after = "" if step is None else f" after {step:,} steps"
    say(f"{name}{after}, context {format_size(result['context'])}{_extension(result)}, {result['precision']}")
    if "perplexity" in result:
        found = result["perplexity"]
        say(
            f"perplexity {found['perplexity']:.4g}, {found['loss']:.4f} nats a token over {found['tokens']:,} tokens "
            f"of {result['text']['source']}, windows of {found['window']:,} every {found['stride']:,}"
        )
        if result["text"].get("of_the_run") is False:
            say("the corpus is not the one that the run was trained on: some of this text may have been in it")
    if "position" in result:
        rows = [(f"{row['first']:,} to {row['last']:,}", row["targets"], row["loss"]) for row in result["position"]]
        say(table(["position", "targets", "nats a token"], rows))
    if "passkey" in result and not result["passkey"]:
        say("passkeys: the context has no room for one")
    elif "passkey" in result:
        depths = sorted({row["depth"] for row in result["passkey"]})
        grid = passkey_matrix(result["passkey"])
        say("passkeys found, % by length and depth")
        cells = [[length, *(round(100 * each) for each in row)] for length, row in grid.items()]
        say(table(["length", *(f"{depth:.0%}" for depth in depths)], cells))
    for task in ("associative", "induction"):
        if task in result:
            say(f"{task}{' recall' * (task == 'associative')}: how often the right token is the likeliest")
            rows = [(row["length"], 100 * row["accuracy"], row["loss"]) for row in result[task]]
            say(table(["length", "%", "nats a token"], rows))


def passkey_matrix(rows: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    """Share found at each depth, in order, by length."""
    ordered = sorted(rows, key=lambda row: (row["length"], row["depth"]))
    return {row["length"]: [r["accuracy"] for r in ordered if r["length"] == row["length"]] for row in ordered}


def draw(results: Sequence[tuple[str, dict[str, Any]]], path: Path) -> None:
    """Results side by side in a picture: losses by position in one panel, a heat map of passkeys for each.

    Args:
        results: label and result of each, as `evaluate_language` gives them.

    Raises:
        ValueError: none of them has anything to draw.
    """
    from measuring.drawing import COLOURS, figure, save

    lines = [(label, result["position"]) for label, result in results if result.get("position")]
    grids = [(label, result["passkey"]) for label, result in results if result.get("passkey")]
    panels = bool(lines) + len(grids)
    if not panels:
        raise ValueError("--plot: the result has neither loss by position nor passkeys to draw; add them to --tasks")
    drawn, axes = figure(1, panels, width=4.6 * panels, height=3.8, layout="constrained")
    if lines:
        axis = axes[0, 0]
        for (label, rows), colour in zip(lines, COLOURS * len(lines), strict=False):
            known = [row for row in rows if row["loss"] is not None]
            middle = [(row["first"] + row["last"]) / 2 + 1 for row in known]
            axis.plot(middle, [row["loss"] for row in known], color=colour, marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        ends = sorted({row["last"] + 1 for _, rows in lines for row in rows})
        shown_ends = ends[:: max(1, len(ends) // 6)]
        axis.set_xticks(shown_ends, [format_size(end) for end in shown_ends])
        axis.minorticks_off()
        axis.set(xlabel="position in the context, tokens", ylabel="loss, nats a token")
        axis.legend(frameon=False, fontsize=8)
    for axis, (label, rows) in zip(axes[0, bool(lines) :], grids, strict=True):
        matrix = passkey_matrix(rows)
        depths = sorted({row["depth"] for row in rows})
        columns = list(zip(*matrix.values(), strict=True))
        shown = axis.imshow(columns, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="upper")
        axis.grid(visible=False)
        axis.set_xticks(range(len(matrix)), [format_size(length) for length in matrix])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set(xlabel="length, tokens", ylabel="depth of the passkey", title=label)
        if axis is axes[0, -1]:
            drawn.colorbar(shown, ax=axis, label="share found")
    save(drawn, path)


def _extension(result: dict[str, Any]) -> str:
    how = result.get("extended")
    return "" if how is None else f" ({how}, trained at {format_size(result['trained_at'])})"
