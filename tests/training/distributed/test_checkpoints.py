"""Checkpoints in parts: what one process of several writes, all that reads checkpoints reads, and no part is missed."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtrain.config import Config, build
from flashtrain.config.resume import resumed
from flashtrain.interchange.loading import read
from flashtrain.interchange.shards import with_each_tensor
from flashtrain.training.checkpoints import existing, load, newest
from flashtrain.training.distributed.replicas import Replicas, own_part
from flashtrain.training.run import run

from ..conftest import figures, go_on, stopped_at, summary
from .conftest import check_equal, train

STEPS = ["trainer.max_steps=6", "trainer.checkpoint_every_n_steps=3", "trainer.val_every_n_steps=3"]
STEPS += ["optimizer.ema_decay=0.9", "model.dropout=0.1", "trainer=fsdp", "trainer.sample_tokens=0"]
PARTS = "trainer.checkpoint_format=sharded"


@pytest.fixture
def parts(make_config, ranks, tmp_path) -> Path:
    """The folder of a run of two processes, each with its parts of two checkpoints."""
    config = make_config(*STEPS, "trainer.devices=2", PARTS, "run_id=parts")
    assert ranks(2).call(train, config, []) == [0, 0]
    return tmp_path / "runs" / "parts"


def copy_until(folder: Path, step: int, name: str) -> Path:
    """A copy of a run that was stopped after that step."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    for path in existing(copy / "checkpoints"):
        if int(path.stem.split("-")[1]) > step:
            shutil.rmtree(path)
    return copy


def go_on_with(ranks: Callable, folder: Path, size: int, **trainer: Any) -> None:
    """Resume a run with so many processes, and other keys of the trainer."""
    composed = {"runs_dir": str(folder.parent), "resume": folder.name, "trainer": {"devices": size, **trainer}}
    raw, told = resumed(composed, [f"trainer.{key}=" for key in composed["trainer"]])
    assert ranks(size).call(train, build(raw), told) == [0] * size


def leaves(tree: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with_each_tensor(tree, lambda place, tensor: found.setdefault(place, tensor))
    return found


def test_a_checkpoint_in_parts_is_the_single_file_bit_for_bit(make_config, ranks, parts, tmp_path, float64):
    config = make_config(*STEPS, "trainer.devices=2", "run_id=file")
    assert ranks(2).call(train, config, []) == [0, 0]
    whole, divided = (existing(tmp_path / "runs" / name / "checkpoints") for name in ("file", "parts"))
    assert [path.name for path in whole] == [path.name for path in divided]
    assert all(path.is_file() for path in whole) and all(path.is_dir() for path in divided)
    written = [path.stat().st_size for path in divided[-1].glob("*.distcp")]
    assert len(written) == 2 and max(written) < 0.7 * whole[-1].stat().st_size  # neither process wrote all of it
    expected, found = load(whole[-1]), load(divided[-1])
    differing = {"trainer", "run_id"}
    for content in (expected, found):
        for key in differing:
            content["flashtrain"]["config"].pop(key)
    one, other = leaves(expected), leaves(found)
    assert one.keys() == other.keys() and any("exp_avg_sq" in place for place in one)
    assert all(torch.equal(tensor, other[place]) for place, tensor in one.items())
    assert expected["flashtrain"] == found["flashtrain"]


def test_from_parts_as_many_processes_go_on_bit_for_bit(ranks, parts):
    cut = copy_until(parts, 3, "cut")
    go_on_with(ranks, cut, 2)
    assert figures(cut) == figures(parts)
    expected, found = (leaves(newest(folder / "checkpoints")[1]) for folder in (parts, cut))
    assert all(torch.equal(tensor, found[place]) for place, tensor in expected.items())


def test_from_parts_any_number_of_processes_and_any_strategy_go_on_and_from_a_file_to_parts(
    ranks, parts, tmp_path, float64
):
    def check(name: str) -> None:
        check_equal(parts, tmp_path / "runs" / name, 6)

    go_on_with(ranks, copy_until(parts, 3, "groups"), 4, shard=2)
    check("groups")
    go_on_with(ranks, copy_until(parts, 3, "ddp"), 2, strategy="ddp")
    check("ddp")
    one = copy_until(parts, 3, "one")
    assert (
        go_on(tmp_path, "one", "trainer.devices=1", "trainer.checkpoint_every_n_steps=1", "trainer.keep_checkpoints=9")
        == 0
    )
    check("one")
    assert [path.is_dir() for path in existing(one / "checkpoints")] == [True, False, False, False]
    (one / "checkpoints" / "step-00000006.ckpt").unlink()
    go_on_with(ranks, one, 2)
    check("one")
    assert existing(one / "checkpoints")[-1].is_dir()


def train_and_count(rank: int, size: int, config: Config, told: list[str]) -> tuple[int, int]:
    """As `train`; and how many numbers of the divided weights lie here."""
    held = []
    honest = Replicas.shard

    def counting(self: Replicas, model: torch.nn.Module, blocks: Any, device: torch.device) -> None:
        honest(self, model, blocks, device)
        held.append(sum(own_part(parameter).numel() for parameter in model.parameters()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replicas, "shard", counting)
        return train(rank, size, config, told), held[0]


def test_groups_hold_the_model_each_and_write_it_once(make_config, ranks, tmp_path):
    config = make_config(*STEPS, "trainer.devices=4", "trainer.shard=2", PARTS, "run_id=groups", "trainer.max_steps=3")
    results = ranks(4).call(train_and_count, config, [])
    folder = tmp_path / "runs" / "groups" / "checkpoints" / "step-00000003.ckpt"
    numbers = {place: tensor.numel() for place, tensor in leaves(load(folder)).items()}
    whole = sum(count for place, count in numbers.items() if place.startswith("state_dict"))
    held = [count for code, count in results if code == 0]
    assert held[0] + held[1] == held[2] + held[3] == whole
    assert max(held) < 0.6 * whole
    # Numbers are float64 here; those that two processes hold are written by one of them.
    written = [path.stat().st_size for path in folder.glob("*.distcp")]
    divided = sum(count for place, count in numbers.items() if count > 1)
    assert 8 * divided <= sum(written) < 1.6 * 8 * divided
    assert len(written) == 4


def test_all_that_reads_checkpoints_reads_parts(make_config, parts, tmp_path, float64):
    path, content = newest(parts / "checkpoints")
    weights = {name: tensor.float() for name, tensor in content["average"].items()}
    for given in (parts, path):
        model = read(given).model
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights[name])
        warm = make_config("trainer.max_steps=1", f"model.init_from={given}", f"run_id=from-{given.name}")
        assert run(warm, []) == 0


def test_old_checkpoints_in_parts_go_and_what_a_killed_run_left_goes_too(make_config, ranks, tmp_path):
    folder = tmp_path / "runs" / "few" / "checkpoints"
    config = make_config(*STEPS, "trainer.devices=2", PARTS, "trainer.keep_checkpoints=1", "run_id=few")
    assert ranks(2).call(train, config, []) == [0, 0]
    assert [path.name for path in folder.iterdir()] == ["step-00000006.ckpt"]
    shutil.copytree(folder / "step-00000006.ckpt", folder / "step-00000007.partial")
    (folder / "step-00000003.removed").mkdir()
    assert newest(folder)[0].name == "step-00000006.ckpt"
    go_on_with(ranks, folder.parent, 2, max_steps=7)
    assert [path.name for path in folder.iterdir()] == ["step-00000007.ckpt"]
    assert summary(folder.parent)["steps"] == 7


def train_until_asked_at_the_end(rank: int, size: int, config: Config, told: list[str]) -> int:
    """As `train`, with SIGTERM in the last step of one process: its validation is owed."""
    with pytest.MonkeyPatch.context() as patch, stopped_at(config.trainer.max_steps, patch) if rank else nullcontext():
        return train(rank, size, config, told)


def test_a_checkpoint_in_parts_gives_way_to_another_of_its_step(make_config, ranks, tmp_path):
    config = make_config(*STEPS, "trainer.devices=2", PARTS, "run_id=owed")
    assert ranks(2).call(train_until_asked_at_the_end, config, []) == [143, 143]
    folder = tmp_path / "runs" / "owed" / "checkpoints"
    assert newest(folder)[1]["flashtrain"]["owes_validation"]
    copies = [copy_until(folder.parent, 6, name) for name in ("parts", "file")]
    for copy, kind in zip(copies, ("sharded", "single"), strict=True):
        go_on_with(ranks, copy, 2, checkpoint_format=kind)
        names = sorted(path.name for path in (copy / "checkpoints").iterdir())
        assert names == ["step-00000003.ckpt", "step-00000006.ckpt"]
        path, content = newest(copy / "checkpoints")
        assert path.is_dir() == (kind == "sharded") and not content["flashtrain"]["owes_validation"]


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "undivided.pt"])
def test_a_part_that_is_missing_or_cut_short_is_named_and_the_checkpoint_before_is_taken(parts, name):
    folder = parts / "checkpoints"
    last, damaged = existing(folder)[-1], existing(folder)[-1] / name
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    assert newest(folder)[0].name == "step-00000003.ckpt"
    with pytest.raises(ValueError, match=f"{last.name}/{name}: is (cut short|damaged)"):
        load(last)
    damaged.unlink()
    assert newest(folder)[0].name == "step-00000003.ckpt"
    shutil.rmtree(folder / "step-00000003.ckpt")
    with pytest.raises(ValueError, match=f"no checkpoint can be read: .*{last.name}/{name}: is missing"):
        newest(folder)


def test_a_part_with_other_bytes_is_named_and_an_index_runs_no_code(parts):
    last = existing(parts / "checkpoints")[-1]
    part = last / "__1_0.distcp"
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(ValueError, match=r"__1_0\.distcp: is damaged"):
        load(last)

    class Command:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(last / "ran"),)

    (last / ".metadata").write_bytes(pickle.dumps(Command()))
    with pytest.raises(ValueError, match=r"\.metadata: is damaged \(it names posix\.mkdir\)"):
        load(last)
    assert not (last / "ran").exists()
