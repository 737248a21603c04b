"""Muon for the blocks' matrices, AdamW for the rest, as one optimiser."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from flashtrain.config.build import ConfigError
from flashtrain.training.muon import Muon, orthogonalised
from flashtrain.training.optimizers import build_optimizer, set_learning_rate, skip_if_not_finite
from flashtrain.training.run import run

from .conftest import figures, go_on, summary
from .test_steps import make_task


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)], ids=str)
def test_orthogonalised_matrices_have_singular_values_near_one_and_the_same_directions(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    result = orthogonalised(matrices)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.65 and values.max() < 1.25
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(result.flatten(1), (u @ v).flatten(1)).min() > 0.97
    assert torch.allclose(orthogonalised(matrices[1:2]), result[1:2], atol=1e-6)


def test_a_gradient_of_zeros_moves_nothing():
    assert torch.equal(orthogonalised(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


def one(matrix: torch.nn.Parameter, rows: list[int] | None = None, **changes: float) -> Muon:
    settings = {"matrix_lr": 0.02, "momentum": 0.9, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return Muon([(matrix, rows)], [], [], **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(32, 16), (16, 32)], ids=str)
def test_steps_agree_with_pytorchs_muon(shape):
    torch.manual_seed(1)
    ours = torch.nn.Parameter(torch.randn(*shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    mine = one(ours)
    other = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True, ns_steps=5)
    for _ in range(4):
        ours.grad = torch.randn(*shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    # PyTorch's takes its Newton-Schulz steps in bfloat16 everywhere.
    assert (ours - theirs).abs().max() < 4 * 0.02 * math.sqrt(2) * 0.05
    assert (ours - theirs).norm() < 0.03 * (4 * 0.02 * math.sqrt(16))


def test_the_parts_of_a_fused_projection_are_matrices_of_their_own():
    torch.manual_seed(2)
    fused = torch.nn.Parameter(torch.randn(16, 8))
    parts = [torch.nn.Parameter(part.clone()) for part in fused.detach().split([8, 4, 4])]
    fused.grad = torch.randn(16, 8)
    for part, grad in zip(parts, fused.grad.split([8, 4, 4]), strict=True):
        part.grad = grad.clone()
        one(part).step()
    one(fused, [8, 4, 4]).step()
    assert torch.allclose(fused, torch.cat(parts), atol=1e-7)


def test_every_matrix_of_the_blocks_and_nothing_else_goes_to_muon(make_config):
    task = make_task(make_config, "optimizer=muon", "model.num_kv_heads=1", "model.bias=true")
    optimizer = build_optimizer(task.model, task.config.optimizer)
    kind = {id(p): group["kind"] for group in optimizer.param_groups for p in group["params"]}
    assert len(kind) == len(list(task.model.parameters()))
    for name, p in task.model.named_parameters():
        assert kind[id(p)] == ("muon" if name.startswith("blocks.") and p.dim() == 2 else "adamw"), name
    rows = dict(zip(map(id, optimizer.param_groups[0]["params"]), optimizer.param_groups[0]["rows"], strict=True))
    assert rows[id(task.model.blocks[0].attention.qkv.weight)] == [32, 16, 16]


def test_a_step_that_is_not_finite_changes_nothing(make_config):
    task = make_task(make_config, "optimizer=muon", dtype=torch.float32)
    optimizer = build_optimizer(task.model, task.config.optimizer)
    for p in task.model.parameters():
        p.grad = torch.randn_like(p)
    skip_if_not_finite(optimizer, torch.tensor(True))
    optimizer.step()
    before = copy.deepcopy([*task.model.state_dict().values(), optimizer.state_dict()["state"]])
    skip_if_not_finite(optimizer, torch.tensor(False))
    for p in task.model.parameters():
        p.grad.fill_(math.nan)
    optimizer.step()
    after = [*task.model.state_dict().values(), optimizer.state_dict()["state"]]
    assert all(torch.equal(a, b) for a, b in zip(before[:-1], after[:-1], strict=True))
    for key, state in before[-1].items():
        assert all(torch.equal(value, after[-1][key][name]) for name, value in state.items())


def test_a_run_with_muon_learns_and_resumes_bit_for_bit(make_config, tmp_path):
    changes = ("optimizer=muon", "model.dropout=0.1", "trainer.val_every_n_steps=12")
    assert run(make_config(*changes, "run_id=straight"), []) == 0
    assert run(make_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = (figures(tmp_path / "runs" / name) for name in ("straight", "cut"))
    assert cut[1:] == straight[1:]
    assert summary(tmp_path / "runs" / "straight")["val_loss"] < float(straight[0][2]) - 0.5


def test_rates_follow_the_configuration_and_not_what_a_checkpoint_held(make_config):
    task = make_task(make_config, "optimizer=muon")
    stored = build_optimizer(task.model, task.config.optimizer).state_dict()
    config = make_config("optimizer=muon", "optimizer.lr=0.5", "optimizer.matrix_lr=0.25").optimizer
    optimizer = build_optimizer(task.model, config)
    optimizer.load_state_dict(stored)
    set_learning_rate(optimizer, config, lambda peak: peak / 5)
    rates = {group["kind"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"muon": 0.05, "adamw": 0.1}


def test_muon_without_a_rate_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"optimizer\.matrix_lr=None: muon needs a rate"):
        make_config("optimizer=muon", "optimizer.matrix_lr=null")
