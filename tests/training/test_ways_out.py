"""What is said where a run does not fit: every way out is one, as it is written on the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain.config import build
from flashtrain.config.resume import _MAY_CHANGE
from flashtrain.models.recompute import Recompute
from flashtrain.training import memory
from flashtrain.training.forecast import GPUS, SAFE, Forecast
from flashtrain.training.forecast.memory import host_bytes, step_memory
from flashtrain.training.forecast.ways_out import longest, ways_out

from .test_forecast import case_of, raw_of

TIGHT = {
    "kept whole": ("model=gpt2_rope", "seq_len=1M", "memory=none"),
    "auto": ("model=gpt2", "seq_len=1M"),
    "all offloaded": ("model=modern", "seq_len=1M", "memory=offload"),
    "standard attention": ("model=gpt2", "seq_len=16k", "attention=standard", "memory=selective"),
    "a large model": ("model=gpt2_xl", "seq_len=16k", "memory=none"),
    "many sequences at once": (
        "model=gpt2", "seq_len=1k", "memory=none", "trainer.batch_tokens=1M", "trainer.micro_batch_tokens=1M",
    ),
    "eight devices": ("model=gpt2_rope", "seq_len=1M", "memory=none", "trainer.devices=8", "trainer.batch_tokens=8M"),
    "eight that divide it": (
        "model=gpt2_rope", "seq_len=1M", "trainer=fsdp", "trainer.devices=8", "trainer.batch_tokens=8M",
    ),
    "eight that share a sequence": (
        "model=gpt2_rope", "seq_len=1M", "memory=none", "trainer=context_parallel", "trainer.devices=8",
    ),
}  # fmt: skip


def plan_of(*overrides: str, monkeypatch: pytest.MonkeyPatch) -> Forecast:
    """Of a causal model, without lowering a mask of a million tokens."""
    monkeypatch.setattr(memory, "_pairs", lambda config: config.seq_len * (config.seq_len + 1) / 2)
    return memory.plan(build(raw_of(*overrides)))


@pytest.mark.parametrize("name", TIGHT)
def test_every_way_out_is_one_when_it_is_written_on_the_command_line(name, monkeypatch):
    overrides = (*TIGHT[name], "plan.gpu=rtx4090")
    found = plan_of(*overrides, monkeypatch=monkeypatch)
    assert not found.fits
    ways = ways_out(found.case, SAFE * found.device_bytes)
    assert len(ways) == len({way.change for way in ways}) == 3
    assert [way.rank for way in ways] == sorted(way.rank for way in ways)  # what trains the same comes first
    for way in ways:
        words = way.change
        if words.startswith("a GPU"):
            gpu, _, rest = words.removeprefix("a GPU with more memory (").partition(":")
            words = f"plan.gpu={gpu} {rest.partition(')')[2]}"
        then = plan_of(*overrides, *words.split(), monkeypatch=monkeypatch)
        assert not then.is_tight and then.fits, way
        # Where auto may choose, it takes the one that is fastest at the length.
        assert then.memory.peak == pytest.approx(way.peak, rel=0.03), way


def test_shorter_sequences_are_as_long_as_can_be():
    case = case_of("model=gpt2_rope", "seq_len=1M", "memory=none", gpu=GPUS["rtx4090"])
    limit = SAFE * GPUS["rtx4090"].memory_bytes
    told = next(way.change for way in ways_out(case, limit) if way.change.startswith("seq_len="))
    assert (
        told == f"seq_len={longest(replace(case, how=Recompute('full', True, 16384)), limit) // 1024}k memory=offload"
    )


def test_a_host_without_room_gets_nothing_to_hold():
    case = case_of("model=gpt2_rope", "seq_len=1M", "memory=none", gpu=GPUS["a100-80gb"])
    limit = SAFE * GPUS["a100-80gb"].memory_bytes
    needed = host_bytes(replace(case, how=Recompute("selective", True)))
    assert any("offload" in way.change for way in ways_out(case, limit, 2 * needed))
    assert not any("offload" in way.change for way in ways_out(case, limit, needed))


@pytest.mark.parametrize("name", TIGHT)
def test_a_run_that_has_begun_is_told_what_it_can_go_on_with(name):
    case = case_of(*TIGHT[name], gpu=GPUS["rtx4090"])
    ways = ways_out(case, SAFE * GPUS["rtx4090"].memory_bytes, resuming=True)
    words = [word for way in ways if not way.change.startswith("a GPU") for word in way.change.split()]
    assert ways and all(f"{word.split('=')[0]}.".startswith(_MAY_CHANGE) for word in words)


def test_a_run_with_little_to_spare_is_told_so_wherever_it_reads():
    case = case_of("model=gpt2_rope", "seq_len=64k", gpu=None)
    for share, tight in ((0.95, True), (0.9, False)):
        found = Forecast.of(replace(case, gpu=GPUS["h200"]), step_memory(case).peak / share)
        said = "\n".join((*found.lines(), *found.short()))
        assert found.fits
        assert (longest(case, SAFE * found.device_bytes) < case.config.seq_len) == tight
        assert ("so little to spare" in said) == ("ways out" in said) == ("may run out of memory" in said) == tight


def test_a_plan_takes_the_kernels_that_the_run_would(monkeypatch):
    wide = ("model=gpt2_rope", "model.num_heads=8", "seq_len=16k")  # of 96 numbers each
    assert plan_of(*wide, "plan.gpu=h200", monkeypatch=monkeypatch).case.backend == "hopper"
    assert plan_of(*wide, "plan.gpu=b200", monkeypatch=monkeypatch).case.backend == "portable"
    with pytest.raises(ValueError, match=r"attention\.backend=hopper: rtx4090 .* write attention\.backend=auto"):
        plan_of(*wide, "plan.gpu=rtx4090", "attention.backend=hopper", monkeypatch=monkeypatch)


def test_processes_of_a_machine_share_its_memory(make_config, monkeypatch):
    config, device = make_config(), torch.device("cpu")
    alone = memory.forecast_of(config, 256, "32-true", device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory.forecast_of(config, 256, "32-true", device).host_memory == alone.host_memory / 8


class OneOfTwo:
    """The second process, whose machine has more memory than the first one's, with `first` bytes."""

    def __init__(self, first):
        self.first, self.chosen = first, Recompute("full")

    def most(self, *numbers):
        return [max(number, -self.first) for number in numbers]

    def same(self, value):
        return self.chosen


def test_processes_of_unequal_machines_compute_again_the_same(make_config, monkeypatch):
    config, device = make_config(), torch.device("cpu")
    own = memory.forecast(config, 256, "32-true", device, 100.0)
    assert own.case.how != Recompute("full")
    other = OneOfTwo(own.device_bytes / 2)
    found = memory.forecast(config, 256, "32-true", device, 100.0, other)
    assert found.device_bytes == other.first
    assert found.case.how == other.chosen
