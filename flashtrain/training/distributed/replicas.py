"""Who holds what of the model, and how gradients are summed: DDP, or FSDP2 applied to each block and the rest.

Gradients are summed, not averaged: the loss is divided by the targets of the whole step before.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from flashtrain.interchange.shards import with_each_tensor
from flashtrain.training.distributed.processes import ALONE, Processes


class Replicas:
    """How the processes of a run share a model's gradients.

    Args:
        processes: those of the run.
        strategy: ddp or fsdp, see `trainer.strategy`.
        divided_by: neighbours, by rank, that divide the model among themselves; each such group has all of it. None for
            all processes.
    """

    def __init__(
        self,
        processes: Processes = ALONE,
        strategy: Literal["ddp", "fsdp"] = "ddp",
        divided_by: int | None = None,
    ) -> None:
        self.processes = processes
        self.shards = divided_by or processes.size
        self.several = processes.size > 1
        self.sharded = self.several and strategy == "fsdp"
        self.replicated = self.several and not self.sharded
        self._repeated: FSDPModule | None = None  # a divided model that several groups have

    def shard(self, model: nn.Module, blocks: nn.ModuleList, device: torch.device) -> None:
        """Divide a model's weights among the processes (or those of each group): each block by itself, then the rest.

        All processes have made the same model; each keeps its rows of every weight, as another parameter on `device`.
        """
        groups = self.processes.size // self.shards
        if groups == 1:
            mesh = init_device_mesh(device.type, (self.shards,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(device.type, (groups, self.shards), mesh_dim_names=("replicate", "shard"))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
        if groups > 1 and isinstance(model, FSDPModule):
            self._repeated = model
        register_fsdp_forward_method(model, "read")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def replicate(self, loss: nn.Module, find_unused: bool) -> nn.Module:
        """`loss`, behind whose backward pass gradients are those of all processes.

        find_unused: some of the module's parameters may get none.
        """
        model = DistributedDataParallel(loss, gradient_as_bucket_view=True, find_unused_parameters=find_unused)
        model.register_comm_hook(None, _sum)
        return model

    def accumulating(self, loss: Any, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch: the gradients of all but the last of a step wait for it.

        Those of a divided model only between groups: whole gradients would take its memory again.
        """
        if self._repeated is not None:
            self._repeated.set_requires_all_reduce(last)
        if last or not isinstance(loss, DistributedDataParallel):
            return nullcontext()
        return loss.no_sync()

    def total(self, figures: Tensor) -> Tensor:
        """The sum of figures on the device over all processes; nothing is waited for."""
        if self.several:
            dist.all_reduce(figures)
        return figures


def _sum(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def gathered(tree: Any, keep: bool) -> Any:
    """A checkpoint's content with each divided tensor put together; all processes call it.

    Args:
        tree: dicts, lists and tuples of anything.
        keep: this process wants them, in host memory; otherwise it only takes part.
    """

    def whole(place: str, tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        found = tensor.full_tensor()
        return found.cpu() if keep else None

    return with_each_tensor(tree, whole)


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's rows of a whole tensor, where `like` is divided and as large; otherwise the tensor itself."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor) or tensor.shape != like.shape:
        return tensor
    moved = tensor.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def room_like(like: Tensor | None, outline: Tensor) -> Tensor:
    """Room for a stored tensor of the shape and dtype of `outline`: for this process's rows where `like` is divided and
    as large, for the whole in host memory otherwise."""
    if not isinstance(like, DTensor) or like.shape != outline.shape:
        return torch.empty_like(outline, device="cpu")
    return torch.empty_like(like, dtype=outline.dtype, requires_grad=False)


def own_part(tensor: Tensor) -> Tensor:
    """What of a divided tensor lies here, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put_away(model: nn.Module) -> None:
    """Drop what a divided model holds of the others' weights.

    It keeps those outside of blocks from one forward pass to the next, and would not see that they have changed.
    """
    if isinstance(model, FSDPModule):
        model.reshard()
