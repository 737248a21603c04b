"""Pictures of what benchmark_traffic.py measured: bytes and time over sequence length, and over the tile size.

python scripts/plot_traffic.py benchmarks/traffic.json --lengths docs/images/traffic.png --tiles docs/images/tiles.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring.drawing import COLOURS, figure, save
from plot_benchmarks import BLACK, GREY, legend_below, length_axis, style_of

from flashtrain.config.sizes import format_size

Row = dict[str, Any]
Value = Callable[[Row], float | None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the benchmark's JSON")
    parser.add_argument("--lengths", type=Path, help="PNG of bytes and time over sequence length")
    parser.add_argument("--tiles", type=Path, help="PNG of bytes and time over the tile size")
    arguments = parser.parse_args(argv)
    result = json.loads(arguments.result.read_text())
    if arguments.lengths is not None:
        save(over_length(result), arguments.lengths)
    if arguments.tiles is not None:
        save(over_tiles(result), arguments.tiles)
    return 0


def hbm(kind: str, passed: str) -> Value:
    """GB read and written; kind: traffic (the profiler's), theory or least."""

    def value(row: Row) -> float | None:
        counts = (row.get(kind) or {}).get(passed)
        return None if counts is None else counts["read_gb"] + counts["written_gb"]

    return value


def asked(kind: str, passed: str) -> Value:
    """GB between L2 and the multiprocessors."""
    return lambda row: (row.get(kind) or {}).get(passed, {}).get("asked_gb")


def milliseconds(passed: str) -> Value:
    return lambda row: row["ms"][passed]["median"] if row["failed"] is None else None


def over_length(result: dict[str, Any]) -> Any:
    """HBM traffic of each pass, what passes L2, and time; dashed what was counted by hand, dotted the least possible.

    Raises:
        ValueError: nothing was measured.
    """
    rows = sorted((row for row in result["rows"] if row["tile"] is None), key=lambda row: row["seq_len"])
    if all(row["failed"] is not None for row in rows):
        raise ValueError("no implementation has figures in this result: there is nothing to draw")
    drawn, axes = figure(2, 2, 9.6, 6.8, sharex=True)
    panels: list[tuple[Any, str, Value, Value | None, bool]] = [
        (axes[0, 0], "HBM, forward, GB", hbm("traffic", "forward"), hbm("theory", "forward"), True),
        (axes[0, 1], "HBM, backward, GB", hbm("traffic", "backward"), hbm("theory", "backward"), True),
        (
            axes[1, 0],
            "L2 to multiprocessors, both passes, GB",
            asked("traffic", "both"),
            asked("theory", "both"),
            False,
        ),
        (axes[1, 1], "time, both passes, ms", milliseconds("both"), None, False),
    ]
    for axis, title, measured, theory, bounded in panels:
        for name, style in style_of([row["implementation"] for row in rows]).items():
            own = [row for row in rows if row["implementation"] == name]
            line(axis, own, measured, marker="o", markersize=4, **style)
            if theory is not None:
                line(axis, own, theory, linestyle="--", linewidth=1.2, color=style["color"])
        if bounded:
            passed = title.split(", ")[1]
            first = [row for row in rows if row["implementation"] == rows[0]["implementation"]]
            line(axis, first, hbm("least", passed), linestyle=":", color=GREY)
        axis.set_title(title, fontsize=10)
        _log(axis)
        length_axis(axis, sorted({row["seq_len"] for row in rows}))
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    _explain(axes[0, 0], ((":", "least possible"),))
    legend_below(drawn, axes[0, 0])
    drawn.suptitle(f"{result['settings']['shape']}, {result['settings']['mask']}, {result['gpu']}", fontsize=12)
    drawn.tight_layout()
    return drawn


def over_tiles(result: dict[str, Any]) -> Any:
    """Bytes above, time below; on the left over queries a tile, on the right over keys. A cross: registers spilled.

    Raises:
        ValueError: no tile size was measured.
    """
    rows = [row for row in result["rows"] if row["tile"] is not None and row["failed"] is None]
    if not rows:
        raise ValueError("no tile size has figures in this result: there is nothing to draw")
    drawn, axes = figure(2, 2, 9.6, 6.8, sharex="col", sharey="row")
    widest = max(row["tile"]["block_m"] for row in rows)
    usual = max({row["tile"]["block_n"] for row in rows if row["tile"]["block_m"] < widest}, default=64)
    sweeps = (("block_m", "queries", "block_n", usual), ("block_n", "keys", "block_m", widest))
    lengths = sorted({row["seq_len"] for row in rows})
    for column, (varied, what, fixed, at) in enumerate(sweeps):
        swept = sorted((r for r in rows if r["tile"][fixed] == at), key=lambda r: r["tile"][varied])
        for place, seq_len in enumerate(lengths):
            own = [row for row in swept if row["seq_len"] == seq_len]
            style = {"color": COLOURS[place % len(COLOURS)], "x": varied}
            label = f"N = {format_size(seq_len)}"
            line(axes[0, column], own, asked("traffic", "forward"), marker="o", markersize=4, label=label, **style)
            line(axes[0, column], own, asked("theory", "forward"), linestyle="--", linewidth=1.2, **style)
            line(axes[0, column], own, hbm("traffic", "forward"), linestyle="-.", marker=".", linewidth=1, **style)
            line(axes[1, column], own, milliseconds("forward"), marker="o", markersize=4, **style)
            spilled = [row for row in own if (row.get("resources") or {}).get("spilled_bytes")]
            line(axes[1, column], spilled, milliseconds("forward"), linestyle="", marker="x", markersize=10, **style)
        line(axes[0, column], swept, hbm("least", "forward"), linestyle=":", color=GREY, x=varied)
        ticks = sorted({row["tile"][varied] for row in swept})
        axes[1, column].set_xscale("log", base=2)
        axes[1, column].set_xticks(ticks, [str(tick) for tick in ticks])
        axes[1, column].set_xlabel(f"{what} a tile ({at} {'keys' if what == 'queries' else 'queries'})")
    for axis, title in zip(axes[:, 0], ("GB", "ms"), strict=True):
        _log(axis)
        axis.set_ylabel(f"forward, {title}")
    _explain(axes[0, 0], (("-.", "HBM (solid: L2 to multiprocessors)"), (":", "HBM, least possible")))
    legend_below(drawn, axes[0, 0])
    drawn.suptitle(f"Tiles of the plain Triton kernel, {result['settings']['shape']}, {result['gpu']}", fontsize=12)
    drawn.tight_layout()
    return drawn


def line(axis: Any, rows: list[Row], value: Value, x: str = "seq_len", **style: Any) -> None:
    """One line through the rows that have a value, over their length or a side of their tile."""
    points = [(row[x] if x == "seq_len" else row["tile"][x], value(row)) for row in rows]
    points = [point for point in points if point[1] is not None]
    axis.plot([at for at, _ in points], [y for _, y in points], **style)


def _log(axis: Any) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")


def _explain(axis: Any, lines: tuple[tuple[str, str], ...]) -> None:
    """Kinds of lines for the legend."""
    for style, text in (("--", "counted by hand"), *lines):
        axis.plot([], [], linestyle=style, color=BLACK if style == "--" else GREY, label=text)


if __name__ == "__main__":
    sys.exit(main())
