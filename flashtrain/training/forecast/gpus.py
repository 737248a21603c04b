"""The GPUs that a forecast knows: memory, peak rates, and how much of them our kernels reach.

Measured is the H200 (benchmarks/attention.json, attention_hopper.json, training_parts.json). For every other GPU the
same shares of its own peaks are assumed, which is a guess.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as in plan.gpu.
        device_name: part of the name that PyTorch gives it.
        memory_bytes: what PyTorch can allocate, about.
        tflops: dense bfloat16 peak of the data sheet.
        gb_per_s: memory bandwidth of the data sheet, 10^9 bytes.
        host_gb_per_s: to and from pinned host memory, 80 % of the bus.
        has_hopper_kernels: compute capability 9.0.
        link_gb_per_s: to the other GPUs of a host, one way: NVLink's of the data sheet, or the bus.
    """

    name: str
    device_name: str
    memory_bytes: float
    tflops: float
    gb_per_s: float
    host_gb_per_s: float
    has_hopper_kernels: bool = False
    link_gb_per_s: float = 25


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", "B200", 178 * GIB, 2250.0, 8000, 50, link_gb_per_s=900),
        Gpu("h200", "H200", 139.8 * GIB, 989.5, 4800, 50, True, 450),
        Gpu("h100", "H100", 79.1 * GIB, 989.5, 3350, 50, True, 450),
        Gpu("a100-80gb", "A100", 79.1 * GIB, 312.0, 2039, 25, link_gb_per_s=300),
        Gpu("a100-40gb", "A100", 39.4 * GIB, 312.0, 1555, 25, link_gb_per_s=300),
        Gpu("l40s", "L40S", 44.4 * GIB, 362.0, 864, 25),
        Gpu("a6000", "A6000", 47.4 * GIB, 154.8, 768, 25),
        Gpu("rtx4090", "RTX 4090", 23.6 * GIB, 165.2, 1008, 25),
        Gpu("rtx3090", "RTX 3090", 23.6 * GIB, 71.0, 936, 25),
        Gpu("l4", "L4", 22.0 * GIB, 121.0, 300, 25),
    )
}
MEASURED = "h200"

# TFLOP/s of attention, forward and backward together, causal, on the H200 by head dim: at 1k, 4k, 16k and 64k tokens.
# At 1k it is what training reaches (benchmarks/training.json, training_portable.json; for head dim 128, and sdpa, a
# guess after those): single calls wait for the host there.
_LENGTHS = (1024, 4096, 16384, 65536)
_ATTENTION = {
    ("hopper", 64): (300, 410, 481, 495),
    ("hopper", 128): (380, 494, 574, 592),
    ("portable", 64): (230, 364, 407, 420),
    ("portable", 128): (300, 370, 416, 430),
    ("sdpa", 64): (300, 375, 426, 431),
    ("sdpa", 128): (380, 455, 525, 546),
    ("standard", 64): (25.3, 23.8, 25.5, 25.5),
    ("standard", 128): (50.6, 47.3, 50.7, 50.7),
}


def attention_tflops(gpu: Gpu, backend: str, head_dim: int, seq_len: int) -> float:
    """What attention reaches, TFLOP/s, interpolated between the lengths that were measured."""
    rates = _ATTENTION[backend, 64 if head_dim <= 64 else 128]
    # Smaller heads are padded to the width of the matrix units' tiles.
    share = min(1.0, head_dim / 64)
    place = bisect_left(_LENGTHS, seq_len)
    if place in (0, len(_LENGTHS)):
        rate = float(rates[min(place, len(_LENGTHS) - 1)])
    else:
        low, high = _LENGTHS[place - 1], _LENGTHS[place]
        part = (seq_len - low) / (high - low)
        rate = rates[place - 1] + part * (rates[place] - rates[place - 1])
    return rate * share * gpu.tflops / GPUS[MEASURED].tflops


def gpu_called(device_name: str, memory_bytes: float) -> Gpu | None:
    """The known GPU that PyTorch calls so, with the memory it has here; None for any other."""
    for gpu in GPUS.values():
        named = re.search(rf"\b{gpu.device_name}\b", device_name) is not None
        # The A100 comes with 40 and with 80 GB.
        if named and (gpu.device_name != "A100" or abs(gpu.memory_bytes / memory_bytes - 1) < 0.2):
            return replace(gpu, memory_bytes=memory_bytes)
    return None
