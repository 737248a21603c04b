"""The gradients of a step, not only what follows from them: every way to share it, every mask, both dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashtrain.config import Config
from flashtrain.training.run import run
from flashtrain.training.task import Task

from .conftest import train

STEP = ["trainer.max_steps=1", "trainer.sample_tokens=0", "trainer.val_tokens=256", "optimizer.clip_norm=1e9"]
STEP += ["seq_len=256", "trainer.batch_tokens=1k", "trainer.micro_batch_tokens=256", "attention.backend=standard"]
STEP += ["model.num_heads=4", "model.positions=rope"]
BLOCKS = ("attention=block_sparse", "attention.layout.name=local_global", "attention.layout.block=64")
BLOCKS = (*BLOCKS, "attention.layout.window=1")
DOCUMENTS, WINDOW = "data.document_borders=true", "attention.window=90"

MASKS = {
    "causal": (),
    "documents": (DOCUMENTS,),
    "window": (WINDOW,),
    "window_in_documents": (WINDOW, DOCUMENTS),
    "blocks": BLOCKS,
    "blocks_in_documents": (*BLOCKS, DOCUMENTS),
}
SHARED = ("trainer=context_parallel", "trainer.context=2")
ULYSSES = "trainer.context_method=ulysses"
MESHES = {
    "ddp": (2, ("trainer=ddp",)),
    "fsdp": (4, ("trainer=fsdp",)),
    "ring": (2, SHARED),
    "ulysses": (2, (*SHARED, ULYSSES)),
    "ring with ddp on a mesh": (4, (*SHARED, "trainer.strategy=ddp")),
    "ring with fsdp on a mesh": (4, SHARED),
    "ulysses with fsdp on a mesh": (4, (*SHARED, ULYSSES)),
}


def gradients(config: Config, together: tuple[Any, ...] = ()) -> dict[str, Tensor]:
    """Loss and gradients of a run of one step; together: rank, size and dtype of one of several processes."""
    found: dict[str, Tensor] = {}
    work = Task._work

    def kept(self: Task, *arguments: Any) -> None:
        work(self, *arguments)
        found["loss"] = self.loss.detach().clone()
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "_work", kept)
        rank, size, dtype = together or (0, 1, None)
        assert (train(rank, size, config, [], dtype) if together else run(config, [])) == 0
    return found


def gradients_of_rank(rank: int, size: int, config: Config, dtype: torch.dtype) -> dict[str, Tensor]:
    return gradients(config, (rank, size, dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mesh_gives_the_loss_and_the_gradients_of_one_process(make_config, ranks, mask, dtype, tolerance):
    wanted = getattr(torch, dtype)
    torch.set_default_dtype(wanted)
    try:
        expected = gradients(make_config(*STEP, *MASKS[mask], "run_id=alone"))
    finally:
        torch.set_default_dtype(torch.float32)
    largest = max(tensor.abs().max() for name, tensor in expected.items() if name != "loss")
    for number, (mesh, (size, changes)) in enumerate(MESHES.items()):
        keys = (*MASKS[mask], *changes, f"trainer.devices={size}", f"run_id=together{number}")
        of_ranks = ranks(size).call(gradients_of_rank, make_config(*STEP, *keys), wanted)
        for rank, found in enumerate(of_ranks):
            assert found.keys() == expected.keys()
            for name, truth in expected.items():
                assert found[name].dtype == truth.dtype == wanted
                # Some are sums of what cancels, such as those of biases of keys: next to nothing, and all rounding.
                scale = max(truth.abs().max(), 0.01 * largest)
                error = (found[name] - truth).abs().max()
                assert error <= tolerance * scale, f"{mesh}, rank {rank}: {name} is off by {error / scale:.3g}"
