"""What `language` finds, as tables and a picture: loss by position, and a heat map of passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtrain.config.sizes import format_size
from measuring.report import say, table

_COLUMNS = 4  # panels side by side at most


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
    from measuring.drawing import figure, save

    lines = [(label, result["position"]) for label, result in results if result.get("position")]
    grids = [(label, result["passkey"]) for label, result in results if result.get("passkey")]
    panels = bool(lines) + len(grids)
    if not panels:
        raise ValueError("--plot: the result has neither loss by position nor passkeys to draw; add them to --tasks")
    columns = min(panels, _COLUMNS)
    high = -(-panels // columns)
    drawn, axes = figure(high, columns, width=4.6 * columns, height=3.8 * high, layout="constrained")
    places = list(axes.flat)
    for axis in places[panels:]:
        axis.remove()
    if lines:
        _draw_losses(places[0], lines)
    for axis, (label, rows) in zip(places[bool(lines) : panels], grids, strict=True):
        shown = _draw_passkeys(axis, label, rows)
    if grids:
        drawn.colorbar(shown, ax=places[panels - 1], label="share found")
    save(drawn, path)


def _draw_losses(axis: Any, lines: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    from measuring.drawing import COLOURS

    for number, (label, rows) in enumerate(lines):
        known = [row for row in rows if row["loss"] is not None]
        middle = [(row["first"] + row["last"]) / 2 + 1 for row in known]
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": ("-", "--", ":")[number // len(COLOURS) % 3]}
        axis.plot(middle, [row["loss"] for row in known], marker="o", markersize=3, label=label, **style)
    axis.set_xscale("log", base=2)
    ends = sorted({row["last"] + 1 for _, rows in lines for row in rows})
    shown_ends = ends[:: max(1, len(ends) // 6)]
    axis.set_xticks(shown_ends, [format_size(end) for end in shown_ends])
    axis.minorticks_off()
    axis.set(xlabel="position in the context, tokens", ylabel="loss, nats a token")
    axis.legend(frameon=False, fontsize=8 if len(lines) <= 5 else 7)


def _draw_passkeys(axis: Any, label: str, rows: Sequence[dict[str, Any]]) -> Any:
    matrix = passkey_matrix(rows)
    depths = sorted({row["depth"] for row in rows})
    cells = list(zip(*matrix.values(), strict=True))
    shown = axis.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="upper")
    axis.grid(visible=False)
    axis.set_xticks(range(len(matrix)), [format_size(length) for length in matrix])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set(xlabel="length, tokens", ylabel="depth of the passkey", title=label)
    return shown


def _extension(result: dict[str, Any]) -> str:
    how = result.get("extended")
    return "" if how is None else f" ({how}, trained at {format_size(result['trained_at'])})"
