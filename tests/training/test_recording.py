"""Recorded steps: equal to launched ones, bit for bit, with all that changes from step to step read on the device.

There is no CUDA graph without a GPU. What stands in for one here holds a recording to the same rules: it repeats the
operations of one step on the same memory, so that a number which Python held then stays what it was.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashtrain.data.images import ImageBatch
from flashtrain.models import loss
from flashtrain.models.recompute import Recompute
from flashtrain.training import recording
from flashtrain.training.classification import ClassificationTask
from flashtrain.training.language import LanguageTask
from flashtrain.training.memory import plan
from flashtrain.training.recording import choose_launching, why_not_recorded
from flashtrain.training.run import run
from flashtrain.training.task import Task

from .conftest import changed, figures, go_on, summary

pytest.importorskip("numba")

CUDA = torch.device("cuda")
CHANGES = (
    "model.dropout=0.1", "optimizer.ema_decay=0.9", "trainer.max_steps=10", "trainer.micro_batch_tokens=8k",
    "schedule.warmup_steps=6", "trainer.val_every_n_steps=7", "trainer.checkpoint_every_n_steps=4",
)  # fmt: skip
AUTO = "trainer.cuda_graph=auto"


class _Operations(TorchDispatchMode):
    """Runs operations and writes them down; refuses those that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a recorded step waits for the device"
        result = operation(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.done.append(
            (operation, args, kwargs or {}, [m for m in made if m.untyped_storage().data_ptr() not in inputs])
        )
        return result

    def repeat(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs, made in self.done:
                storages = {m.untyped_storage().data_ptr() for m in made}
                again = [x for x in tree_leaves(operation(*args, **kwargs)) if isinstance(x, Tensor)]
                inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
                fresh = [x for x in again if x.untyped_storage().data_ptr() not in inputs | storages]
                for memory, value in zip(made, fresh, strict=True):
                    memory.copy_(value)


class OperationRecorder:
    """Stands in for the recorder of CUDA graphs."""

    repeated = 0

    def warm_up(self, call: Callable[[], None]) -> None:
        call()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        operations, times = _Operations(), 0
        with operations:
            call()

        def repeat() -> None:
            nonlocal times
            if times:  # the recording itself has worked, as that of a graph does not
                operations.repeat()
                type(self).repeated += 1
            times += 1

        return repeat


@pytest.fixture
def recorded(monkeypatch):
    """Runs in here record their steps."""
    monkeypatch.setattr(recording, "why_not_recorded", lambda *_: None)
    monkeypatch.setattr(recording, "GraphRecorder", OperationRecorder)
    monkeypatch.setattr(OperationRecorder, "repeated", 0)


@pytest.fixture
def straight(image_config, tmp_path):
    """The figures of an ordinary run."""
    assert run(image_config(*CHANGES, "run_id=straight"), []) == 0
    return figures(tmp_path / "runs" / "straight")


def test_recorded_steps_equal_launched_ones_and_resume_to_the_same_bits(straight, recorded, image_config, tmp_path):
    """Dropout, the schedule, the running mean, validations and checkpoints included."""
    assert run(image_config(*CHANGES, AUTO, "run_id=whole"), []) == 0
    assert OperationRecorder.repeated == 10 - 4
    assert figures(tmp_path / "runs" / "whole") == straight
    assert len({row[4] for row in straight}) > 6, "the guard: the rate changes at most steps"

    assert run(image_config(*CHANGES, AUTO, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert summary(tmp_path / "runs" / "cut")["steps"] == 1
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    assert figures(tmp_path / "runs" / "cut")[1:] == straight[1:]


@pytest.mark.parametrize(
    "changes",
    [
        ("optimizer=adamw", "trainer.max_steps=6"),
        ("attention=block_sparse", "attention.layout.name=tiles_2d", "trainer.max_steps=6"),
        (
            "attention=block_sparse", "attention.layout.name=tiles_2d", "attention.alternate_with=[{name:dense}]",
            "classifier.token_order=tiles", "model.num_layers=2", "trainer.max_steps=6",
        ),
        ("pretrain=masked_pixels", "pretrain.levels=16", "images.train_images=24", "trainer.max_steps=6"),
        (
            "curriculum=masked_pixels", "curriculum.stages=[{pretrain:true,max_steps:5},{max_steps:9}]",
            "pretrain.levels=16", "pretrain.loss=l1", "images.train_images=24", "classifier.dense_classes=0",
        ),
    ],
    ids=["adamw", "block-sparse", "some layers dense", "pretraining", "stages"],
)  # fmt: skip
def test_every_kind_of_run_on_images_can_be_recorded(image_config, tmp_path, changes, request, monkeypatch):
    monkeypatch.setattr(loss, "_check", lambda *_: None)  # looks at targets, but only where they lie on the CPU
    changes = changed(list(CHANGES), *changes)
    assert run(image_config(*changes, "run_id=plain"), []) == 0
    request.getfixturevalue("recorded")
    assert run(image_config(*changes, AUTO, "run_id=recorded"), []) == 0
    assert OperationRecorder.repeated >= 2
    plain, recorded = (figures(tmp_path / "runs" / name) for name in ("plain", "recorded"))
    assert plain == recorded


TEXT = (
    "model.dropout=0.1", "optimizer.ema_decay=0.9", "trainer.micro_batch_tokens=256", "trainer.sample_tokens=0",
    "data.recall_share=0.5",
)  # fmt: skip
SPARSE = (
    "seq_len=256", "attention=block_sparse", "attention.layout.block=64", "attention.layout.window=0",
    "trainer.batch_tokens=1k", "trainer.micro_batch_tokens=1k",
)  # fmt: skip


@pytest.mark.parametrize("changes", [(), SPARSE], ids=["dense", "sparse"])
def test_recorded_steps_on_text_equal_launched_ones_whatever_their_targets(
    make_config, tmp_path, changes, request, monkeypatch
):
    """Rows of recall tasks have few targets, so that their number is another one at each step."""
    monkeypatch.setattr(loss, "_check", lambda *_: None)  # looks at targets, but only where they lie on the CPU
    counted = []
    monkeypatch.setattr(LanguageTask, "_targets", lambda self, step: counted.append(step[0].num_targets) or counted[-1])
    assert run(make_config(*changed(list(TEXT), *changes), "run_id=plain"), []) == 0
    assert len(set(counted)) > 6, "the guard: the number differs at most steps"
    request.getfixturevalue("recorded")
    assert run(make_config(*changed(list(TEXT), *changes), AUTO, "run_id=recorded"), []) == 0
    assert OperationRecorder.repeated == 12 - 4
    plain, recorded = (figures(tmp_path / "runs" / name) for name in ("plain", "recorded"))
    assert plain == recorded


def test_small_models_on_text_are_recorded_unless_masks_or_lengths_change(make_config, monkeypatch):
    monkeypatch.setattr(recording, "GraphRecorder", OperationRecorder)

    def said(*changes: str) -> str:
        config = make_config("trainer.micro_batch_tokens=256", *changes)
        return choose_launching(LanguageTask(config, 257), config, CUDA)

    assert said() == "not compiled, a step is one CUDA graph"
    monkeypatch.setattr(recording, "COMPILE_FROM", 100)
    assert said() == "compiled"
    assert said("trainer.cuda_graph=true") == "compiled, a step is one CUDA graph"
    monkeypatch.undo()
    for changes, reason in (
        (("data.document_borders=true",), "masks differ.*data.document_borders=true.*write false"),
        (("schedule.length_steps=4", "schedule.first_length=8"), "sequences grow.*length_steps=4.*write 0"),
    ):
        assert said(*changes) == "not compiled"
        with pytest.raises(ValueError, match=f"trainer.cuda_graph=true: .*{reason}"):
            said("trainer.cuda_graph=true", *changes)


def test_a_recorded_step_that_is_not_finite_never_reaches_the_weights(recorded, image_config, tmp_path, monkeypatch):
    factor, weights = torch.ones(()), []
    honest, step = ClassificationTask.loss_sum, Task.training_step

    def poisoned(self: Task, batches: Any, index: int) -> None:
        if self.global_step == 6:
            factor.fill_(math.nan)
        step(self, batches, index)
        weights.append(self.model.head.weight.detach().clone())

    monkeypatch.setattr(ClassificationTask, "loss_sum", lambda self, batch: honest(self, batch) * factor)
    monkeypatch.setattr(Task, "training_step", poisoned)
    assert run(image_config(*CHANGES, AUTO, "run_id=bad", "trainer.log_every_n_steps=2"), []) == 1
    assert "not finite at step 7" in (tmp_path / "runs" / "bad" / "train.log").read_text()
    assert OperationRecorder.repeated > 0
    assert not torch.equal(weights[4], weights[5])
    assert len(weights) > 7 and all(torch.equal(weights[5], later) for later in weights[6:])


def test_a_batch_is_written_into_the_memory_of_another_whole():
    def batch(value: int) -> ImageBatch:
        small = torch.full((2, 4, 4), value, dtype=torch.uint8)
        return ImageBatch(small, torch.full((2,), value), small.clone(), 2, torch.full((2, 3), value))

    memory = batch(1)
    kept = [getattr(memory, field.name) for field in dataclasses.fields(memory) if field.name != "num_targets"]
    memory.copy_(batch(7))
    assert len(kept) == 4 and all(bool((tensor == 7).all()) for tensor in kept)


def test_what_cannot_be_recorded_is_refused_by_name(image_config, tmp_path):
    assert run(image_config("trainer.cuda_graph=true", "run_id=cpu"), []) == 1
    log = (tmp_path / "runs" / "cpu" / "train.log").read_text()
    assert "trainer.cuda_graph=true: a CUDA graph needs a GPU and the run is on cpu" in log
    assert "write trainer.cuda_graph=auto" in log


@pytest.mark.parametrize(
    ("changes", "recompute", "reason"),
    [
        ((), Recompute(), r"a step has 2 micro-batches.*write trainer\.micro_batch_tokens=8192"),
        (("trainer.micro_batch_tokens=8k",), Recompute("full"), "computed again.*write memory=none"),
        (("trainer.micro_batch_tokens=8k",), Recompute(), None),
    ],
)
def test_steps_are_recorded_where_a_graph_can_hold_them(image_config, changes, recompute, reason):
    config = image_config(*changes)
    task = ClassificationTask(config, config.classifier)
    task.model.checkpoint_blocks = recompute
    said = why_not_recorded(task, config, CUDA)
    assert said is None if reason is None else re.search(reason, said or "")


@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        (("trainer.micro_batch_tokens=8k",), True),
        ((), False),  # two micro-batches
        (("trainer.micro_batch_tokens=8k", "trainer.cuda_graph=false"), False),
        (("trainer.micro_batch_tokens=8k", "memory=full"), False),
        (("trainer.micro_batch_tokens=8k", "trainer.compile=false"), False),
        (("trainer.compile=true",), True),
    ],
)
def test_the_forecast_of_a_run_on_images_is_of_the_step_that_will_be_launched(image_config, changes, compiled):
    config = image_config("trainer.compile=auto", "trainer.cuda_graph=auto", "plan.gpu=h200", *changes)
    assert plan(config).case.compiled == compiled


def test_blocks_are_compiled_once_for_all_and_validation_adds_none(image_config, monkeypatch):
    from torch._dynamo.testing import CompileCounter

    counter, compile_module = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_module(self, backend=counter, **how))
    config = image_config("model.num_layers=3")
    task = ClassificationTask(config, config.classifier)
    task.compile_model()
    images = torch.randint(0, 255, (2, 32, 32), dtype=torch.uint8)
    task.run_model(images)[0].sum().backward()
    assert counter.frame_count == 1
    monkeypatch.setattr(Task, "validate", lambda self, batches: [self.run_model(batch) for batch in batches])
    with torch.no_grad():
        task.validate([images, images[:1]])
    assert counter.frame_count == 1


def test_a_compiled_model_takes_every_length_of_a_warm_up(make_config, monkeypatch):
    """One version a length; PyTorch's own limit of versions would end the run at the ninth."""
    compile_whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_whole(model, backend="eager", **how))
    changes = (
        "trainer.compile=true", "seq_len=2k", "schedule.length_steps=12", "schedule.first_length=4",
        "trainer.batch_tokens=2k", "trainer.micro_batch_tokens=2k", "trainer.sample_tokens=0", "attention.backend=sdpa",
    )  # fmt: skip
    with torch._dynamo.config.patch(recompile_limit=8):
        assert run(make_config(*changes), []) == 0
