"""Attention's memory: forward and backward on GPT-2 small's heads (12 x 64, batch 1) at growing lengths, each
implementation until it runs out of memory or of time.

    python scripts/benchmark_memory.py --implementations standard,portable --lengths 4k,8k,16k,32k,48k,64k,256k,1M
    python scripts/benchmark_memory.py --window 8

With --window the attention is block-sparse: the first blocks and so many before the own one, in blocks of 128.

Memory is that of one call, after a few at the first length to load the kernels. Calls of less than 100 ms are timed
again, several of them. out, dq, dk and dv are compared with float64 at the last positions of the last head. A wrong one
gets no figures and makes the script end with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
import time
from typing import Any

import torch
from measuring.attention import BUILDERS, Case, Implementation, Shape, build
from measuring.blocks import hidden_keys
from measuring.correctness import Truth, WrongResult, poison
from measuring.environment import choose_device
from measuring.report import Report, Unavailable, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.timing import Stopwatch, one_call, spread, time_round, warm_up

from flashtrain.attention import BACKENDS, BlockLayout, Causal, Plan, attention, layouts, lower
from flashtrain.config.sizes import format_size

HEADERS = ("implementation", "N", "peak GiB", "above inputs", "bytes a token", "fwd ms", "bwd ms", "TFLOP/s", "note")
LENGTHS = "4k,8k,16k,32k,48k,64k,128k,256k,512k,1M"
# Lengths from here on have left fixed costs behind.
LINEAR_FROM = 16384
BLOCK = 128
QUICK_MS = 100.0  # calls below this are timed several times


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("memory" if arguments.window is None else "memory_sparse", arguments, device)
    report.content["settings"] = settings(arguments)
    for name in arguments.implementations:
        rows = measure(name, arguments, device)
        report.rows.extend(rows)
        report.content.setdefault("bytes_a_token", {})[name] = linearity(rows, "bytes_a_token")
        report.content.setdefault("ns_a_token", {})[name] = linearity(rows, "ns_a_token")
        report.write()
        if any(gpu_is_lost(row["failed"]) for row in rows):
            say("the GPU's context is lost; nothing more can run in this process")
            break
    say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
    for key, unit in (("bytes_a_token", "bytes"), ("ns_a_token", "ns")):
        for name, found in report.content[key].items():
            if found is not None:
                low, high = found["lowest"], found["highest"]
                say(f"{name}: {low:,.0f} to {high:,.0f} {unit} a token from {format_size(LINEAR_FROM)} tokens on")
    report.finish()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {
        "shape": f"batch 1, {arguments.num_heads} heads x {arguments.head_dim}, causal, bfloat16",
        "call": "one forward and one backward pass; inputs are q, k, v and dout",
        "checked": f"out, dq, dk, dv of the last {arguments.tail} positions of the last head, at every length",
    }
    if arguments.window is not None:
        seen = f"the first {arguments.sinks} and {arguments.window} before the own one"
        found["shape"] += f", local + sinks: blocks of {BLOCK}, {seen}"
        found["lists"] = "build_ms: making the layout and lowering it, on an idle GPU; bytes: both directions"
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(BUILDERS)
    default = "standard,portable; with --window: hopper,portable"
    parser.add_argument("--implementations", type=names, help=f"of {known} ({default})")
    parser.add_argument("--window", type=int, help=f"blocks of {BLOCK} that are seen before the own one (all)")
    parser.add_argument("--sinks", type=int, default=1, help="with --window: the first so many blocks are seen too (1)")
    parser.add_argument("--lengths", type=sizes, default=sizes(LENGTHS), help=f"growing ({LENGTHS})")
    parser.add_argument("--num-heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="skip lengths whose call would take longer (60)")
    parser.add_argument("--tail", type=int, default=256, help="positions that are compared with float64 (256)")
    arguments = parse_arguments(parser, argv, "memory")
    arguments.lengths = sorted(arguments.lengths)
    if arguments.implementations is None:
        arguments.implementations = names("standard,portable" if arguments.window is None else "hopper,portable")
    if arguments.dry_run:
        lengths = [32, 64, 128] if arguments.window is None else [256, 512, 1024]
        arguments.lengths, arguments.num_heads, arguments.head_dim, arguments.tail = lengths, 2, 16, 16
    return arguments


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """One row a length. After the first failure longer lengths are not tried."""
    rows: list[dict[str, Any]] = []
    failed, expected_ms = None, 0.0
    for index, seq_len in enumerate(arguments.lengths):
        shape = Shape(1, arguments.num_heads, seq_len, arguments.head_dim, causal=True)
        row = {"implementation": name, **dataclasses.asdict(shape), "failed": None, "wrong": False}
        rows.append(row)
        if index:  # time grows with the square of the length, or with the length
            expected_ms *= (seq_len / arguments.lengths[index - 1]) ** (2 if arguments.window is None else 1)
        if failed is not None:
            row["failed"] = f"not tried: {failed}"
            continue
        if expected_ms > 1000 * arguments.seconds:
            failed = row["failed"] = f"would take about {expected_ms / 1000:.0f} s"
            continue
        try:
            row.update(measure_length(name, shape, arguments, device, load=index == 0))
            expected_ms = row["forward_ms"] + row["backward_ms"]
        except Exception as error:
            row["failed"], row["wrong"] = reason(error), isinstance(error, WrongResult)
            failed = f"{row['failed']} at {format_size(seq_len)}"
        release(device)
        say(line(row))
    return rows


def measure_length(
    name: str, shape: Shape, arguments: argparse.Namespace, device: torch.device, load: bool
) -> dict[str, Any]:
    """Run once, measure, and compare the results; raises WrongResult."""
    layout = plan = None
    about: dict[str, Any] = {}
    if arguments.window is None:
        implementation = build(name, shape, device, must_fit=False)
    else:
        layout, plan, about = lists(shape, arguments, device)
        implementation = sparse(name, plan)
    case = Case(implementation, *shape.inputs(device, torch.bfloat16, seed=1))
    watch = Stopwatch(device)
    with implementation.context():
        if load or layout is not None:
            warm_up(case, watch)
        poison(case)
        figures, results = one_call(case, watch)
        ms = figures["forward_ms"] + figures["backward_ms"]
        if ms < QUICK_MS:
            times = time_round(case, watch, 0.1, ms)
            about["ms"] = {key: spread(values) for key, values in times.items()}
            figures |= {f"{key}_ms": about["ms"][key]["median"] for key in ("forward", "backward")}
    q, k, v = (x.detach() for x in case.inputs)
    hidden = None if layout is None else hidden_keys(layout, arguments.tail)
    truth = Truth(q, k, v, case.dout, causal=True, hidden=hidden, last_head=True, tail=arguments.tail)
    found: dict[str, Any] = {**figures, **about, "errors": truth.require(results)}
    if "above_inputs_gib" in found:
        found["bytes_a_token"] = found["above_inputs_gib"] * 2**30 / shape.seq_len
    ms = found["forward_ms"] + found["backward_ms"]
    found["ns_a_token"] = 1e6 * ms / shape.seq_len
    flops = shape.flops("both") * (1 if plan is None else 2 * plan.density)  # a causal shape counts half of the pairs
    found["tflops"] = flops / ms / 1e9
    return found


def lists(
    shape: Shape, arguments: argparse.Namespace, device: torch.device
) -> tuple[BlockLayout, Plan, dict[str, Any]]:
    """Local attention with sinks, its plan, and what that took."""

    def build_once() -> tuple[BlockLayout, Plan]:
        sizes = {"window": arguments.window, "sinks": arguments.sinks}
        layout = layouts.window_sinks(shape.seq_len, BLOCK, device=device, **sizes)
        return layout, lower(Causal() & layout, 1, shape.seq_len, shape.seq_len, device)

    build_once()
    watch = Stopwatch(device)
    watch.wait()
    start = time.perf_counter()
    layout, plan = build_once()
    watch.wait()
    ms = 1000 * (time.perf_counter() - start)
    assert plan.q_lists is not None and plan.k_lists is not None
    bytes_held = plan.q_lists.nbytes + plan.k_lists.nbytes
    return layout, plan, {"density": plan.density, "lists": {"build_ms": ms, "bytes": bytes_held}}


def sparse(name: str, plan: Plan) -> Implementation:
    if name not in BACKENDS:
        raise Unavailable(f"block layouts are for {', '.join(BACKENDS)}")
    return Implementation(name, functools.partial(attention, mask=plan, backend=name))


def linearity(rows: list[dict[str, Any]], key: str) -> dict[str, float] | None:
    """Lowest and highest of a figure that is the same for all lengths where it is linear in length: memory above the
    inputs a token, in bytes, or time a token."""
    measured = [row for row in rows if row["failed"] is None and key in row]
    long = [row[key] for row in measured if row["seq_len"] >= LINEAR_FROM]
    return {"lowest": min(long), "highest": max(long)} if long else None


def release(device: torch.device) -> None:
    """Give everything back, so that the next length starts from an empty GPU."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # the GPU is lost, as the next row will say
            say(reason(error))


def line(row: dict[str, Any]) -> str:
    """A row in one line, as soon as it is there."""
    about = f"{row['implementation']} N {format_size(row['seq_len'])}"
    if row["failed"] is not None:
        return f"{about}: {row['failed']}"
    seconds = (row["forward_ms"] + row["backward_ms"]) / 1000
    return f"{about}: {row.get('peak_gib', 0):.2f} GiB, {seconds:.3f} s, {row['tflops']:.1f} TFLOP/s"


def cells(row: dict[str, Any]) -> list[object]:
    start = [row["implementation"], format_size(row["seq_len"])]
    if row["failed"] is not None:
        return [*start, *[None] * 6, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    per_token = row.get("bytes_a_token")
    return [
        *start,
        row.get("peak_gib"),
        row.get("above_inputs_gib"),
        None if per_token is None else round(per_token),
        row["forward_ms"],
        row["backward_ms"],
        round(row["tflops"], 1),
        None,
    ]


if __name__ == "__main__":
    sys.exit(main())
