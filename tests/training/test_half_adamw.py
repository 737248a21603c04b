"""AdamW with bfloat16 moments: trains as with float32 ones, in half of their memory, and resumes to the same bits."""

from __future__ import annotations

import math

import pytest
import torch

from flashtrain.config import ConfigError
from flashtrain.training.half_adamw import HalfAdamW
from flashtrain.training.optimizers import skip_if_not_finite
from flashtrain.training.run import run

from .conftest import figures, go_on, metrics

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def steps(optimizer_class: type, count: int, **settings) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    optimizer = optimizer_class([{"params": [weight], "weight_decay": 0.1}], **(SETTINGS | settings))
    target = torch.randn(64, 64)
    for _ in range(count):
        optimizer.zero_grad()
        (weight - target).square().mean().backward()
        optimizer.step()
    return weight.detach(), optimizer


@pytest.mark.parametrize("count", [1, 100])
def test_its_steps_are_those_of_adamw_up_to_the_rounding_of_moments(count):
    half, whole = steps(HalfAdamW, count)[0], steps(torch.optim.AdamW, count)[0]
    moved = (whole - steps(torch.optim.AdamW, 0)[0]).abs().mean()
    assert (half - whole).abs().mean() < (1e-5 if count == 1 else 0.02) * moved


def test_its_moments_take_two_bytes_a_number():
    _, optimizer = steps(HalfAdamW, 1)
    (state,) = optimizer.state.values()
    assert {name: value.dtype for name, value in state.items() if name != "step"} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_a_step_that_is_not_finite_changes_nothing():
    weight, optimizer = steps(HalfAdamW, 3)
    before = [value.clone() for value in (weight, *next(iter(optimizer.state.values())).values())]
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad.fill_(math.nan)
    skip_if_not_finite(optimizer, torch.tensor(False))
    optimizer.step()
    after = (parameter.detach(), *optimizer.state[parameter].values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_run_with_it_learns_and_resumes_to_the_same_bits(make_config, tmp_path):
    changes = ("optimizer.state=bfloat16", "trainer.sample_tokens=0")
    assert run(make_config(*changes, "run_id=straight"), []) == 0
    assert run(make_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = figures(tmp_path / "runs" / "straight"), figures(tmp_path / "runs" / "cut")
    assert cut[1:] == straight[1:]
    losses = [float(row["train_loss"]) for row in metrics(tmp_path / "runs" / "straight")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [("optimizer=muon", "is for adamw"), ("optimizer.betas=[0.9,0.999]", "8 bits cannot follow so slow a mean")],
)
def test_what_it_cannot_do_is_told_before_the_run(make_config, change, told):
    with pytest.raises(ConfigError, match=told):
        make_config("optimizer.state=bfloat16", change)
