"""Attention over a sequence that several ranks share: the calls that are timed, and how far results may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.parallel import ring
from flashtrain.parallel.one_process import RingInOneProcess
from flashtrain.parallel.plan import RingPlan
from measuring.correctness import WrongResult
from measuring.timing import Stopwatch, spread

NAMES = ("out", "dq", "dk", "dv")
# Two results that are each rounded to bfloat16, and so is what they are summed up from, differ by about 0.3 % rms.
LARGEST_DIFFERENCE = 2.0**-7
# PyTorch's own context parallel, a prototype: its kernels, and how its keys and values come to the other ranks.
TORCH = {
    "torch_flash": (SDPBackend.FLASH_ATTENTION, "allgather"),
    "torch_flash_alltoall": (SDPBackend.FLASH_ATTENTION, "alltoall"),
    "torch_cudnn": (SDPBackend.CUDNN_ATTENTION, "allgather"),
    "torch_cudnn_alltoall": (SDPBackend.CUDNN_ATTENTION, "alltoall"),
}
_Found = TypeVar("_Found")


class Call(Protocol):
    """A forward pass, and a backward pass over what it returned."""

    def forward(self) -> Any: ...

    def backward(self, state: Any) -> Any: ...


class Differentiable:
    """A function of q, k and v, and the gradient that comes back to its result."""

    def __init__(
        self, function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], dout: Tensor
    ) -> None:
        self.function, self.inputs, self.dout = function, [x.detach().requires_grad_() for x in inputs], dout

    def forward(self) -> Tensor:
        return self.function(*self.inputs)

    def backward(self, state: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(state, self.inputs, self.dout)

    def results(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        out = self.forward()
        return out.detach(), *self.backward(out)


class OneRank:
    """Rank `rank` of a ring that this process plays alone, with its shards of q, k, v and dout."""

    def __init__(self, played: RingInOneProcess, rank: int, shards: Sequence[Tensor]) -> None:
        self.played, self.rank = played, rank
        self.q, self.k, self.v, self.dout = shards

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.played.forward(self.rank, self.q, self.k, self.v)

    def backward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return self.played.backward(self.rank, self.dout, self.q, self.k, self.v, *state)


class StayingRing:
    """A rank of a ring whose keys and sums are copied once a step instead of being sent: its time without the network.
    The results are meaningless."""

    def __init__(self, plan: RingPlan, backend: str, shards: Sequence[Tensor]) -> None:
        self.q, self.k, self.v, self.dout = shards
        self.settings = plan.steps, self.q.shape[-1] ** -0.5, backend

    def forward(self) -> tuple[Tensor, Tensor]:
        return ring.forward(self.q, self.k, self.v, *self.settings, _stay)

    def backward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        out, lse = state
        dq, of_keys = ring.backward(self.dout, self.q, self.k, self.v, out, lse, *self.settings, False, _stay, _stay)
        return dq, *of_keys


def _stay(tensor: Tensor) -> Callable[[], Tensor]:
    copied = tensor.clone()
    return lambda: copied


def take_rounds(
    calls: Sequence[Call], watch: Stopwatch, seconds: float, agree: Callable[[int], int] = int
) -> list[dict[str, dict[str, float]]]:
    """Milliseconds of forward, backward and both of each call, round after round, so that a drifting clock meets all.

    A round goes ahead untimed. There are as many rounds as fit into `seconds`, 2 to 20; `agree` makes that number the
    same in all processes that share the calls.
    """
    watch.wait()
    start = watch.mark()
    for call in calls:
        call.backward(call.forward())
    end = watch.mark()
    watch.wait()
    rounds = agree(min(20, max(2, int(1000 * seconds / max(watch.ms(start, end), 1e-3)))))
    marks: list[list[tuple[Any, Any, Any]]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, marks, strict=True):
            begin = watch.mark()
            state = call.forward()
            middle = watch.mark()
            call.backward(state)
            own.append((begin, middle, watch.mark()))
            del state
    watch.wait()
    names = {"forward_ms": (0, 1), "backward_ms": (1, 2), "both_ms": (0, 2)}
    return [
        {name: spread([watch.ms(each[i], each[j]) for each in own]) for name, (i, j) in names.items()} for own in marks
    ]


def most_of_all(values: Sequence[float], device: torch.device) -> list[float]:
    """Of each number the largest of all ranks: what the slowest one takes."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def time_together(call: Call, watch: Stopwatch, seconds: float) -> dict[str, dict[str, float]]:
    """As `take_rounds`, for a call that all ranks make together: what the slowest one takes."""
    dist.barrier()
    found = take_rounds([call], watch, seconds, agree=lambda rounds: int(most_of_all([rounds], watch.device)[0]))[0]
    return {name: dict(zip(x, most_of_all(list(x.values()), watch.device), strict=True)) for name, x in found.items()}


def check_together(found: Sequence[Tensor], whole: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """As `differences`, which raise in all ranks or in none: whoever went on alone would wait for the others.

    Raises:
        WrongResult: more than rounding, here or on another rank.
    """
    wrong: WrongResult | None = None
    compared: dict[str, dict[str, float]] = {}
    try:
        compared = differences(found, whole)
    except WrongResult as error:
        wrong = error
    if most_of_all([float(wrong is not None)], found[0].device)[0]:
        raise wrong or WrongResult("another rank's result differs from one GPU's")
    return compared


def by_torch(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PyTorch's causal attention by the kernels of TORCH: of a whole sequence or, inside `with_torch`, of shards."""
    kernels, _ = TORCH[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        with sdpa_kernel(kernels):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)

    return attend


def with_torch(name: str, whole: Sequence[Tensor], work: Callable[[Differentiable], _Found]) -> _Found:
    """`work` with PyTorch's attention over this rank's shards of q, k, v and dout, which it cuts as `shard` does."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(TORCH[name][1])
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, whole[0].device.type)
    *inputs, dout = shards = [x.clone() for x in whole]
    with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4, no_restore_buffers=set(shards)):
        try:
            return work(Differentiable(by_torch(name), inputs, dout))
        except Exception as error:
            failure = error  # it would leave PyTorch's attention replaced if this went through it
    raise failure


def differences(found: Sequence[Tensor], whole: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """Largest and root-mean-square difference of out, dq, dk and dv, and the latter's share of the root mean square.

    Raises:
        WrongResult: more than rounding, naming the tensors.
    """
    compared = {}
    for name, ours, theirs in zip(NAMES, found, whole, strict=True):
        difference = ours.float() - theirs.float()
        rms, size = (x.float().square().mean().sqrt().item() for x in (difference, theirs))
        compared[name] = {"largest": difference.abs().max().item(), "rms": rms, "share": rms / size}
    wrong = [f"{name} by {x['share']:.2g} rms" for name, x in compared.items() if not x["share"] <= LARGEST_DIFFERENCE]
    if wrong:
        raise WrongResult(f"differs from one GPU's result: {', '.join(wrong)}")
    return compared


def bytes_sent(size: int, shard_bytes: int, sum_bytes: int) -> dict[str, int]:
    """What each rank of a ring of `size` sends for one call: keys and values of a shard, `shard_bytes`, to the next
    rank in all steps but the last, and in the backward pass the sums of their gradients, `sum_bytes`, as often."""
    return {"forward_bytes": (size - 1) * shard_bytes, "backward_bytes": (size - 1) * (shard_bytes + sum_bytes)}
