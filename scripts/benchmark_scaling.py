"""Training on several GPUs of one host: whole steps of train.py's own task and trainer on 1, 2, 4 and 8 of them.

    python scripts/benchmark_scaling.py --lengths 64k,256k
    python scripts/benchmark_scaling.py --lengths 1M --meshes 1,context:2:ring --also benchmarks/scaling.json
    python scripts/benchmark_scaling.py --meshes 1,ddp:2,context:2:ring --same-loss 50

A mesh says how GPUs share the work: 1, ddp:2, fsdp:2, context:2:ring, context:2:ulysses (one sequence on two GPUs), 2x2
(two sequences, each on two GPUs). Rows of ddp and fsdp have a sequence a step for each GPU. Efficiency is tokens/s over
n times those of one GPU with one sequence, of the same call where it has that row.

Each row is a fresh group of processes. One that crashes or hangs is a row with its reason.

--same-loss trains on text through train.py instead: the same run on one GPU and on each mesh, with its losses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from measuring.environment import choose_device
from measuring.longest import MODELS
from measuring.process import tell_row
from measuring.report import Report, names, parse_arguments, reason, say, sizes, table
from measuring.scaling import Amount, measure, scaled_config
from measuring.scaling_losses import add_same_loss
from measuring.scaling_meshes import FORMS, Mesh, as_dict, heads_fit, meshes, usual
from measuring.scaling_processes import NOT_RUN, Job, run_all, wait_for_go
from measuring.training import GPT2_VOCAB

from flashtrain.config.sizes import format_size

HEADERS = (
    *("N", "model", "mesh", "seq", "tokens/s", "speed-up", "effic.", "step ms", "p25..p75", "forecast"),
    *("GiB", "forecast", "comm", "exposed", "loss", "note"),
)
VOCAB_OF_DRY_RUN = 320
CPU_PROCESSES = 8  # that a mesh may have where there is no GPU


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.row is not None:
        row(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that no row's processes are left behind
    device = choose_device(arguments.device)
    report = Report("scaling", arguments, device)
    report.content |= {"settings": settings(arguments), "calls": []}
    if arguments.also is not None:
        earlier = json.loads(arguments.also.read_text())
        report.content |= {key: earlier[key] for key in ("calls", "same_loss") if key in earlier}
        report.rows.extend(found for found in earlier["rows"] if not (found["failed"] or "").startswith(NOT_RUN))
    report.content["calls"].append(arguments.command)
    gpus = torch.cuda.device_count() if device.type == "cuda" else CPU_PROCESSES
    deadline = time.monotonic() + 60 * arguments.minutes
    ok = add_same_loss(report, arguments, gpus, deadline) if arguments.same_loss else True
    if not arguments.same_loss:
        add_rows(report, arguments, gpus, deadline)
    if report.rows:
        say("\n" + table(HEADERS, [cells(found) for found in report.rows]))
    report.finish()
    call = len(report.content["calls"])
    return 0 if ok and not any(found["failed"] for found in report.rows if found["call"] == call) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=["gpt2", "gpt_1.3b"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--lengths", type=sizes, default=sizes("64k,256k,1M"), help="(64k,256k,1M)")
    parser.add_argument("--meshes", help=f"with commas, each one of {FORMS} (all that the GPUs here allow)")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of conf/, for all rows")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed, 1 or more (2)")
    parser.add_argument("--least", type=int, default=2, help="timed steps of a row at least (2)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a row at most (10)")
    parser.add_argument("--seconds", type=float, default=6.0, help="timed seconds of a row, where steps are short (6)")
    parser.add_argument("--side-by-side", action="store_true", help="rows of one GPU at the same time, one on each")
    parser.add_argument("--same-loss", type=int, default=0, metavar="STEPS", help="compare losses of so many steps")
    parser.add_argument("--also", type=Path, help="JSON of an earlier call, whose rows come first")
    parser.add_argument("--row-seconds", type=float, default=240.0, help="longest a row may take in all (240)")
    parser.add_argument("--minutes", type=float, default=9.0, help="end all rows after this long (9)")
    parser.add_argument("--row", metavar="MESH", help="be a process of one row: first model, first length")
    parser.add_argument("--ahead", action="store_true", help="with --row: imported ahead, wait until told to begin")
    arguments = parse_arguments(parser, argv, "scaling")
    if arguments.dry_run and arguments.row is None:
        arguments.meshes = arguments.meshes or ",".join(mesh.text for mesh in usual(2))
        arguments.lengths, arguments.models, arguments.device = [64], arguments.models[:1], "cpu"
        arguments.steps, arguments.seconds, arguments.same_loss = 3, 0.1, min(arguments.same_loss, 4)
    try:
        arguments.meshes = meshes(arguments.meshes or "")
        arguments.row = None if arguments.row is None else Mesh.parse(arguments.row)
    except ValueError as error:
        parser.error(str(error))
    if unknown := [model for model in arguments.models if model not in MODELS]:
        parser.error(f"--models {','.join(unknown)}: there are {', '.join(MODELS)}")
    if min(arguments.warm_up, arguments.least) < 1:
        parser.error("--warm-up and --least: 1 or more")
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "step": "forward, backward, clipping to norm 1, fused AdamW; bfloat16 autocast; random tokens from the host; "
        "a micro-batch of one sequence",
        "models": {name: "layers {}, heads {}, width {}, rotary positions".format(*MODELS[name]) for name in MODELS},
        "tokens_per_second": "of all GPUs together, all timed steps; step_ms: of the slowest process",
        "efficiency": "tokens/s over n times those of one GPU with one sequence a step; efficiency_of: in which call. "
        "context meshes have that sequence on n GPUs (strong), ddp and fsdp n sequences (weak), DxC D of them",
        "peak_gib": "allocated at most, of the GPU with most; device_gib: in use there, with NCCL and the context",
        "communication": "share of a profiled step in which NCCL's kernels run, waiting for others included; exposed: "
        "in which nothing else runs beside; means over GPUs",
        "loss": "of step loss_of_step, in losses those up to it; equal sequences give equal ones but for rounding",
        "side_by_side": arguments.side_by_side,
        "overrides": arguments.override,
    }


def add_rows(report: Report, arguments: argparse.Namespace, gpus: int, deadline: float) -> None:
    """Measure every length, model and mesh, as far as there are GPUs and time."""
    wanted = [
        (seq_len, model, mesh)
        for seq_len in arguments.lengths
        for model in arguments.models
        for mesh in arguments.meshes or [m for m in usual(gpus) if heads_fit(m, MODELS[model][1])]
    ]
    call, overrides = len(report.content["calls"]), arguments.override
    if arguments.side_by_side:  # those of one GPU of all models together
        wanted.sort(key=lambda each: (each[0], each[2].devices > 1))
    about = [
        {"model": model, "seq_len": seq_len, **as_dict(mesh), "overrides": overrides, "call": call, "failed": None}
        for seq_len, model, mesh in wanted
    ]

    def add(found: dict[str, Any]) -> None:
        report.rows.append(found)
        add_efficiency(report.rows)
        report.write()
        say(line(found))

    for each in about:
        if each["devices"] > gpus:
            add({**each, "failed": f"{NOT_RUN}: {gpus} GPUs here"})
    possible = [each for each in about if each["devices"] <= gpus]
    jobs = [Job(command(each, arguments), each["devices"]) for each in possible]
    run_all(
        jobs, gpus, arguments.side_by_side, lambda: min(arguments.row_seconds, deadline - time.monotonic()),
        lambda number, found: add({**possible[number], **found}),
    )  # fmt: skip


def command(about: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """What each process of a row runs."""
    found = [sys.executable, str(Path(__file__).resolve()), "--row", about["mesh"], "--ahead"]
    found += ["--models", about["model"], "--lengths", str(about["seq_len"]), "--device", arguments.device]
    for name in ("warm_up", "least", "steps", "seconds"):
        found += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    found += ["--dry-run"] if arguments.dry_run else []
    for override in arguments.override:
        found += ["--override", override]
    return found


def row(arguments: argparse.Namespace) -> NoReturn:
    """Be one of the processes of a row; each tells what it found, and the first one's is taken if all were well."""
    if arguments.ahead:
        wait_for_go()
    amount = Amount(arguments.warm_up, arguments.least, arguments.steps, arguments.seconds)
    vocab, on_cpu = VOCAB_OF_DRY_RUN if arguments.dry_run else GPT2_VOCAB, arguments.device == "cpu"
    model, seq_len = arguments.models[0], arguments.lengths[0]
    try:
        config = scaled_config(model, seq_len, arguments.row, arguments.override, arguments.dry_run, on_cpu)
        tell_row(measure(config, vocab, amount))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        tell_row({"failed": reason(error)})
        os._exit(1)  # the others may never come to where the interpreter would wait for them
    os._exit(0)


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """Beside one GPU of the same model, length and overrides: of the same call, else of another one."""
    alone: dict[tuple[object, ...], dict[str, Any]] = {}
    for found in rows:
        if found["devices"] == 1 and found["failed"] is None:
            key = found["model"], found["seq_len"], tuple(found["overrides"])
            alone[key] = alone[*key, found["call"]] = found
    for found in rows:
        key = found["model"], found["seq_len"], tuple(found["overrides"])
        one = alone.get((*key, found["call"]), alone.get(key))
        if one is not None and found["failed"] is None:
            speed_up = found["tokens_per_second"] / one["tokens_per_second"]
            found |= {"speed_up": speed_up, "efficiency": speed_up / found["devices"], "efficiency_of": one["call"]}


def line(found: dict[str, Any]) -> str:
    about = f"{found['model']} N {format_size(found['seq_len'])} {found['mesh']}"
    if found["failed"] is not None:
        return f"{about}: {found['failed']}"
    return f"{about}: {found['tokens_per_second']:,.0f} tokens/s, in all {found['seconds']:.0f} s"


def cells(found: dict[str, Any]) -> list[object]:
    start = [format_size(found["seq_len"]), found["model"], found["mesh"], found["sequences"]]
    if found["failed"] is not None:
        return [*start, *[None] * (len(HEADERS) - len(start) - 1), found["failed"]]

    def percent(name: str) -> str | None:
        return None if found.get(name) is None else f"{found[name]:.1%}"

    ms = found["step_ms"]
    return [
        *start,
        f"{found['tokens_per_second']:,.0f}",
        found.get("speed_up"),
        percent("efficiency"),
        ms["median"],
        f"{ms['p25']:.1f}..{ms['p75']:.1f}",
        found["forecast_ms"],
        found.get("peak_gib"),
        found["forecast_gib"],
        percent("communication"),
        percent("exposed"),
        found["loss"],
        found["scaling"].partition(":")[0],
    ]


if __name__ == "__main__":
    sys.exit(main())
