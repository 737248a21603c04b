"""What tiling, online softmax and recomputation save: the bytes that standard and flash attention move, by the
profiler and by theory, over sequence length; and bytes and time of the plain Triton forward kernel over its tile size
(as in the FlashAttention paper, figure 2, middle).

    python scripts/benchmark_traffic.py

By default 65,536 tokens a batch in 16 heads of 64, causal, bfloat16: at N 1024 that is the paper's GPT-2 medium. Every
case is compared with float64 first; a wrong one gets no figures and makes the script end with 1. Then Nsight Compute
counts, in one run for each set of counters, where it is installed and may; else the rows say why not.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring.attention import BUILDERS, Shape
from measuring.correctness import Truth, WrongResult, check
from measuring.environment import choose_device, state_under_load
from measuring.report import Report, Unavailable, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.timing import Stopwatch, spread, take_turns, warm_up
from measuring.traffic import BOTH, measure_all, profiled_calls
from measuring.traffic_cases import SWEEP, TINY, Point, name_of, resources

from flashtrain.attention.portable.configs import Config, generation_of, table_entry
from flashtrain.config.sizes import format_size

HEADERS = ("case", "N", "fwd ms", "bwd ms", "HBM GB fwd", "theory", "bwd", "theory", "L2 GB", "theory", "note")
LENGTHS, TILE_LENGTHS = "512,1k,2k,4k,8k,16k,32k,64k", "1k,2k,4k,8k"
ROUNDS = 2


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    groups = points(arguments)
    if arguments.profiled is not None:
        called = [point for group in groups for point in group if point.name in arguments.profiled]
        make = [(p.name, p.passes, functools.partial(p.case, device)) for p in called]
        profiled_calls(make, 0.7 * arguments.ncu_seconds)
        return 0
    report = Report("traffic", arguments, device)
    report.content["settings"] = settings(arguments)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    configs = table_entry(generation_of(*capability), arguments.head_dim, 2)
    deadline = time.monotonic() + 60 * arguments.minutes
    for group in groups:
        rows = {point.name: point.row(configs) for point in group}
        report.rows.extend(rows.values())
        if time.monotonic() > deadline:
            fail(rows, "not run: out of time")
            continue
        run(group, rows, arguments, device)
        report.write()
        gc.collect()
        if any(gpu_is_lost(row["failed"]) for row in rows.values()):
            say("the GPU's context is lost; nothing more can run in this process")
            break
        if device.type == "cuda":  # the next length and the profiled process need the memory
            torch.cuda.empty_cache()
    if not arguments.no_traffic:
        count(report, arguments)
    for row in report.rows:
        if row["tile"] is not None and row["failed"] is None:
            row["resources"] = resources(Config(**row["tile"]), 10 * capability[0] + capability[1], row["head_dim"])
    say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
    report.finish()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "standard,portable,hopper"
    parser.add_argument(
        "--implementations", type=names, default=names(default), help=f"of {', '.join(BUILDERS)} ({default})"
    )
    parser.add_argument("--lengths", type=sizes, default=sizes(LENGTHS), help=f"tokens a sequence ({LENGTHS})")
    parser.add_argument("--tile-lengths", type=sizes, default=sizes(TILE_LENGTHS), help=f"for tiles ({TILE_LENGTHS})")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens a batch, or one sequence (65536)")
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64, choices=(64, 128))
    parser.add_argument("--mask", default="causal", choices=("causal", "full"))
    parser.add_argument("--seconds", type=float, default=0.2, help="timed seconds of a case (0.2)")
    parser.add_argument("--minutes", type=float, default=4.0, help="start no length after this long (4)")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command line (ncu)")
    parser.add_argument("--ncu-seconds", type=float, default=90.0, help="longest a profiled run may take (90)")
    parser.add_argument("--no-traffic", action="store_true", help="time only")
    parser.add_argument("--profiled", type=names, metavar="CASES", help="make the calls that are profiled, only")
    arguments = parse_arguments(parser, argv, "traffic")
    arguments.given = sys.argv[1:] if argv is None else argv
    if arguments.dry_run:
        arguments.lengths, arguments.tile_lengths, arguments.tokens, arguments.num_heads = [32, 64], [32], 32, 1
        arguments.seconds = 0.01
        arguments.no_traffic = arguments.no_traffic or arguments.ncu == "ncu"
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "mask": arguments.mask,
        "shape": f"{arguments.tokens:,} tokens, {arguments.num_heads} heads x {arguments.head_dim}",
        "seconds_a_case": arguments.seconds,
        "traffic": "Nsight Compute, caches emptied before each kernel; read_gb, written_gb: dram__bytes_read.sum, "
        "dram__bytes_write.sum; asked_gb: 32 x lts__t_sectors_srcunit_tex.sum, between L2 and multiprocessors. Not "
        "counted: copies that the driver makes, and what a kernel's end leaves in L2 to be written later",
        "least": "q, k, v (backward also out, dout) read once, results written once",
        "theory": "read_gb, written_gb: each kernel reads and writes each of its tensors once; asked_gb: every tile "
        "that is loaded, stored or added; copied_gb: read and written by the driver's copies",
    }


def points(arguments: argparse.Namespace) -> list[list[Point]]:
    """A group for each length: the implementations, then the tiles."""
    result = []
    for seq_len in sorted({*arguments.lengths, *arguments.tile_lengths}):
        batch = max(1, arguments.tokens // seq_len)
        shape = Shape(batch, arguments.num_heads, seq_len, arguments.head_dim, arguments.mask == "causal")
        group = [Point(name, shape) for name in arguments.implementations if seq_len in arguments.lengths]
        if seq_len in arguments.tile_lengths:
            group += [Point(name_of(c), shape, c) for c in (TINY if arguments.dry_run else SWEEP)]
        result.append(group)
    return result


def run(
    group: list[Point], rows: dict[str, dict[str, Any]], arguments: argparse.Namespace, device: torch.device
) -> None:
    """Compare every case of a length with float64, then time those that are right, in turns."""
    watch, cases, call_ms = Stopwatch(device), {}, {}
    try:
        inputs = group[0].shape.inputs(device, torch.bfloat16, seed=1)
        truth = Truth(*inputs, causal=group[0].shape.causal, last_head=True)
    except RuntimeError as error:
        fail(rows, f"no reference: {reason(error)}")
        return
    for point in group:
        row = rows[point.name]
        try:
            case = point.case(device, inputs)
            with case.implementation.context():
                call_ms[point.name] = warm_up(case, watch)
                row["errors"] = check(case, truth)
            cases[point.name] = case
        except Exception as error:  # told in its row, and the others go on
            row["failed"], row["wrong"] = reason(error), isinstance(error, WrongResult)
            say(f"{point.name}: {row['failed']}")
            if gpu_is_lost(row["failed"]):
                return
    try:
        timed = take_turns(cases, watch, ROUNDS, arguments.seconds, call_ms)
    except RuntimeError as error:
        fail({name: rows[name] for name in cases}, reason(error))
        return
    for name, times in timed.items():
        wanted = ("forward",) if rows[name]["tile"] is not None else (*BOTH, "both")
        rows[name]["failed"] = None
        rows[name]["ms"] = {passed: spread(times.by_pass[passed]) for passed in wanted}
        say(f"{name}: " + ", ".join(f"{passed} {rows[name]['ms'][passed]['median']:.3f} ms" for passed in wanted))
    if cases:  # once a length
        name, case = list(cases.items())[-1]
        rows[name]["state"] = state_under_load(device, case.forward_backward, call_ms[name])


def fail(rows: dict[str, dict[str, Any]], why: str) -> None:
    for row in rows.values():
        row["failed"] = why


def count(report: Report, arguments: argparse.Namespace) -> None:
    """Traffic into the rows that are right. What standard attention asks of L2 is the libraries' affair, so its large
    matrices go through the profiler with the two counters of HBM alone."""
    for cache in (True, False):
        rows = {f"{row['implementation']}@{row['seq_len']}": row for row in report.rows if row["failed"] is None}
        wanted = {name: row for name, row in rows.items() if name.startswith("standard") != cache}
        if not wanted:
            continue
        try:
            found, missing = profile(list(wanted), arguments, cache)
        except Exception as error:
            found, missing = {}, dict.fromkeys(wanted, reason(error))
            say(f"traffic not measured: {reason(error)}")
        for name, row in wanted.items():
            if name in found:
                row["traffic"] = found[name]
            else:
                row["traffic_missing"] = missing.get(name, "the profiled run did not come to it")
        report.write()


def profile(names: list[str], arguments: argparse.Namespace, cache: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """What was counted by case, and why not; without L2's counters where the profiler does not know them."""
    options = [*arguments.given, "--profiled", ",".join(names)]
    measured = functools.partial(measure_all, arguments.ncu, Path(__file__).resolve(), options, arguments.ncu_seconds)
    try:
        return measured(cache)
    except Unavailable as error:
        if not cache or "counted nothing" not in str(error):
            raise
        say(f"once more without the counters of L2: {error}")
        return measured(False)


def cells(row: dict[str, Any]) -> list[object]:
    start = [row["implementation"], format_size(row["seq_len"])]
    if row["failed"] is not None:
        return [*start, *[None] * 8, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    ms = [row["ms"][name]["median"] if name in row["ms"] else None for name in BOTH]
    moved = [row.get(kind) or {} for kind in ("traffic", "theory")]
    hbm = [gigabytes(counts.get(name)) for name in BOTH for counts in moved]
    l2 = [counts.get("both", {}).get("asked_gb") for counts in moved]
    return [*start, *ms, *hbm, *l2, row.get("traffic_missing")]


def gigabytes(counts: dict[str, Any] | None) -> float | None:
    return None if counts is None else counts["read_gb"] + counts["written_gb"]


if __name__ == "__main__":
    sys.exit(main())
