"""No sample twice and none never, whatever the number of processes; and what several devices cannot do is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashtrain.config import ConfigError, build, to_dict
from flashtrain.config.started import check_started, started_processes
from flashtrain.data.images import ImageSteps, StoredImages
from flashtrain.data.sequences import SequenceSet, SequenceSteps
from flashtrain.models.recompute import Recompute
from flashtrain.training.distributed.processes import Processes
from flashtrain.training.forecast import Forecast
from flashtrain.training.forecast.case import Case
from flashtrain.training.forecast.memory import step_memory
from flashtrain.training.forecast.mesh import gradient_bytes, group_bytes, sum_bytes
from flashtrain.training.task import Task
from flashtrain.training.text import TextData


class Rank(Processes):
    """A process without the others, for what needs no agreement."""

    def __init__(self, rank: int, size: int, context: int = 1) -> None:
        super().__init__()
        self.rank, self.size, self.context = rank, size, context


@pytest.mark.parametrize("size", [2, 4])
def test_the_shares_of_a_step_are_the_step_of_one_process(make_config, size):
    config = make_config("data.recall_share=0.4", f"trainer.devices={size}")
    alone = TextData(config).train_loader(3)
    shares = [iter(TextData(config, (rank, size)).train_loader(3)) for rank in range(size)]
    for _, whole in zip(range(3), alone, strict=False):
        together = [batch for share in shares for batch in next(share)]
        for name in ("tokens", "targets"):
            expected = torch.cat([getattr(batch, name) for batch in whole])
            assert torch.equal(torch.cat([getattr(batch, name) for batch in together]), expected)
        assert sum(batch.num_targets for batch in together) == sum(batch.num_targets for batch in whole)


def seeds(rank: int, size: int, context: int = 1) -> list[int]:
    """Of dropout in step 3, which has eight micro-batches."""
    replicas = SimpleNamespace(processes=Rank(rank, size, context))
    task: Any = SimpleNamespace(replicas=replicas, config=SimpleNamespace(seed=1))
    return Task._seeds(task, 3, 8 * context // size)


def test_each_micro_batch_has_the_dropout_of_one_process_and_each_part_of_a_sequence_its_own():
    alone = seeds(0, 1)
    assert len({*alone}) == 8
    assert [seed for rank in range(4) for seed in seeds(rank, 4)] == alone
    assert len({seed for rank in range(4) for seed in seeds(rank, 4, 2)}) == 16


def test_images_and_labelled_sequences_are_shared_the_same_way():
    images = StoredImages(np.arange(40, dtype=np.uint8).reshape(10, 2, 2), np.arange(10))
    texts = SequenceSet.of([np.array([n], np.uint8) for n in range(10)], list(range(10)))

    def image_labels(share: tuple[int, int]) -> list[int]:
        steps = ImageSteps(images, 8, 2, 1, True, (0.5, 2.0), share=share)
        return [label for step in range(5) for batch in steps.batches(step) for label in batch.labels.tolist()]

    def text_labels(share: tuple[int, int]) -> list[int]:
        steps = SequenceSteps(texts, 8, 2, 4, 1, share)
        return [label for step in range(5) for batch in steps.batches(step) for label in batch.labels.tolist()]

    for labels in (image_labels, text_labels):
        parts = [np.array(labels((rank, 4))).reshape(5, 2) for rank in range(4)]
        whole = np.array(labels((0, 1))).reshape(5, 8)
        assert np.array_equal(np.concatenate(parts, axis=1), whole)
        assert sorted(whole.ravel().tolist()) == sorted([*range(10)] * 4)


@pytest.mark.parametrize(("items", "size", "context"), [(7, 2, 1), (8, 4, 1), (1, 4, 1), (5, 4, 2), (0, 2, 1)])
def test_each_held_out_batch_counts_once_and_all_processes_have_equally_many(items, size, context):
    turns = [list(Rank(rank, size, context).take_turns(range(items))) for rank in range(size)]
    assert len({len(each) for each in turns}) == 1
    for part in range(context):  # those that share sequences have the same ones
        counted = [item for rank in range(part, size, context) for item, counts in turns[rank] if counts]
        assert sorted(counted) == list(range(items))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["trainer.devices=3"], "trainer.batch_tokens=256: gives 8 sequences of seq_len=32 a step, which"),
        (["trainer.devices=4", "trainer.context=3"], "trainer.context=3: must divide trainer.devices=4, such as 2"),
        (["trainer.devices=4", "trainer=context_parallel", "seq_len=36"], "a multiple of twice as many, 8"),
        (["trainer.devices=4", "trainer=context_parallel", "trainer.context_method=ulysses"], "model.num_heads=2"),
        (["trainer.devices=2", "trainer=fsdp", "optimizer=muon"], "trainer=ddp or optimizer=adamw"),
        (
            ["trainer.devices=4", "trainer=fsdp", "trainer.shard=3"],
            "trainer.shard=3: must divide trainer.devices=4, such as 2",
        ),
        (["trainer.devices=4", "trainer=fsdp", "trainer.shard=0"], "trainer.shard=0: would divide nothing"),
        (["trainer.devices=4", "trainer.shard=2"], "trainer.shard=2 with trainer.strategy=ddp"),
        (["trainer.devices=2", "trainer.cuda_graph=true"], "trainer.cuda_graph=true with trainer.devices=2"),
    ],
)
def test_what_devices_cannot_do_together_is_refused_with_the_way_out(make_config, changes, told):
    with pytest.raises(ConfigError) as error:
        make_config(*changes)
    assert told in str(error.value)


def test_the_way_out_of_a_step_that_cannot_be_shared_can_be_taken(make_config):
    assert build(to_dict(make_config("trainer.devices=3", "trainer.batch_tokens=288"))).sequences_per_micro_batch == 1


def test_a_forecast_for_groups_lies_between_those_that_divide_the_model_among_all_and_not_at_all(make_config):
    def case(*changes: str) -> Case:
        sizes = ("trainer.devices=4", "seq_len=32", "trainer.batch_tokens=2k", "trainer.micro_batch_tokens=128")
        return Case(make_config(*sizes, *changes), 256, "32-true", False, "sdpa", 1.0, Recompute(), None)

    groups, all_of_them, ddp = case("trainer=fsdp", "trainer.shard=2"), case("trainer=fsdp"), case()
    whole, rounds = sum_bytes(ddp) / (2 * 3 / 4), groups.micro_batches
    assert rounds == 4
    assert group_bytes(groups) == pytest.approx(3 * rounds / 2 * whole)
    assert sum_bytes(groups) == pytest.approx(2 / 2 * whole / 2)
    assert gradient_bytes(all_of_them) == pytest.approx(3 * rounds * 3 / 4 * whole)
    kept = [step_memory(each).optimizer for each in (all_of_them, groups, ddp)]
    assert kept[1:] == pytest.approx([2 * kept[0], 4 * kept[0]])
    assert any("2 groups of 2" in line for line in Forecast.of(groups, 2.0**30).lines())


def test_processes_of_torchrun_and_srun_are_counted_and_a_command_line_that_contradicts_is_refused():
    assert started_processes({}) is None
    assert started_processes({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None  # a batch script without srun
    assert started_processes({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}) == 4
    assert started_processes({"WORLD_SIZE": "2", "RANK": "0"}) == 2
    check_started(2, ["trainer.devices=2"])
    with pytest.raises(ConfigError, match=r"trainer\.devices=4: torchrun or srun has started 2"):
        check_started(2, ["trainer.devices=4"])
    with pytest.raises(ConfigError, match="each job of a sweep starts its own processes"):
        check_started(2, ["-m", "seed=1,2"])
