"""The forecast as people read it: whole for plan.only=true, three lines at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashtrain.config import format_size
from flashtrain.models.flops import model_flops
from flashtrain.training.forecast.case import Case, count_parameters
from flashtrain.training.forecast.choose import SAFE, describe
from flashtrain.training.forecast.gpus import GIB, MEASURED
from flashtrain.training.forecast.memory import Memory, host_bytes, step_memory
from flashtrain.training.forecast.mesh import gradient_bytes, group_bytes, sequence_bytes, sum_bytes
from flashtrain.training.forecast.time import Time, step_time
from flashtrain.training.forecast.ways_out import SETTINGS, longest, ways_out

_SPARE = f" with {1 - SAFE:.0%} to spare"


@dataclass(frozen=True)
class Forecast:
    """What a run will cost.

    Attributes:
        case: what it is about.
        device_bytes: memory of the device.
        host_memory: of the machine, for each of its devices.
        memory, time: of a step; no time where the device's rates are not known.
    """

    case: Case
    device_bytes: float
    memory: Memory
    time: Time | None
    host_memory: float = float("inf")

    @classmethod
    def of(cls, case: Case, device_bytes: float, host_memory: float = float("inf")) -> Forecast:
        return cls(case, device_bytes, step_memory(case), step_time(case), host_memory)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.device_bytes

    @property
    def is_tight(self) -> bool:
        """It fits, with less to spare than the forecast may be off by."""
        return SAFE * self.device_bytes < self.memory.peak <= self.device_bytes

    @property
    def tokens_per_second(self) -> float | None:
        config = self.case.config
        return None if self.time is None else config.sequences_per_step * config.seq_len / self.time.step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs a second over the dense peak, as the meter counts them."""
        case = self.case
        if self.time is None or case.gpu is None:
            return None
        flops = model_flops(case.config.model, case.vocab_size, case.config.seq_len, case.pairs).training
        return case.config.sequences_per_step * flops / self.time.step / (case.devices * case.gpu.tflops * 1e12)

    def facts(self) -> dict[str, Any]:
        """What the summary says of it."""
        return {
            "forecast_peak_memory_gib": self.memory.peak / GIB,
            "forecast_tokens_per_second": self.tokens_per_second,
        }

    def short(self) -> Iterator[str]:
        """For the start of every run."""
        yield f"forecast: {self._memory()}{self._time()}"
        if self.case.gpu is not None:
            here = longest(self.case, SAFE * self.device_bytes)
            yield f"forecast: with these settings one sequence of {format_size(here)} tokens would fit{_SPARE}"
            if self.is_tight:
                yield "forecast: this run has less to spare and may run out of memory; plan.only=true names ways out"

    def lines(self) -> Iterator[str]:
        """All of it."""
        case, config = self.case, self.case.config
        name = "this machine" if case.gpu is None else case.gpu.name
        millions = sum(count_parameters(case).values()) / 1e6
        yield f"forecast for {config.model.name} ({millions:.1f}M parameters) on {name}, {self._settings()}"
        yield (
            f"  a step: {config.sequences_per_step} x {format_size(config.seq_len)} tokens in {case.micro_batches} "
            f"micro-batch{'es' if case.micro_batches > 1 else ''}"
        )
        if case.devices > 1:
            yield from self._mesh_lines()
        moment = max(self.memory.moments, key=lambda key: self.memory.moments[key])
        yield f"  held when most is, which is at the {moment}:"
        for part, size in self.memory.parts.items():
            yield f"  {part:<12}{size / GIB:9.2f} GiB"
        verdict = "fits" if self.fits else "does not fit"
        verdict += ", with so little to spare that it may run out" if self.is_tight else ""
        yield f"  {'peak':<12}{self.memory.peak / GIB:9.2f} GiB of {self.device_bytes / GIB:.1f}: {verdict}"
        if host_bytes(case):
            yield f"  {'host':<12}{host_bytes(case) / GIB:9.2f} GiB of pinned memory"
        yield from self._time_lines()
        yield from self._longest_lines()
        yield from self.advice()

    def _mesh_lines(self) -> Iterator[str]:
        """What several devices share; all other figures are those of one of them."""
        case, trainer = self.case, self.case.config.trainer
        shared = f", {case.context} of them share each sequence ({trainer.context_method})" if case.context > 1 else ""
        groups = f" in {case.replicas} groups of {case.shards}" if min(case.replicas, case.shards) > 1 else ""
        yield f"  {case.devices} devices, {trainer.strategy}{groups}{shared}; of each one:"
        sent = {
            "of weights and gradients": group_bytes(case) if groups else gradient_bytes(case),
            "of gradients between the groups": sum_bytes(case) if groups else 0.0,
            "of sequences": sequence_bytes(case) if case.context > 1 else 0.0,
        }
        told = ", ".join(f"{size / GIB:.2f} GiB {what}" for what, size in sent.items() if size)
        yield f"  {'sent':<12}{told}" + (f" a step, at {case.gpu.link_gb_per_s:g} GB/s" if case.gpu else " a step")

    def advice(self, resuming: bool = False) -> Iterator[str]:
        """What to change, where the run does not fit or hardly does; `resuming`: once it has begun."""
        if self.fits and not self.is_tight:
            return
        ways = ways_out(self.case, SAFE * self.device_bytes, self.host_memory, resuming=resuming)
        nothing = "  no change of settings makes it fit" + ("" if resuming else ": take a smaller model")
        yield "  ways out, the cheapest first:" if ways else nothing
        for way in ways:
            time = "" if way.seconds is None else f", {seconds(way.seconds)} a step"
            yield f"    {way.change}: {way.peak / GIB:.1f} GiB{time}"

    def _settings(self) -> str:
        case = self.case
        launched = "compiled" if case.compiled else "not compiled"
        return f"{case.precision}, {launched}, attention by {case.backend}, {describe(case.how)}"

    def _memory(self) -> str:
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in self.memory.parts.items() if size > 0.05 * GIB)
        return f"{self.memory.peak / GIB:.1f} of {self.device_bytes / GIB:.1f} GiB" + (f" ({parts})" if parts else "")

    def _time(self) -> str:
        if self.time is None:
            return ""
        return f", {seconds(self.time.step)} a step, {self.tokens_per_second:,.0f} tokens/s"

    def _time_lines(self) -> Iterator[str]:
        if self.time is None:
            known = "in 32-true" if self.case.gpu is not None else "for this device; plan.gpu names one that is"
            yield f"  time: not known {known}"
            return
        parts = ", ".join(f"{part} {seconds(value)}" for part, value in vars(self.time).items() if value > 1e-4)
        guess = "" if self.case.gpu and self.case.gpu.name == MEASURED else f" (a guess from the shares of {MEASURED})"
        yield f"  {'step':<12}{seconds(self.time.step)}: {parts}{guess}"
        steps = self.case.config.trainer.max_steps
        mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        whole = seconds(steps * self.time.step)
        yield f"  {'rate':<12}{self.tokens_per_second:,.0f} tokens/s{mfu}; {steps} steps take {whole}"

    def _longest_lines(self) -> Iterator[str]:
        case = self.case
        yield f"  longest seq_len that fits{_SPARE}, one sequence a step:"
        yield "    " + " " * 10 + "".join(f"{name:>12}" for name in SETTINGS)
        flash = case.backend if case.backend in ("hopper", "portable") else "portable"
        if case.gpu is not None and case.gpu.has_hopper_kernels and case.backend not in ("hopper", "portable"):
            flash = "hopper"
        for name, backend in (("standard", "standard"), ("sdpa", "sdpa"), ("flash", flash)):
            lengths = [
                longest(replace(case, backend=backend, how=how), SAFE * self.device_bytes) for how in SETTINGS.values()
            ]
            yield f"    {name:<10}" + "".join(f"{format_size(length) if length else '-':>12}" for length in lengths)


def stage_lines(stages: Sequence[Forecast]) -> Iterator[str]:
    """A line for each stage of a curriculum, and how long all take together."""
    yield "  the stages, with their most steps:"
    for number, found in enumerate(stages, 1):
        config = found.case.config
        tokens = f"{config.sequences_per_step} x {format_size(config.seq_len)} tokens"
        line = f"    {number}  {tokens:<18}{found.memory.peak / GIB:8.2f} GiB"
        if found.time is not None:
            steps, step = config.trainer.max_steps, found.time.step
            line += f"  {seconds(step):>9} a step  {steps:>8,} steps take {seconds(steps * step)}"
        yield line if found.fits else f"{line}: does not fit"
    times = [(found.case.config.trainer.max_steps, found.time.step) for found in stages if found.time is not None]
    if len(times) == len(stages):
        latest, soonest = sum(n * step for n, step in times), sum(n for n, _ in times) * times[-1][1]
        yield (
            f"  all take {seconds(latest)} if every gate opens last, {seconds(soonest)} if all open at once; "
            "validation, images and compiling come on top"
        )


def seconds(value: float) -> str:
    """A duration as people read it."""
    if value < 1:
        return f"{1000 * value:.1f} ms"
    if value < 600:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
