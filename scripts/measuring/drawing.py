"""One look for all pictures: few colours, no frames, labels that can be read in a README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, on machines without a screen too
import matplotlib.pyplot as plt

# Blue, orange, green, red, purple and grey, told apart by colour-blind readers too.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#666666", "#56b4e9", "#000000")


def figure(rows: int = 1, columns: int = 1, width: float = 7.5, height: float = 4.2, **options: Any) -> Any:
    """A figure and its axes, [rows, columns], without boxes around them."""
    drawn, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
    return drawn, axes


def save(drawn: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=160, bbox_inches="tight", facecolor="white")
    plt.close(drawn)
    print(f"wrote {path}")
