"""How long a sequence may be, and what to change where a run does not fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashtrain.config import format_size
from flashtrain.models.recompute import Recompute
from flashtrain.training.forecast.case import Case, backend_on
from flashtrain.training.forecast.choose import CHUNK, SAFE, choose, describe, every_setting, fastest_of
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
_DEVICES = (2, 4, 8)
LENGTH = 3  # the rank of shorter sequences


def longest(case: Case, device_bytes: float, at: Callable[[Case, int], Case] = Case.at_length) -> int:
    """The longest sequence that fits, a multiple of 1k, 0 where none does; `at`: the case at a length, one a step."""

    def fits(length: int) -> bool:
        return step_memory(at(case, length * _STEP)).peak <= device_bytes

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
    rank: int  # 0: the same training; 1: other numbers; 2: another machine; 3 (LENGTH): another length

    @property
    def key(self) -> str:
        """What is changed first."""
        return self.change.split("=")[0]


@dataclass(frozen=True)
class _Change:
    """What to write, and the run that it makes, with the bytes that may be planned with there."""

    words: str
    rank: int
    case: Case
    device_bytes: float
    host_memory: float

    def as_it_is(self) -> WayOut | None:
        """None where it does not fit."""
        if fastest_of([self.case], self.device_bytes, self.host_memory) is None:
            return None
        time = step_time(self.case)
        return WayOut(self.words, step_memory(self.case).peak, None if time is None else time.step, self.rank)

    def alone(self) -> WayOut | None:
        """With the memory settings that the run has, or chooses where they are left open."""
        how = choose(self.case, self.device_bytes, self.host_memory)
        return replace(self, case=replace(self.case, how=how)).as_it_is()

    def with_memory(self) -> WayOut | None:
        """And with the fastest of all memory settings with which it fits."""
        cases = [replace(self.case, how=how) for how in every_setting()]
        case = fastest_of(cases, self.device_bytes, self.host_memory)
        return None if case is None else replace(self, words=f"{self.words} {describe(case.how)}", case=case).as_it_is()


def ways_out(
    case: Case, device_bytes: float, host_memory: float = float("inf"), most: int = 3, resuming: bool = False
) -> list[WayOut]:
    """The cheapest changes with which the run fits: those that train the same first, then by time.

    Of each kind the cheapest alone, of lengths the longest, unless there are fewer kinds. Where no memory setting is
    enough, nor a change of another kind, they are told together.

    Args:
        device_bytes, host_memory: that may be planned with, as in `choose`.
        resuming: only what a run that has begun can go on with.
    """
    here = functools.partial(_Change, device_bytes=device_bytes, host_memory=host_memory)
    found = [here(describe(how), 0, replace(case, how=how)).as_it_is() for how in every_setting() if how != case.how]
    enough = any(found)
    for kind in _kinds(case, here, host_memory):
        alone = (change.alone() for change in kind)
        together = (change.with_memory() for change in kind if not enough)
        found.append(next((way for way in itertools.chain(alone, together) if way is not None), None))
    if resuming:
        found = [way for way in found if way is not None and way.key != "model.positions"]
    else:
        found += _shorter(case, here)
    ways = list({way.change: way for way in found if way is not None}.values())
    ways.sort(key=lambda way: (way.rank, way.seconds or 0.0 if way.rank < LENGTH else 0.0))
    first = {way.key: way for way in reversed(ways)}
    ways.sort(key=lambda way: first[way.key] is not way)
    return sorted(ways[:most], key=lambda way: way.rank)


def _kinds(case: Case, here: Callable[..., _Change], host_memory: float) -> Iterator[Sequence[_Change]]:
    """Changes other than of memory settings and length: of each kind those that cost least first."""
    config, trainer = case.config, case.config.trainer
    if case.backend == "standard":
        flash = replace(config, attention=replace(config.attention, backend="auto"))
        backend = "sdpa" if case.gpu is None else backend_on(case.gpu, flash, case.precision)
        yield [here("attention.backend=auto", 0, replace(case, config=flash, backend=backend))]
    halves = [config.sequences_per_micro_batch // 2**n * config.seq_len // case.context for n in range(1, 24)]
    yield [
        here(f"trainer.micro_batch_tokens={format_size(tokens)}", 0, _with_trainer(case, micro_batch_tokens=tokens))
        for tokens in halves
        if tokens
    ]
    if config.optimizer.name == "adamw" and config.optimizer.state == "float32":
        half = replace(config, optimizer=replace(config.optimizer, state="bfloat16"))
        yield [here("optimizer.state=bfloat16", 1, replace(case, config=half))]
    if config.model.positions == "learned" and config.task == "language":
        turned = replace(config, model=replace(config.model, positions="rope"))
        yield [here("model.positions=rope", 1, replace(case, config=turned))]
    if case.gpu is not None:
        gpus = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
        larger = [gpu for gpu in gpus if gpu.memory_bytes > case.gpu.memory_bytes]
        if config.attention.backend == "hopper":
            larger = [gpu for gpu in larger if gpu.has_hopper_kernels]
        yield [
            here(
                f"a GPU with more memory ({gpu.name}: {gpu.memory_bytes / 2**30:.0f} GiB)", 2,
                replace(case, gpu=gpu, backend=backend_on(gpu, config, case.precision)),
                device_bytes=SAFE * gpu.memory_bytes,
            )
            for gpu in larger
        ]  # fmt: skip
    if config.task == "language" and config.optimizer.name == "adamw":
        yield [
            here(
                f"trainer.devices={n} trainer.context={n} trainer.strategy=fsdp", 2,
                _with_trainer(case, devices=n, context=n, strategy="fsdp", context_method="ring", shard=None),
                host_memory=host_memory * trainer.devices / n,
            )
            for n in (_DEVICES if trainer.devices == 1 else (trainer.devices,))
            if n > trainer.context and config.seq_len % (2 * n) == 0
        ]  # fmt: skip


def _shorter(case: Case, here: Callable[..., _Change]) -> Iterator[WayOut | None]:
    """Shorter sequences, the longest first: with the memory settings as they are, and with those that save most."""
    if case.config.task != "language":
        return
    bytes_here, most = here("", LENGTH, case), 2 * case.context
    own = choose(case, bytes_here.device_bytes, bytes_here.host_memory)
    lengths: dict[int, Recompute] = {}
    for how in (own, SETTINGS["offload"]):
        length = longest(replace(case, how=how), bytes_here.device_bytes, _one_at_once) // most * most
        lengths.setdefault(length, how)
    for length, how in sorted(lengths.items(), reverse=True):
        if 0 < length < case.config.seq_len:
            shorter = replace(_one_at_once(case, length), how=how)
            words = f"seq_len={format_size(length)}"
            for key in ("micro_batch_tokens", "batch_tokens"):
                value = getattr(shorter.config.trainer, key)
                if value != getattr(case.config.trainer, key):
                    words += f" trainer.{key}={format_size(value)}"
            yield here(words + ("" if how == own else f" {describe(how)}"), LENGTH, shorter).as_it_is()


def _one_at_once(case: Case, length: int) -> Case:
    """The run with shorter sequences, of which one goes through the model at once."""
    config, shares = replace(case.config, seq_len=length), case.config.data_shares
    case = replace(case, config=config, pairs=case.pairs * (length / case.config.seq_len) ** 2)
    if config.sequences_per_micro_batch > 1:
        case = _with_trainer(case, micro_batch_tokens=length // case.context)
    if config.sequences_per_step % shares:
        case = _with_trainer(case, batch_tokens=-(-config.sequences_per_step // shares) * shares * length)
    return case


def _with_trainer(case: Case, **changes: Any) -> Case:
    trainer = replace(case.config.trainer, **changes)
    return replace(case, config=replace(case.config, trainer=trainer))
