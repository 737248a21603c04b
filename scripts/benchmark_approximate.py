"""Exact, block-sparse and approximate attention by length: the runtime and memory tables of the FlashAttention paper
(https://arxiv.org/abs/2205.14135, appendix E.6), on this GPU.

    python scripts/benchmark_approximate.py --lengths 128,1k,4k,16k,64k

Shape as in those tables: batch 16, 8 heads of 64, no mask, no dropout, here in bfloat16 (there float16). The batch
stays 16 at all lengths, so that a column reads as there; `ns_a_token` divides by batch x length. Longest lengths come
first, so that a run that is cut short has them. Each implementation is compared with its own definition on a small
shape of the same length (2k at most) before it is timed; a wrong one gets no time and makes the script end with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import approximate
from measuring.attention import BUILDERS, Case, Implementation, Shape, build
from measuring.correctness import Truth, WrongResult, check
from measuring.environment import choose_device
from measuring.report import Report, Unavailable, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.timing import Stopwatch, Times, one_call, take_turns, warm_up
from torch import Tensor

from flashtrain.attention import BlockLayout, attention, choose_backend, layouts, lower
from flashtrain.config.sizes import format_size

DTYPE = torch.bfloat16
BLOCK = 128
# Three blocks a query: the paper does not print its mask, but its block-sparse times grow with the length alone.
NARROW = 2
LAYOUTS: dict[str, Callable[..., BlockLayout]] = {
    "butterfly": layouts.butterfly,
    "butterfly_narrow": functools.partial(layouts.butterfly, max_stride=NARROW, global_blocks=0),
}
DEFAULT = ("standard", "sdpa_cudnn", "portable", "hopper", *LAYOUTS, *approximate.NAMES)
LENGTHS = "128,256,512,1k,2k,4k,8k,16k,32k,64k"
HEADERS = ("N", "implementation", "keys a query", "fwd ms", "bwd ms", "both ms", "ns a token", "peak GiB", "note")
# Calls longer than this take part in one round only.
SLOW_MS = 200.0


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("approximate", arguments, device)
    report.content["settings"] = settings(arguments)
    deadline = time.monotonic() + 60 * arguments.minutes
    for seq_len in sorted(arguments.lengths, reverse=True):
        if time.monotonic() > deadline:
            say(f"--minutes {arguments.minutes:g} are over: lengths from {format_size(seq_len)} down are left out")
            break
        shape = Shape(arguments.batch, arguments.num_heads, seq_len, arguments.head_dim, causal=False)
        rows = measure(shape, arguments, device)
        report.rows.extend(rows)
        report.write()
        for row in rows:
            say("  ".join(str(cell) for cell in cells(row) if cell is not None))
        if any(gpu_is_lost(row["failed"]) for row in rows):
            return 1
    say("\n" + table(HEADERS, [cells(row) for row in sorted(report.rows, key=lambda row: row["seq_len"])]))
    report.finish()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join((*BUILDERS, *LAYOUTS, *approximate.NAMES))
    parser.add_argument("--implementations", type=names, default=list(DEFAULT), help=f"of {known}")
    parser.add_argument("--lengths", type=sizes, default=sizes(LENGTHS), help=f"({LENGTHS})")
    parser.add_argument("--batch", type=int, default=16, help="at all lengths (16)")
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.1, help="timed seconds a row, of three calls at least (0.1)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1.6, help="start no length after this long (1.6)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parse_arguments(parser, argv, "approximate")
    if arguments.dry_run:
        arguments.lengths, arguments.batch, arguments.num_heads, arguments.head_dim = [128, 256], 2, 2, 16
        arguments.seconds = 0.01
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "shape": f"batch {arguments.batch} at every length, {arguments.num_heads} heads x {arguments.head_dim}, "
        "bfloat16, without mask and dropout: tables 18 to 21 of the FlashAttention paper, which has float16",
        "peak_gib": "q, k, v and dout, and what one forward and one backward pass hold on top at their peak",
        "butterfly": f"fixed butterfly in blocks of {BLOCK}, all distances and a global block, by our fastest kernels",
        "butterfly_narrow": f"distances of 1 and {NARROW} blocks alone, no global block; the paper prints no mask",
        "compressed": f"local and Linformer: {approximate.COMPRESSED} keys a query, an eighth of N where that is less",
        "linformer": "gradients of its two projections are made too; they are shared by the heads",
        "approximations": "plain PyTorch, not compiled; not attention, but functions in its place",
        "checked": "out, dq, dk, dv against float64 of each one's own definition: 2 heads, the same length up to 2k",
    }


@dataclasses.dataclass(frozen=True)
class Peer:
    """A row of the table: what runs, what it computes by way of all pairs, and facts for the row."""

    implementation: Implementation
    definition: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    hidden: Tensor | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def peer(name: str, shape: Shape, device: torch.device, whole: bool = False) -> Peer:
    """The implementation called `name` for a shape; whole: with its mask as a matrix, for the check."""
    if name in approximate.NAMES:
        made = approximate.approximation(name, shape, device, DTYPE)
        return Peer(made.implementation, made.definition, facts={"keys_a_query": made.keys_a_query})
    if name not in LAYOUTS:
        return Peer(build(name, shape, device), facts={"keys_a_query": shape.seq_len})
    layout = LAYOUTS[name](shape.seq_len, BLOCK, device=device)
    plan = lower(layout, shape.batch, shape.seq_len, shape.seq_len, device)
    backend = choose_backend(
        "auto", torch.empty(1, 1, 1, shape.head_dim, dtype=DTYPE, device=device), False, plan.blocks
    )
    facts = {"keys_a_query": plan.density * shape.seq_len, "density": plan.density, "backend": backend}
    call = functools.partial(attention, mask=plan, backend=backend)
    return Peer(Implementation(name, call), hidden=~plan.dense(device)[0, 0] if whole else None, facts=facts)


def checked(name: str, shape: Shape, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The errors on a small shape; raises WrongResult."""
    small = dataclasses.replace(shape, batch=1, num_heads=2, seq_len=min(shape.seq_len, 2048))
    inputs = small.inputs(device, DTYPE, arguments.seed + 1)
    made = peer(name, small, device, whole=True)
    truth = Truth(*inputs, causal=False, hidden=made.hidden, definition=made.definition)
    with made.implementation.context():
        return check(Case(made.implementation, *inputs), truth)


def measure(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """One row for each implementation, taking turns."""
    inputs, watch = shape.inputs(device, DTYPE, arguments.seed), Stopwatch(device)
    rows, cases, call_ms = {}, {}, {}
    for name in arguments.implementations:
        rows[name] = {"implementation": name, **dataclasses.asdict(shape), "failed": None, "wrong": False}
        try:
            if name not in (*BUILDERS, *LAYOUTS, *approximate.NAMES):
                raise Unavailable("no implementation of that name; --help lists them")
            rows[name]["errors"] = checked(name, shape, arguments, device)
            made = peer(name, shape, device)
            case = Case(made.implementation, *inputs)
            with made.implementation.context():
                call_ms[name] = warm_up(case, watch)
                rows[name] |= made.facts | {"call_ms": call_ms[name]} | memory(case, watch)
            cases[name] = case
        except Exception as error:
            rows[name] |= {"failed": reason(error), "wrong": isinstance(error, WrongResult)}
        if device.type == "cuda":  # so that the next one finds room
            with contextlib.suppress(RuntimeError):  # where the GPU is lost
                torch.cuda.empty_cache()
    for slow in (False, True):
        some = {name: case for name, case in cases.items() if (call_ms[name] > SLOW_MS) == slow}
        rounds = 1 if slow else arguments.rounds
        for name, times in take_turns(some, watch, rounds, arguments.seconds, call_ms).items():
            finish(rows[name], times, shape)
    return list(rows.values())


def memory(case: Case, watch: Stopwatch) -> dict[str, float]:
    """Peak memory of a call in GiB; nothing on the CPU."""
    found, _ = one_call(case, watch)
    if "above_inputs_gib" not in found:
        return {}
    above, inputs = found["above_inputs_gib"], 4 * case.dout.nbytes / 2**30
    return {"peak_gib": inputs + above, "above_inputs_gib": above}


def finish(row: dict[str, Any], times: Times, shape: Shape) -> None:
    row["ms"], row["rounds_both_ms"] = times.summary(), times.rounds
    row["ns_a_token"] = 1e6 * row["ms"]["both"]["median"] / (shape.batch * shape.seq_len)


def cells(row: dict[str, Any]) -> list[object]:
    start = [format_size(row["seq_len"]), row["implementation"]]
    if row["failed"] is not None:
        return [*start, *[None] * 6, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    ms = (row["ms"][name]["median"] for name in ("forward", "backward", "both"))
    return [*start, round(row["keys_a_query"]), *ms, row["ns_a_token"], row.get("peak_gib"), row.get("backend")]


if __name__ == "__main__":
    sys.exit(main())
