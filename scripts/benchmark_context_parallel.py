"""Attention over a sequence that several ranks share, forward and backward, on GPT-2 small's heads (12 x 64, causal).

    python scripts/benchmark_context_parallel.py
    torchrun --nproc-per-node 2 scripts/benchmark_context_parallel.py --distributed --peer torch

On one GPU: the work of each rank of a ring, its shards, its joining of parts, its backward pass, one rank after
another without a network, against 1 / ranks of the time of the whole. With --distributed: the ring and the exchange of
heads (ulysses) on as many GPUs as processes, against one of them; and what is spent on communication, by the same work
with copies in its place. --peer torch adds PyTorch's context_parallel over its SDPA, against that on one GPU.

out, dq, dk and dv are compared with those of one GPU. A wrong one gets no figures and makes the script end with 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from measuring.attention import Shape
from measuring.correctness import WrongResult
from measuring.environment import choose_device
from measuring.report import Report, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.shared_sequence import (
    TORCH,
    Differentiable,
    OneRank,
    StayingRing,
    by_torch,
    bytes_sent,
    check_together,
    differences,
    take_rounds,
    time_together,
    with_torch,
)
from measuring.timing import Stopwatch
from torch import Tensor

from flashtrain.attention import Causal, attention, choose_backend, lower
from flashtrain.config.sizes import format_size
from flashtrain.parallel import METHODS, ContextParallel, heads, shard, unshard
from flashtrain.parallel.heads import HeadsPlan
from flashtrain.parallel.one_process import RingInOneProcess

HEADERS = ("N", "ranks", "what", "whole ms", "rank ms", "fwd ms", "bwd ms", "of 1/ranks", "speed-up", "comm %", "note")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    if arguments.distributed:
        device = join(device)
    first = not arguments.distributed or dist.get_rank() == 0
    report = Report("context_parallel_gpus" if arguments.distributed else "context_parallel", arguments, device)
    report.content["settings"] = settings(arguments)
    for seq_len in arguments.lengths:
        measure = measure_shared if arguments.distributed else measure_ranks
        report.rows.extend(measure(seq_len, arguments, device))
        if first:
            report.write()
        if any(gpu_is_lost(row["failed"]) for row in report.rows):
            break
    if first:
        say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
        report.finish()
    if arguments.distributed:
        dist.destroy_process_group()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=sizes, default=sizes("64k,256k,1M"), help="(64k,256k,1M)")
    parser.add_argument("--ranks", type=sizes, default=[2, 4, 8], help="on one GPU: sizes of the ring (2,4,8)")
    parser.add_argument(
        "--methods", type=names, default=list(METHODS), help=f"--distributed: {','.join(METHODS)} (all)"
    )
    parser.add_argument("--num-heads", type=int, default=12)
    parser.add_argument("--num-kv-heads", type=int, help="(num_heads)")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--backend", default="auto", help="as attention takes it (auto)")
    parser.add_argument("--seconds", type=float, default=10.0, help="timed seconds a row, two rounds at least (10)")
    parser.add_argument("--peer", action="append", default=[], choices=["torch"], help="--distributed: PyTorch's own")
    parser.add_argument("--distributed", action="store_true", help="one rank in each process that torchrun started")
    arguments = parse_arguments(parser, argv, "context_parallel")
    if arguments.dry_run:
        arguments.lengths, arguments.num_heads, arguments.head_dim, arguments.seconds = [64, 128], 4, 16, 0.01
    if arguments.peer and not arguments.distributed:
        parser.error("--peer torch: needs --distributed, since it has no rank of one process")
    arguments.num_kv_heads = arguments.num_kv_heads or arguments.num_heads
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    key_heads = f"{arguments.num_kv_heads} key heads, " if arguments.num_kv_heads != arguments.num_heads else ""
    found = {
        "shape": f"batch 1, {arguments.num_heads} heads x {arguments.head_dim}, {key_heads}causal, bfloat16",
        "call": "one forward and one backward pass over a rank's shards",
        "checked": "all of out, dq, dk, dv against the whole on one GPU",
        "of_a_share": "time of the slowest rank over 1 / ranks of the whole's; 1 is perfect",
    }
    if arguments.distributed:
        found["communication"] = (
            "1 - time with copies in place of what is sent / time; what computing hides is not in it"
        )
    if arguments.peer:
        found["peer"] = "torch.distributed.tensor.experimental.context_parallel; whole: the same kernels on one GPU"
    return found


def join(device: torch.device) -> torch.device:
    """Meet the other processes of torchrun; the device of this one."""
    if device.type != "cuda":
        dist.init_process_group("gloo")
        return device
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Whole:
    """The problem on one GPU: q, k, v and dout, and what attention makes of them."""

    def __init__(self, seq_len: int, arguments: argparse.Namespace, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        q, k, v, dout = Shape(1, arguments.num_heads, seq_len, arguments.head_dim, True).inputs(device, dtype, seed=1)
        k, v = (x[:, : arguments.num_kv_heads] for x in (k, v))
        self.tensors = q, k, v, dout
        group = arguments.num_heads // arguments.num_kv_heads
        self.backend = choose_backend(arguments.backend, q, return_lse=True, group=group)
        plan = lower(Causal(), 1, seq_len, seq_len, device)
        self.call = Differentiable(functools.partial(attention, mask=plan, backend=self.backend), (q, k, v), dout)

    def shards(self, rank: int, size: int) -> list[Tensor]:
        return [shard(x, rank, size, dim=2) for x in self.tensors]


def measure_ranks(seq_len: int, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each size of the ring."""
    rows: list[dict[str, Any]] = []
    watch = Stopwatch(device)
    for size in arguments.ranks:
        row: dict[str, Any] = {"seq_len": seq_len, "ranks": size, "method": "ring", "failed": None, "wrong": False}
        rows.append(row)
        try:
            row.update(ranks_of(Whole(seq_len, arguments, device), size, watch, arguments.seconds))
        except Exception as error:
            row["failed"], row["wrong"] = reason(error), isinstance(error, WrongResult)
        release(device)
        say(line(row))
    return rows


def ranks_of(whole: Whole, size: int, watch: Stopwatch, seconds: float) -> dict[str, Any]:
    """One rank after another against the whole; raises WrongResult."""
    q, k, v, _ = whole.tensors
    played = RingInOneProcess(k, v, Causal(), size, q.shape[-1] ** -0.5, whole.backend)
    ranks = [OneRank(played, rank, whole.shards(rank, size)) for rank in range(size)]
    errors = differences(_results(played, ranks), whole.call.results())
    times, *of_ranks = take_rounds([whole.call, *ranks], watch, seconds)
    each = [found["both_ms"]["median"] for found in of_ranks]
    slowest = of_ranks[each.index(max(each))]
    kv_bytes = played.keys[0].nbytes
    return {
        "backend": whole.backend,
        "whole": times,
        "slowest": slowest,
        "rank_ms": each,
        "mean_ms": sum(each) / size,
        "of_a_share": max(each) * size / times["both_ms"]["median"],
        "mean_of_a_share": sum(each) / times["both_ms"]["median"],
        **bytes_sent(size, kv_bytes, played.sums[0].nbytes),
        "differences": errors,
    }


def _results(played: RingInOneProcess, ranks: list[OneRank]) -> list[Tensor]:
    """out, dq, dk and dv of the whole sequence, once every rank has gone forward and backward."""
    outs, dqs = [], []
    for rank in ranks:
        state = rank.forward()
        outs.append(state[0])
        dqs.append(rank.backward(state)[0])
    dtype = outs[0].dtype
    of_keys = [[sums[i].to(dtype) for sums in played.sums] for i in (0, 1)]
    return [unshard(parts, dim=2) for parts in (outs, dqs, *of_keys)]


def measure_shared(seq_len: int, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each method, the same in all processes; the peer's come last."""
    rows: list[dict[str, Any]] = []
    for method in (*arguments.methods, *(TORCH if "torch" in arguments.peer else ())):
        row: dict[str, Any] = {"seq_len": seq_len, "ranks": dist.get_world_size(), "method": method}
        row |= {"failed": None, "wrong": False}
        rows.append(row)
        measure = shared_by_torch if method in TORCH else shared
        try:
            row.update(measure(Whole(seq_len, arguments, device), method, Stopwatch(device), arguments.seconds))
        except Exception as error:
            row["failed"], row["wrong"] = reason(error), isinstance(error, WrongResult)
        release(device)
        if dist.get_rank() == 0:
            say(line(row))
    return rows


def shared(whole: Whole, method: str, watch: Stopwatch, seconds: float) -> dict[str, Any]:
    """This process's share of the sequence against the whole on its GPU; raises WrongResult."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    q = whole.tensors[0]
    parallel = ContextParallel(dist.group.WORLD, method, whole.backend)
    plan = parallel.lower(Causal(), 1, q.shape[2], q.device)
    *inputs, dout = shards = whole.shards(rank, size)
    call = Differentiable(functools.partial(parallel, plan=plan), inputs, dout)
    errors = check_together(call.results(), [shard(x, rank, size, dim=2) for x in whole.call.results()])
    alone: StayingRing | Differentiable
    if isinstance(plan, HeadsPlan):
        own: HeadsPlan = plan
        alone = Differentiable(
            lambda q, k, v: heads.attend(q, k, v, own, None, whole.backend, None, torch.clone), inputs, dout
        )
    else:
        alone = StayingRing(plan, whole.backend, shards)
    # Not in turns: a rank that comes late would be waited for.
    times = [time_together(each, watch, seconds / 3) for each in (whole.call, call, alone)]
    together, without = (each["both_ms"]["median"] for each in times[1:])
    return {
        "backend": whole.backend,
        **beside_whole(times[0], times[1], size),
        "without_communication": times[2],
        "communication": 1 - without / together,
        "differences": errors,
    }


def shared_by_torch(whole: Whole, name: str, watch: Stopwatch, seconds: float) -> dict[str, Any]:
    """PyTorch's context parallel against its own kernels on one GPU, once its results are ours; raises WrongResult."""
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = [shard(x, rank, size, dim=2) for x in whole.call.results()]
    *inputs, dout = whole.tensors
    one = time_together(Differentiable(by_torch(name), inputs, dout), watch, seconds / 3)

    def check_and_time(call: Differentiable) -> tuple[dict[str, Any], dict[str, Any]]:
        return check_together(call.results(), expected), time_together(call, watch, seconds / 3)

    errors, together = with_torch(name, whole.tensors, check_and_time)
    kernels, rotation = TORCH[name]
    return {
        "backend": f"{kernels.name.lower()}, {rotation}",
        **beside_whole(one, together, size),
        "differences": errors,
    }


def beside_whole(whole: dict[str, Any], together: dict[str, Any], size: int) -> dict[str, Any]:
    one, shared = whole["both_ms"]["median"], together["both_ms"]["median"]
    return {"whole": whole, "slowest": together, "of_a_share": shared * size / one, "speed_up": one / shared}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    head = f"{row['method']} {format_size(row['seq_len'])}, {row['ranks']} ranks: "
    if row["failed"] is not None:
        return head + row["failed"]
    worst = max(found["share"] for found in row["differences"].values())
    return f"{head}{row['of_a_share']:.3f} of 1/ranks of the whole, differs by {100 * worst:.2g} % rms"


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    start = (format_size(row["seq_len"]), row["ranks"], row["method"])
    if row["failed"] is not None:
        return (*start, *(None,) * 7, row["failed"])
    slowest = [row["slowest"][name]["median"] for name in ("both_ms", "forward_ms", "backward_ms")]
    communication = None if "communication" not in row else 100 * row["communication"]
    whole = row["whole"]["both_ms"]["median"]
    return (*start, whole, *slowest, row["of_a_share"], row.get("speed_up"), communication, "")


if __name__ == "__main__":
    sys.exit(main())
