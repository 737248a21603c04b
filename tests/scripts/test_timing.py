"""How passes of attention are timed."""

import time

import torch
from measuring.timing import BURST, HELD_MS, SHORT_MS, Stopwatch, host_microseconds, time_round


class Watch(Stopwatch):
    """Writes down what is held back and when something is timed."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.seen: list[str] = []

    def mark(self):
        self.seen.append("mark")
        return super().mark()

    def hold(self, ms: float) -> None:
        self.seen.append(f"hold {ms:g}")


class Nothing:
    def forward(self) -> None:
        pass

    def backward(self, out: None) -> None:
        pass


def test_short_calls_stand_in_the_queue_before_the_device_may_begin() -> None:
    watch, call_ms = Watch(), 0.5
    timed = time_round(Nothing(), watch, (BURST + 2) * call_ms / 1000 + 1e-9, call_ms)
    assert len(timed["both"]) == BURST + 2
    calls = [["mark"] * 3 * count for count in (BURST, 2)]
    assert watch.seen == [f"hold {call_ms * BURST:g}", *calls[0], f"hold {call_ms * 2:g}", *calls[1]]


def test_long_calls_are_not_held() -> None:
    watch = Watch()
    time_round(Nothing(), watch, 0.1, SHORT_MS)
    assert set(watch.seen) == {"mark"}


def test_the_host_is_timed_while_the_device_is_held_and_not_at_its_first_call() -> None:
    class Slow(Nothing):
        calls = 0

        def forward(self) -> None:
            self.calls += 1
            if self.calls % (BURST + 1) == 1:  # the first of each row
                time.sleep(0.05)

    watch, case = Watch(), Slow()
    found = host_microseconds(case, watch, call_ms=5.0)
    assert watch.seen == [f"hold {HELD_MS:g}"] * 2
    assert case.calls == 2 * (BURST + 1)
    assert found["forward"] < 10_000
    assert host_microseconds(Slow(), Watch(), call_ms=1000.0)["forward"] < 10_000  # three calls, and one before
