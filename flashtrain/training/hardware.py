"""What the machine is: its peak rate, its memory, and which device and number format a run takes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from flashtrain.config.schema import TrainerConfig

# Dense bfloat16 tensor-core peaks in TFLOP/s, from the vendor's data sheets. The first name found in the device's wins.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "GH200": 989.5,
    "H100": 989.5,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A6000": 154.8,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def choose_device(accelerator: str) -> torch.device:
    """The device to train on.

    Raises:
        ValueError: `trainer.accelerator=cuda` on a machine where PyTorch sees no GPU.
    """
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "trainer.accelerator=cuda: PyTorch sees no CUDA GPU here; write trainer.accelerator=cpu or auto"
        )
    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_precision(trainer: TrainerConfig, device: torch.device) -> str:
    """Lightning's name of the number format: what is asked for, or the usual one of the device."""
    if trainer.precision != "auto":
        return trainer.precision
    return "bf16-mixed" if device.type == "cuda" else "32-true"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device, precision: str, override_tflops: float | None) -> float | None:
    """Dense peak in FLOP/s that MFU is measured against, or None where it is not known (CPUs, unknown GPUs, fp32)."""
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda" or not precision.startswith("bf16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in _PEAK_TFLOPS.items() if known in name), None)


def device_memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the machine for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 8 << 30
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal"))
    return int(line.split()[1]) * 1024


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: by tensors on a GPU, by the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
