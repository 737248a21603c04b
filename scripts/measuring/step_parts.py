"""Where the time of a training step goes, by PyTorch's profiler: kernels sorted into parts by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from measuring.timing import Stopwatch

# The first pattern that a kernel's name contains decides. Kernels that torch.compile generates are named after the
# operations fused into them and come first, since those may mention attention or a product beside them.
PARTS = (
    ("loss", r"^triton_.*(nll|cross_entropy|log_softmax)"),
    ("norm and elementwise", r"^triton_"),
    ("loss", r"cross_entropy|nll_loss|softmax"),
    ("attention", r"^_?(forward|backward|prepare|finish|delta|dq|dkdv)_kernel|flash|fmha|sdpa|attention"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas|splitk|mm$"),
    ("optimiser and clipping", r"multi_tensor|adam|foreach|lpnorm"),
    ("copies and fills", r"memcpy|memset|copy|fill"),
    ("norm and elementwise", r""),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel's run: times in microseconds."""

    name: str
    start: float
    end: float


class ProfiledSteps:
    """Three steps to warm up, then `steps` under the profiler."""

    def __init__(self, device: torch.device, steps: int = 3) -> None:
        self.watch, self.steps, self.count = Stopwatch(device), steps, 0
        self.kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self.profiler: Any = None

    def done(self) -> bool:
        self.count += 1
        if self.count == 3:
            self.watch.wait()
            self.profiler = profile(activities=[self.kind])
            self.profiler.start()
        if self.count < 3 + self.steps:
            return False
        self.watch.wait()
        self.profiler.stop()
        return True

    def kernels(self) -> list[Kernel]:
        """What ran on the GPU; on the CPU operations, which contain each other and add up to more than the step."""
        wanted = DeviceType.CUDA if self.kind is ProfilerActivity.CUDA else DeviceType.CPU
        # Named ranges and waits also stand on the GPU's time line; they would count what is in them twice.
        return [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in self.profiler.events()
            if event.device_type == wanted and not event.is_user_annotation and not event.name.endswith(" Sync")
        ]


def part_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    lowered = name.lower()
    return next(part for part, pattern in PARTS if re.search(pattern, lowered))


def parts(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds of a step by part, with the time in which nothing ran, and the kernels that took longest."""
    if not kernels:
        return {"step_ms": 0.0, "parts_ms": {}, "longest": []}
    by_part: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, min(kernel.start for kernel in kernels)
    begun = reached
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        by_part[part_of(kernel.name)] += kernel.end - kernel.start
        by_name[kernel.name] += kernel.end - kernel.start
        busy += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    span = reached - begun
    scale = 1e-3 / steps
    ordered = sorted(by_part.items(), key=lambda item: -item[1])
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:25]
    return {
        "step_ms": span * scale,
        "parts_ms": {**{part: us * scale for part, us in ordered}, "idle": (span - busy) * scale},
        "longest": [{"kernel": name[:120], "part": part_of(name), "ms": us * scale} for name, us in longest],
    }
