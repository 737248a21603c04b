"""Attention's speed: implementations side by side, forward, backward and both, at a constant number of tokens.

    python scripts/benchmark_attention.py --implementations portable,sdpa_cudnn,sdpa_flash --lengths 1k,4k,16k

Each row is timed only after its out, dq, dk and dv have been compared with float64, on a moderate shape and on one head
of the shape that is timed; a wrong one gets no speed and makes the script end with 1. Implementations take turns, round
after round, so that a drifting clock meets all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring.attention import BUILDERS, PASSES, Case, Shape, build
from measuring.correctness import Truth, WrongResult, check
from measuring.environment import choose_device, state_under_load
from measuring.report import Report, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.timing import Stopwatch, Times, host_microseconds, one_call, time_round, warm_up

from flashtrain.config.sizes import format_size

HEADERS = ("d", "mask", "N", "implementation", "fwd", "bwd", "both TFLOP/s", "ms", "p25..p75", "GiB", "host us", "note")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("attention", arguments, device)
    report.content["settings"] = settings(arguments)
    deadline = time.monotonic() + 60 * arguments.minutes
    moderate: dict[tuple[Any, ...], Any] = {}
    for shape in shapes(arguments):
        if time.monotonic() > deadline:
            rows = [row_of(name, shape) | {"failed": "not run: out of time"} for name in arguments.implementations]
        else:
            rows = Group(shape, arguments, device, moderate).run()
        report.rows.extend(rows)
        report.write()
        for row in rows:
            say(line(row))
        if any(gpu_is_lost(row["failed"]) for row in rows):
            say("the GPU's context is lost; nothing more can run in this process")
            break
    say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
    report.finish()
    if arguments.plot is not None:
        from plot_benchmarks import plot

        plot(report.content, arguments.plot)
    return 1 if any(row["wrong"] for row in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "portable,standard,sdpa_cudnn,sdpa_flash"
    parser.add_argument(
        "--implementations", type=names, default=names(default), help=f"of {', '.join(BUILDERS)} ({default})"
    )
    parser.add_argument("--lengths", type=sizes, default=sizes("1k,4k,16k"), help="tokens a sequence (1k,4k,16k)")
    parser.add_argument("--head-dims", type=sizes, default=[64, 128], help="(64,128)")
    parser.add_argument("--masks", type=names, default=["causal", "full"], help="(causal,full)")
    parser.add_argument("--hidden", type=int, default=2048, help="heads x head_dim (2048)")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens a batch; longer sequences take fewer heads")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--seconds", type=float, default=1.0, help="timed seconds of an implementation a shape (1)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each implementation takes (3)")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no shape after this long (8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="also draw the rows into this PNG")
    arguments = parse_arguments(parser, argv, "attention")
    if unknown := sorted(set(arguments.masks) - {"causal", "full"}):
        parser.error(f"--masks {','.join(unknown)}: choose of causal, full")
    if arguments.dry_run:
        arguments.lengths, arguments.head_dims, arguments.hidden, arguments.tokens = [64], [16], 32, 64
        arguments.seconds, arguments.rounds = 0.02, 2
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "flops": "4 * batch * num_heads * seq_len^2 * head_dim, half when causal; backward 2.5 times, both 3.5 times",
        "dtype": arguments.dtype,
        "hidden": arguments.hidden,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "seconds_a_row": arguments.seconds,
        "seed": arguments.seed,
        "limits": "errors against float64, at most twice those of plain PyTorch in the same dtype plus one rounding",
    }


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Head dims, masks and lengths crossed, each with hidden / head_dim heads and `tokens` tokens a batch."""
    grid = itertools.product(arguments.head_dims, arguments.masks, arguments.lengths)
    result = []
    for head_dim, mask, seq_len in grid:
        num_heads = max(1, arguments.hidden // head_dim // max(1, seq_len // arguments.tokens))
        result.append(Shape(max(1, arguments.tokens // seq_len), num_heads, seq_len, head_dim, mask == "causal"))
    return result


def row_of(name: str, shape: Shape) -> dict[str, Any]:
    return {"implementation": name, **dataclasses.asdict(shape), "failed": None, "wrong": False}


class Group:
    """All implementations on one shape."""

    def __init__(
        self, shape: Shape, arguments: argparse.Namespace, device: torch.device, moderate: dict[tuple[Any, ...], Any]
    ) -> None:
        """moderate: what the checks on the moderate shape have found so far, shared by all groups."""
        self.shape, self.arguments, self.device, self.moderate = shape, arguments, device, moderate
        self.dtype = getattr(torch, arguments.dtype)
        self.watch = Stopwatch(device)
        self.rows = {name: row_of(name, shape) for name in arguments.implementations}
        self.times = {name: Times.none() for name in self.rows}
        self.cases: dict[str, Case] = {}
        self.call_ms: dict[str, float] = {}

    def run(self) -> list[dict[str, Any]]:
        """One row for each implementation; what fails is told in its row."""
        try:
            self.inputs = self.shape.inputs(self.device, self.dtype, self.arguments.seed)
            self.truth = Truth(*self.inputs, causal=self.shape.causal, last_head=True)
        except RuntimeError as error:
            return [row | {"failed": f"no reference: {reason(error)}"} for row in self.rows.values()]
        for name in self.rows:
            self.guarded(name, self.prepare)
        for turn in range(self.arguments.rounds):
            for name in list(self.cases)[:: 1 if turn % 2 == 0 else -1]:
                self.guarded(name, self.time)
        for name in list(self.cases):
            self.guarded(name, self.finish)
        if self.device.type == "cuda":
            self.cases.clear()
            torch.compiler.reset()
            with contextlib.suppress(RuntimeError):  # where the GPU is lost
                torch.cuda.empty_cache()
        return list(self.rows.values())

    def guarded(self, name: str, step: Callable[[str], None]) -> None:
        """Run a step; an implementation that fails takes no further part."""
        try:
            step(name)
        except Exception as error:
            self.rows[name]["failed"] = reason(error)
            self.rows[name]["wrong"] = isinstance(error, WrongResult)
            self.cases.pop(name, None)

    def prepare(self, name: str) -> None:
        """Build and check."""
        errors = {"moderate_shape": self.check_moderate(name)}
        implementation = build(name, self.shape, self.device)
        case = Case(implementation, *self.inputs)
        with implementation.context():
            self.call_ms[name] = warm_up(case, self.watch)
            errors["timed_shape_last_head"] = check(case, self.truth)
        self.rows[name]["errors"] = errors
        self.cases[name] = case

    def check_moderate(self, name: str) -> dict[str, Any]:
        """Errors on two heads of a length that no tile divides; once for each head dim and mask."""
        shape = dataclasses.replace(self.shape, batch=1, num_heads=2, seq_len=100 if self.arguments.dry_run else 1000)
        key = (shape.head_dim, shape.causal)
        if key not in self.moderate:
            inputs = shape.inputs(self.device, self.dtype, self.arguments.seed + 1)
            self.moderate[key] = inputs, Truth(*inputs, causal=shape.causal)
        if (name, *key) not in self.moderate:
            inputs, truth = self.moderate[key]
            implementation = build(name, shape, self.device)
            with implementation.context():
                self.moderate[name, *key] = check(Case(implementation, *inputs), truth)
        return self.moderate[name, *key]

    def time(self, name: str) -> None:
        case = self.cases[name]
        seconds = self.arguments.seconds / self.arguments.rounds
        with case.implementation.context():
            self.times[name].add(time_round(case, self.watch, seconds, self.call_ms[name]))

    def finish(self, name: str) -> None:
        """Memory, host time and the GPU's state, and the row."""
        case, row, times = self.cases[name], self.rows[name], self.times[name]
        with case.implementation.context():
            memory, _ = one_call(case, self.watch)
            row["host_us"] = host_microseconds(case, self.watch, self.call_ms[name])
            if not any("state" in row for row in self.rows.values()):  # once a shape
                row["state"] = state_under_load(self.device, case.forward_backward, self.call_ms[name])
        row["ms"] = times.summary()
        row["rounds_both_ms"] = times.rounds
        row["tflops"] = {p: self.shape.flops(p) / row["ms"][p]["median"] / 1e9 for p in PASSES}
        row["memory"] = {key: value for key, value in memory.items() if key.endswith("_gib")}


def line(row: dict[str, Any]) -> str:
    """A row in one line, as soon as it is there."""
    about = "d {} {} N {} {}".format(*cells(row)[:4])
    if row["failed"] is not None:
        return f"{about}: {cells(row)[-1]}"
    return f"{about}: " + " / ".join(f"{row['tflops'][name]:.1f}" for name in PASSES) + " TFLOP/s"


def cells(row: dict[str, Any]) -> list[object]:
    shape = [row["head_dim"], "causal" if row["causal"] else "full", format_size(row["seq_len"]), row["implementation"]]
    if row["failed"] is not None:
        return [*shape, *[None] * 7, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    ms, host = row["ms"]["both"], row["host_us"]
    return [
        *shape,
        *(round(row["tflops"][name], 1) for name in PASSES),
        ms["median"],
        f"{ms['p25']:.3f}..{ms['p75']:.3f}",
        row["memory"].get("above_inputs_gib"),
        f"{host['forward']:.0f}+{host['backward']:.0f}",
        " ".join(f"{key.split('.')[-1]} {value}" for key, value in row.get("state", {}).items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
