"""What it costs to build work lists once a step, in a step whose layers share them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from flashtrain.attention import BlockLayout, Plan
from measuring.timing import Stopwatch, spread

ABOUT = (
    "alone_ms: lowering a layout on an idle GPU. step_ms: all layers' forward and backward passes with lists that are "
    "there; with_lists_ms: the same in steps that build theirs; share: the difference over step_ms. Steps follow each "
    "other in the queue, as in training; medians"
)


def list_cost(
    layouts: Sequence[BlockLayout],
    lowered: Callable[[BlockLayout], Plan],
    step: Callable[[Plan], None],
    watch: Stopwatch,
) -> dict[str, float]:
    """The figures that `ABOUT` explains.

    Args:
        layouts: none of which has been lowered before, since plans are cached; half of them, less one, are steps.
        step: all layers' forward and backward passes with one plan.
    """
    half = len(layouts) // 2
    alone = []
    for layout in layouts[:half]:
        watch.wait()
        start = time.perf_counter()
        lowered(layout)
        watch.wait()
        alone.append(1000 * (time.perf_counter() - start))
    marks = [watch.mark()]
    for layout in layouts[half:]:
        for _ in range(2):  # lowered in the first step, found in the cache in the second
            step(lowered(layout))
            marks.append(watch.mark())
    watch.wait()
    # The first two steps fill the queue and are not counted.
    ms = [watch.ms(start, end) for start, end in itertools.pairwise(marks[2:])]
    built, cached = ms[::2], ms[1::2]
    more = spread([a - b for a, b in zip(built, cached, strict=True)])["median"]
    step_ms = spread(cached)["median"]
    return {
        "alone_ms": spread(alone)["median"],
        "step_ms": step_ms,
        "with_lists_ms": spread(built)["median"],
        "share": more / step_ms,
    }
