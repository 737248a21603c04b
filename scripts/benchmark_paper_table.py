"""The table of the FlashAttention paper (figure 2, left): GPT-2 medium's attention, standard and fused, by FLOPs, HBM
traffic and time. N 1024, head dim 64, 16 heads, batch 64, causal, forward and backward, in bfloat16.

    python scripts/benchmark_paper_table.py

Traffic is counted by Nsight Compute where `ncu` is installed and may read the counters, else the table says why not.
Beside it stands the least possible: read q, k, v for the forward pass and q, k, v, out, dout for the backward pass,
write out, dq, dk and dv.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from measuring.attention import BUILDERS, Case, Shape, build
from measuring.correctness import Truth, WrongResult, check
from measuring.environment import choose_device, state_under_load
from measuring.report import Report, gpu_is_lost, names, parse_arguments, reason, say, table
from measuring.theory import least
from measuring.timing import Stopwatch, Times, time_round, warm_up
from measuring.traffic import measure, profiled_call

PAPER = Shape(batch=64, num_heads=16, seq_len=1024, head_dim=64, causal=True)
HEADERS = ("implementation", "GFLOPs", "GB read", "written", "both", "fwd ms", "bwd ms", "both ms", "p25..p75", "note")
# Matrix products of both passes: standard attention has 2 + 4 over all pairs, a fused one 2 + 5 over visible pairs.
STANDARD_PRODUCTS, FUSED_PRODUCTS = 6, 7


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    shape = Shape(2, 2, 64, 16, True) if arguments.dry_run else PAPER
    if arguments.profiled is not None:
        implementation = build(arguments.profiled, shape, device)
        profiled_call(Case(implementation, *shape.inputs(device, torch.bfloat16, seed=1)))
        return 0
    report = Report("paper_table", arguments, device)
    report.content["settings"] = {
        **dataclasses.asdict(shape),
        "dtype": "bfloat16",
        "gflops": "products that the algorithm makes: standard 6 over all pairs, fused 7 over the visible pairs",
        "traffic": "Nsight Compute: dram__bytes_read.sum and dram__bytes_write.sum over all kernels of a pass",
    }
    report.content["least_traffic"] = least_traffic(shape)
    report.rows.extend(time_rows(arguments, shape, device))
    report.write()
    for row in report.rows:
        if row["failed"] is None and not arguments.no_traffic:
            try:
                row["traffic"] = traffic(row["implementation"], arguments)
            except Exception as error:
                row["traffic_missing"] = reason(error)
                say(f"HBM traffic of {row['implementation']} not measured: {row['traffic_missing']}")
            report.write()
    show(report)
    report.finish()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "standard,portable,sdpa_flash,sdpa_cudnn"
    parser.add_argument(
        "--implementations", type=names, default=names(default), help=f"of {', '.join(BUILDERS)} ({default})"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="timed seconds of an implementation (1.5)")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command line (ncu)")
    parser.add_argument("--ncu-seconds", type=float, default=120.0, help="longest a profiled run may take (120)")
    parser.add_argument("--no-traffic", action="store_true", help="time only")
    parser.add_argument("--profiled", metavar="NAME", help="make the one call that is profiled, and nothing else")
    arguments = parse_arguments(parser, argv, "paper_table")
    if arguments.dry_run:
        arguments.seconds = 0.02
    return arguments


def time_rows(arguments: argparse.Namespace, shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """Time in turns, each after its results have been compared with float64 on the last head."""
    rows = {name: {"implementation": name, "failed": None, "wrong": False} for name in arguments.implementations}
    inputs = shape.inputs(device, torch.bfloat16, seed=1)
    truth = Truth(*inputs, causal=shape.causal, last_head=True)
    watch, cases, call_ms, times = Stopwatch(device), {}, {}, {}
    for turn in range(3):
        for name, row in rows.items():
            if row["failed"] is not None:
                continue
            try:
                if turn == 0:
                    implementation = build(name, shape, device)
                    cases[name], times[name] = Case(implementation, *inputs), Times.none()
                with cases[name].implementation.context():
                    if turn == 0:
                        call_ms[name] = warm_up(cases[name], watch)
                        row["errors"] = check(cases[name], truth)
                    times[name].add(time_round(cases[name], watch, arguments.seconds / 3, call_ms[name]))
                    if turn == 2:
                        row["state"] = state_under_load(device, cases[name].forward_backward, call_ms[name])
            except Exception as error:
                row["failed"], row["wrong"] = reason(error), isinstance(error, WrongResult)
                say(f"{name}: {row['failed']}")
                if gpu_is_lost(row["failed"]):
                    return list(rows.values())
    for name, row in rows.items():
        row["gflops"] = gflops(name, shape)
        if row["failed"] is None:
            row["ms"], row["rounds_both_ms"] = times[name].summary(), times[name].rounds
    return list(rows.values())


def traffic(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    options = ["--profiled", name, "--device", arguments.device, *(["--dry-run"] if arguments.dry_run else [])]
    return measure(arguments.ncu, Path(__file__).resolve(), options, arguments.ncu_seconds)


def gflops(name: str, shape: Shape) -> float:
    """What the algorithm computes, both passes, in 1e9 operations; standard attention computes hidden pairs too."""
    product = 2e-9 * shape.batch * shape.num_heads * shape.seq_len**2 * shape.head_dim
    if name.startswith("standard"):
        return STANDARD_PRODUCTS * product
    return FUSED_PRODUCTS * product * (0.5 if shape.causal else 1.0)


def least_traffic(shape: Shape) -> dict[str, float]:
    """GB that any algorithm moves that starts from q, k, v, dout in HBM and leaves out, dq, dk, dv there."""
    both = least(shape)["both"]
    return {**both, "both_gb": both["read_gb"] + both["written_gb"]}


def show(report: Report) -> None:
    least = report.content["least_traffic"]
    rows = [cells(row) for row in report.rows]
    rows.append(["least possible", None, least["read_gb"], least["written_gb"], least["both_gb"], *[None] * 5])
    say("\n" + table(HEADERS, rows))
    timed = {row["implementation"]: row["ms"]["both"]["median"] for row in report.rows if row["failed"] is None}
    for name, ms in timed.items():
        if "standard" in timed and name != "standard":
            say(f"{name}: {timed['standard'] / ms:.1f} times as fast as standard")


def cells(row: dict[str, Any]) -> list[object]:
    if row["failed"] is not None:
        return [row["implementation"], *[None] * 8, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    counted = row.get("traffic", {}).get("both")
    gigabytes = [None] * 3
    if counted is not None:
        gigabytes = [counted["read_gb"], counted["written_gb"], counted["read_gb"] + counted["written_gb"]]
    ms = row["ms"]
    return [
        row["implementation"],
        round(row["gflops"], 1),
        *gigabytes,
        *(ms[name]["median"] for name in ("forward", "backward", "both")),
        f"{ms['both']['p25']:.3f}..{ms['both']['p75']:.3f}",
        "traffic not measured" if counted is None else None,
    ]


if __name__ == "__main__":
    sys.exit(main())
