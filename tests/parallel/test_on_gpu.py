"""The real kernels on a ring's pieces: one process plays all ranks."""

from __future__ import annotations

import pytest
import torch

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow, attention, layouts
from flashtrain.parallel import shard, unshard
from flashtrain.parallel.one_process import RingInOneProcess

SEQ_LEN = 4096
DOCUMENTS = Documents(((700, 0, 3396), (4096,)))
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(100),
    "documents": Causal() & DOCUMENTS,
    "window in documents": SlidingWindow(300, 50) & DOCUMENTS,
    "blind rows": Causal() & Documents(((40, 4056), (4096, 0)), ((10, 4086), (0, 4096))),
    "layout": layouts.local_global(SEQ_LEN, window=2),
    "layout in documents": Causal() & layouts.local_global(SEQ_LEN, window=2) & DOCUMENTS,
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_by_the_kernels_join_to_the_whole(size: int, mask: str, backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: its kernels run on no other, the portable ones are tested here")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, SEQ_LEN, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (4, 2, 2, 4)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = attention(*leaves, MASKS[mask], backend=backend)
    wanted = [whole.detach(), *torch.autograd.grad(whole, leaves, dout)]
    played = RingInOneProcess(k, v, MASKS[mask], size, 64**-0.5, backend)
    found = []
    for rank in range(size):
        own = [shard(x, rank, size, dim=2) for x in (q, k, v)]
        out, lse = played.forward(rank, *own)
        found.append((out, played.backward(rank, shard(dout, rank, size, dim=2), *own, out, lse)[0]))
    joined = [unshard(parts, dim=2) for parts in zip(*found, strict=True)]
    joined += [unshard([sums[i] for sums in played.sums], dim=2) for i in (0, 1)]
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), joined, wanted, strict=True):
        difference, size_of = (
            (ours.float() - theirs.float()).square().mean().sqrt(),
            theirs.float().square().mean().sqrt(),
        )
        assert difference <= 2**-7 * size_of, f"{name} differs by {difference / size_of:.3g}"
