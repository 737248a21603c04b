"""The facts of the machine that every result carries, and its state while something is timed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Recorded where they are installed: each of them runs in one of the benchmarks.
_PACKAGES = ("torch", "triton", "lightning", "liger-kernel", "transformers", "flash-attn-4")
_STATE_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def choose_device(name: str) -> torch.device:
    """The device called `name`; auto is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def facts(device: torch.device) -> dict[str, Any]:
    """GPU and versions, as they stand in each JSON."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "cudnn": _cudnn(), "driver": None}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__  # with the build, which the package's metadata leaves out
    if device.type != "cuda":
        return {"gpu": f"none: {device.type}", "versions": versions}
    properties = torch.cuda.get_device_properties(device)
    state = _nvidia_smi("driver_version", "power.limit")
    versions["driver"] = state.get("driver_version")
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 2),
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_power_limit_watts": state.get("power.limit"),
        "versions": versions,
    }


class StateReading:
    """Clocks in MHz, power in watts and temperature, read by nvidia-smi beside the work. Nothing is set.

    An idle GPU lowers its clocks within milliseconds: start the reading with work in the queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._process: subprocess.Popen[str] | None = None
        if device.type == "cuda":
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(_query(*_STATE_FIELDS), stdout=subprocess.PIPE, text=True)

    @property
    def ready(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def values(self) -> dict[str, str]:
        """Wait for the answer; empty where there is none."""
        if self._process is None:
            return {}
        try:
            return _parse(_STATE_FIELDS, self._process.communicate(timeout=20)[0])
        except subprocess.TimeoutExpired:
            self._process.kill()
            return {}


def state_under_load(device: torch.device, work: Callable[[], object], call_ms: float) -> dict[str, str]:
    """The state while the GPU runs `work`, a call of which takes `call_ms`, until nvidia-smi has answered."""
    if device.type != "cuda":
        return {}
    reading: StateReading | None = None
    waiting, limit = torch.cuda.Event(), time.monotonic() + 5
    waiting.record()
    while reading is None or not (reading.ready or time.monotonic() > limit):
        for _ in range(max(1, round(30 / max(call_ms, 0.1)))):
            work()
        done = torch.cuda.Event()
        done.record()
        waiting.synchronize()  # so that the queue holds two rounds at most
        waiting, reading = done, reading or StateReading(device)
    torch.cuda.synchronize(device)
    return reading.values()


def _nvidia_smi(*fields: str) -> dict[str, str]:
    """The fields of the GPU in use by name; empty where nvidia-smi does not answer."""
    try:
        answer = subprocess.run(_query(*fields), capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return _parse(fields, answer)


def _query(*fields: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *_this_gpu()]


def _parse(fields: Sequence[str], answer: str) -> dict[str, str]:
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer.strip() else []
    return dict(zip(fields, values, strict=False))


def _this_gpu() -> list[str]:
    """nvidia-smi counts all GPUs of the machine, PyTorch the visible ones: name it by its id where that is known."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return [] if uuid is None else ["-i", str(uuid) if str(uuid).startswith("GPU-") else f"GPU-{uuid}"]


def _cudnn() -> str | None:
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"
