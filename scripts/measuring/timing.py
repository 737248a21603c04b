"""Time on the device's own clock, the host's share of it, and peak memory."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from measuring.attention import PASSES, Case

Mark = torch.cuda.Event | float

# Calls shorter than this may take the device less time than the host, and go into its queue BURST at a time.
SHORT_MS = 3.0
BURST = 10
HELD_MS = 20.0  # in which the host makes BURST calls
CYCLES_A_MS = 2_000_000  # of a GPU at most, so that a wait is rather too long


class Stopwatch:
    """Marks in the device's queue, and the milliseconds between them. On the CPU a mark is the time of day."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def hold(self, ms: float) -> None:
        """Keep the device from what is queued after this for so long, while the host goes ahead."""
        if self.device.type == "cuda":
            torch.cuda._sleep(int(ms * CYCLES_A_MS))

    @staticmethod
    def ms(start: Mark, end: Mark) -> float:
        """Call `wait` before."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return 1000 * (end - start)
        return start.elapsed_time(end)


def spread(values: list[float]) -> dict[str, float]:
    """Median with minimum and quartiles."""
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    low, median, high = ordered.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"median": median, "min": ordered[0].item(), "p25": low, "p75": high, "repeats": len(values)}


@dataclass
class Times:
    """Milliseconds of each call, by pass, and the median of both passes in each round."""

    by_pass: dict[str, list[float]]
    rounds: list[float]

    @classmethod
    def none(cls) -> Times:
        return cls({name: [] for name in PASSES}, [])

    def add(self, other: dict[str, list[float]]) -> None:
        for name, values in other.items():
            self.by_pass[name] += values
        self.rounds.append(spread(other["both"])["median"])

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: spread(values) for name, values in self.by_pass.items()}


def warm_up(case: Case, watch: Stopwatch) -> float:
    """Compile and load everything; milliseconds of a call afterwards."""
    for _ in range(2):
        case.forward_backward()
    watch.wait()
    start = time.perf_counter()
    case.forward_backward()
    watch.wait()
    return 1000 * (time.perf_counter() - start)


def time_round(case: Case, watch: Stopwatch, seconds: float, call_ms: float) -> dict[str, list[float]]:
    """Milliseconds of forward, backward and both, for as many calls as fit into `seconds` (3 to 400).

    Each call is a whole training step of attention: the backward pass follows its forward pass in the queue, with no
    synchronisation between, as in training. Calls that are not timed go ahead, so that the queue is never empty; before
    short ones it is held until several stand in it, so that the time is the device's whatever the host needs.
    """
    calls = min(400, max(3, int(1000 * seconds / max(call_ms, 1e-3))))
    if watch.device.type == "cuda":
        for _ in range(2 if call_ms < 20 else 1):
            case.forward_backward()
    marks = []
    for number in range(calls):
        if call_ms < SHORT_MS and number % BURST == 0:
            watch.hold(call_ms * min(BURST, calls - number))
        start = watch.mark()
        out = case.forward()
        middle = watch.mark()
        case.backward(out)
        del out
        marks.append((start, middle, watch.mark()))
    watch.wait()
    return {
        "forward": [watch.ms(start, middle) for start, middle, _ in marks],
        "backward": [watch.ms(middle, end) for _, middle, end in marks],
        "both": [watch.ms(start, end) for start, _, end in marks],
    }


def take_turns(
    cases: dict[str, Case], watch: Stopwatch, rounds: int, seconds: float, call_ms: dict[str, float]
) -> dict[str, Times]:
    """Time cases round after round, every other one backwards, so that a drifting clock meets all of them.

    Args:
        seconds: timed seconds of each case, over all rounds.
        call_ms: milliseconds of a call of each, from `warm_up`.
    """
    times = {name: Times.none() for name in cases}
    for turn in range(rounds):
        for name in list(cases)[:: 1 if turn % 2 == 0 else -1]:
            with cases[name].implementation.context():
                times[name].add(time_round(cases[name], watch, seconds / rounds, call_ms[name]))
    return times


def host_microseconds(case: Case, watch: Stopwatch, call_ms: float) -> dict[str, float]:
    """Microseconds that a call keeps the host while the device's queue is held, so that it waits for nothing: what
    launching costs. The first call of a row finds the host asleep and does not count."""
    forward, backward = [], []
    count = min(30, max(3, int(100 / max(call_ms, 1e-3))))
    for first in range(0, count, BURST):
        watch.wait()
        watch.hold(HELD_MS)
        for number in range(min(BURST, count - first) + 1):
            start = time.perf_counter()
            out = case.forward()
            middle = time.perf_counter()
            case.backward(out)
            end = time.perf_counter()
            if number > 0:
                forward.append(1e6 * (middle - start))
                backward.append(1e6 * (end - middle))
    watch.wait()
    return {"forward": spread(forward)["median"], "backward": spread(backward)["median"]}


def one_call(case: Case, watch: Stopwatch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One forward and backward pass: its milliseconds and its peak memory in GiB, and the results it gave.

    `peak_gib` is all that is allocated at the peak, `above_inputs_gib` what came on top of q, k, v and dout.
    """
    gc.collect()
    cuda = watch.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(watch.device)
    before = torch.cuda.memory_allocated(watch.device) if cuda else 0
    watch.wait()
    start = watch.mark()
    out = case.forward()
    middle = watch.mark()
    gradients = case.backward(out)
    end = watch.mark()
    watch.wait()
    figures = {"forward_ms": watch.ms(start, middle), "backward_ms": watch.ms(middle, end)}
    if cuda:
        peak = torch.cuda.max_memory_allocated(watch.device)
        figures |= {"peak_gib": peak / 2**30, "above_inputs_gib": (peak - before) / 2**30}
    return figures, case.named(out, *gradients)
