"""What a run computes again: as configured, and where that is left open the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashtrain.config import format_size
from flashtrain.config.schema import MemoryConfig
from flashtrain.models.recompute import Blocks, Recompute
from flashtrain.training.forecast.case import Case
from flashtrain.training.forecast.memory import host_bytes, step_memory
from flashtrain.training.forecast.time import step_time

CHUNK = 16 * 1024  # tokens of an MLP's piece, where pieces are chosen
# Share of the device's memory that is planned with: the forecast may be off by some percent, and memory is fragmented.
SAFE = 0.92
_HOST_SHARE = 0.6  # of the machine's memory that offloaded inputs may take


def candidates(memory: MemoryConfig) -> Iterator[Recompute]:
    """The settings that the configuration leaves open, those that cost least at ordinary lengths first."""
    blocks: tuple[Blocks, ...] = ("none", "selective", "full")
    if memory.checkpointing != "auto":
        blocks = (memory.checkpointing,)
    offloads = (False, True) if memory.offload == "auto" else (memory.offload,)
    chunks = (0, CHUNK) if memory.mlp_chunk_tokens is None else (memory.mlp_chunk_tokens,)
    for offload in offloads:
        for chunk in chunks:
            for kept in blocks:
                if kept != "none" or not offload:
                    yield Recompute(kept, offload, chunk)


def every_setting() -> list[Recompute]:
    """All that `memory=auto` chooses from."""
    return list(candidates(MemoryConfig("auto", loss_chunk_tokens=0)))


def choose(case: Case, device_bytes: float, host_memory: float) -> Recompute:
    """The fastest of the candidates that fits; where none does, the one that takes the least memory.

    Args:
        case: `case.how` is not read.
        device_bytes: memory that may be planned with.
        host_memory: of the machine, for each of its devices.
    """
    cases = [replace(case, how=how) for how in candidates(case.config.memory)]
    best = fastest_of(cases, device_bytes, host_memory)
    if best is None:
        cases = [each for each in cases if _has_host(each, host_memory)] or cases
        best = min(cases, key=lambda each: step_memory(each).peak)
    return best.how


def fastest_of(cases: Sequence[Case], device_bytes: float, host_memory: float) -> Case | None:
    """The fastest that fits, the first one where no times are known; None where none fits. Arguments as in `choose`."""
    fitting = [each for each in cases if step_memory(each).peak <= device_bytes and _has_host(each, host_memory)]
    return min(fitting, key=_seconds, default=None)


def _has_host(case: Case, host_memory: float) -> bool:
    return host_bytes(case) <= _HOST_SHARE * host_memory


def _seconds(case: Case) -> float:
    """0 where that is not known, so that the first candidate is taken."""
    time = step_time(case)
    return 0.0 if time is None else time.step


def describe(how: Recompute) -> str:
    """A setting as one writes it on the command line."""
    if how == Recompute("full", True, CHUNK):
        return "memory=offload"
    words = [f"memory={how.blocks}"]
    if how.offload:
        words.append("memory.offload=true")
    if how.mlp_chunk_tokens:
        words.append(f"memory.mlp_chunk_tokens={format_size(how.mlp_chunk_tokens)}")
    return " ".join(words)
