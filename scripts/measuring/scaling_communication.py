"""How much of a step GPUs send to each other, and how much of that nothing is computed beside, from its kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from measuring.step_parts import Kernel

# NCCL's kernels and copies from GPU to GPU; on a CPU the calls of torch.distributed.
_SENDS = re.compile(r"nccl|memcpy ptop|c10d::", re.IGNORECASE)


def communication(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Milliseconds of the step, of those in which something is sent, and of those in which nothing else runs beside
    (`exposed`); and the names of what sends, with theirs.

    A kernel that sends begins when its own GPU is ready and then waits for the other one: this is counted with it.
    """
    if not kernels:
        return {"step_ms": 0.0, "communication_ms": 0.0, "exposed_ms": 0.0, "kernels": {}}
    sends = [kernel for kernel in kernels if _SENDS.search(kernel.name)]
    others = [kernel for kernel in kernels if not _SENDS.search(kernel.name)]
    by_name: dict[str, float] = defaultdict(float)
    for kernel in sends:
        by_name[kernel.name[:80]] += (kernel.end - kernel.start) / 1000
    return {
        "step_ms": (max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)) / 1000,
        "communication_ms": covered(sends) / 1000,
        "exposed_ms": (covered(kernels) - covered(others)) / 1000,
        "kernels": dict(sorted(by_name.items(), key=lambda item: -item[1])),
    }


def covered(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return total
