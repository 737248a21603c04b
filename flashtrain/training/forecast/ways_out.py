"""How long a sequence may be, and what to change where a run does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashtrain.config import format_size
from flashtrain.models.recompute import Recompute
from flashtrain.training.forecast.case import Case
from flashtrain.training.forecast.choose import CHUNK, SAFE, describe
from flashtrain.training.forecast.gpus import GPUS
from flashtrain.training.forecast.memory import step_memory
from flashtrain.training.forecast.time import step_time

SETTINGS = {
    "none": Recompute(),
    "selective": Recompute("selective"),
    "full": Recompute("full"),
    "offload": Recompute("full", True, CHUNK),
}
_STEP = 1024  # lengths are told in multiples of this
_LONGEST = 2**26


def longest(case: Case, device_bytes: float) -> int:
    """The longest sequence, one a step, that fits: a multiple of 1k, 0 where none does."""

    def fits(length: int) -> bool:
        return step_memory(case.at_length(length * _STEP)).peak <= device_bytes

    low, high = 0, _LONGEST // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * _STEP


@dataclass(frozen=True)
class WayOut:
    """A change with which the run fits: what to write, and what it costs."""

    change: str
    peak: float  # bytes
    seconds: float | None  # a step
    rank: int  # 0: the same training; 1: other numbers or another device; 2: another length


def ways_out(case: Case, device_bytes: float, most: int = 3) -> list[WayOut]:
    """The cheapest changes, one by one, with which the run fits: those that train the same first, then by time.

    Of each section of the configuration only the cheapest: three ways of checkpointing are one way out.
    """
    found: list[WayOut] = []
    for change, rank, other in _changes(case, device_bytes):
        limit = SAFE * other.gpu.memory_bytes if other.gpu is not None and other.gpu != case.gpu else device_bytes
        peak, time = step_memory(other).peak, step_time(other)
        if peak <= limit:
            found.append(WayOut(change, peak, None if time is None else time.step, rank))
    found.sort(key=lambda way: (way.rank, way.seconds or 0.0))
    best = {way.change.split(".")[0].split("=")[0]: way for way in reversed(found)}
    return [way for way in found if way in best.values()][:most]


def _changes(case: Case, device_bytes: float) -> Iterator[tuple[str, int, Case]]:
    config = case.config
    for how in (*SETTINGS.values(), Recompute("selective", True), Recompute("selective", True, CHUNK)):
        if how != case.how:
            yield describe(how), 0, replace(case, how=how)
    if case.backend == "standard":
        flash = replace(case, backend="portable" if case.gpu else "sdpa")
        yield "attention=flash", 0, flash
        yield "attention=flash memory=selective", 0, replace(flash, how=Recompute("selective"))
    tokens = case.micro_tokens // 2
    while tokens >= config.seq_len:
        smaller = replace(case, config=replace(config, trainer=replace(config.trainer, micro_batch_tokens=tokens)))
        if step_memory(smaller).peak <= device_bytes:
            yield f"trainer.micro_batch_tokens={format_size(tokens)}", 0, smaller
            break
        tokens //= 2
    enough = step_memory(replace(case, how=SETTINGS["offload"])).peak <= device_bytes
    if config.optimizer.name == "adamw" and config.optimizer.state == "float32":
        half = replace(config, optimizer=replace(config.optimizer, state="bfloat16"))
        yield "optimizer.state=bfloat16", 1, replace(case, config=half)
        if not enough:
            yield "optimizer.state=bfloat16 memory=offload", 1, replace(case, config=half, how=SETTINGS["offload"])
    if config.model.positions == "learned" and config.task == "language":
        turned = replace(case, config=replace(config, model=replace(config.model, positions="rope")))
        yield "model.positions=rope", 1, turned
        if not enough:
            yield "model.positions=rope memory=offload", 1, replace(turned, how=SETTINGS["offload"])
    peak = step_memory(case).peak
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes):
        if case.gpu is not None and peak <= SAFE * gpu.memory_bytes:
            yield f"a GPU with more memory ({gpu.name}: {gpu.memory_bytes / 2**30:.0f} GiB)", 1, replace(case, gpu=gpu)
            break
    for how in (case.how, SETTINGS["offload"]):
        shorter = longest(replace(case, how=how), device_bytes)
        if 0 < shorter < config.seq_len:
            words = f"seq_len={format_size(shorter)}" + ("" if how == case.how else f" {describe(how)}")
            yield words, 2, replace(case, how=how).at_length(shorter)
