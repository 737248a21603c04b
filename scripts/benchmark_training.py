"""Training speed and memory: tokens/s and peak GiB of GPT-2 small's training steps (forward, backward, clipping, fused
AdamW, bfloat16 autocast) at several lengths, beside other models in the same run.

    python scripts/benchmark_training.py --peer nanogpt=PATH --peer huggingface

Ours goes through the task and trainer of train.py with torch.compile. A peer is given by name: nanogpt with the folder
of its model.py (compiled), huggingface by what is installed. All have the same optimiser, tokens and precision.

A row is a process of its own: its memory is its own, and a crash is a row.

--profile prints the parts of a step instead: attention, matmul, loss, norm and elementwise, optimiser, idle.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring.environment import choose_device
from measuring.process import row_in_process, tell_row
from measuring.report import Report, names, parse_arguments, reason, say, sizes, table

from flashtrain.config.sizes import format_size

HEADERS = ("N", "batch", "model", "tokens/s", "MFU", "peak GiB", "step ms", "p25..p75", "first step s", "loss", "note")
LENGTHS = "1k,4k,16k,64k,128k"


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.row is not None:
        tell_row(row(arguments))
        return 0
    report = Report("training_parts" if arguments.profile else "training", arguments, choose_device(arguments.device))
    report.content["settings"] = {
        "model": "GPT-2 small, learned positions, no dropout",
        "step": "forward, backward, clipping to norm 1, fused AdamW; bfloat16 autocast; random tokens from the host",
        "mfu": "3 * (2 * matrix weights * tokens + 4 * width * visible pairs * layers) / time / dense bfloat16 peak",
        "peak_gib": "allocated at most, in the timed steps; the rate is that of all timed steps together",
        "overrides_of_ours": arguments.override,
    }
    deadline = time.monotonic() + 60 * arguments.minutes
    for seq_len, batch in zip(arguments.lengths, arguments.batches, strict=True):
        for model in arguments.models:
            about = {"model": model, "seq_len": seq_len, "batch": batch, "failed": None}
            left = deadline - time.monotonic()
            found = {"failed": "not run: out of time"} if left < 5 else run_row(about, arguments, left)
            report.rows.append(about | found)
            report.write()
            say(line(report.rows[-1]))
    if arguments.profile:
        for found in report.rows:
            show_parts(found)
    else:
        say("\n" + table(HEADERS, [cells(found) for found in report.rows]))
        report.content["beside_peers"] = beside_peers(report.rows)
        for found in report.content["beside_peers"]:
            memory = "" if found["memory"] is None else f", {found['memory']:.2f} times its memory"
            length = format_size(found["seq_len"])
            say(f"N {length}: ours makes {found['speed']:.2f} times the tokens/s of {found['peer']}{memory}")
    report.finish()
    return 1 if any(found["failed"] for found in report.rows if found["model"] == "ours") else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PATH]", help="nanogpt=PATH, huggingface")
    parser.add_argument("--models", type=names, help="of ours and the peers, in this order (peers, then ours)")
    parser.add_argument("--lengths", type=sizes, default=sizes(LENGTHS), help=f"({LENGTHS})")
    parser.add_argument("--batches", type=sizes, help="sequences a step, one a length (32k tokens, at least 1)")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of conf/, for ours")
    parser.add_argument("--seconds", type=float, default=12.0, help="timed seconds of a row (12)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a row at most (15)")
    parser.add_argument("--row-seconds", type=float, default=240.0, help="longest a row may take in all (240)")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no row after this long (9)")
    parser.add_argument("--profile", action="store_true", help="parts of a step instead of speed")
    parser.add_argument("--row", metavar="MODEL", help="measure one model in this process, for the first length")
    arguments = parse_arguments(parser, argv, "training")
    if arguments.dry_run:
        arguments.lengths, arguments.batches, arguments.seconds, arguments.steps = [32], [2], 0.2, 3
    arguments.batches = arguments.batches or [max(1, 32768 // seq_len) for seq_len in arguments.lengths]
    if len(arguments.batches) != len(arguments.lengths):
        parser.error(f"--batches has {len(arguments.batches)} numbers and --lengths {len(arguments.lengths)}")
    arguments.peers = {}
    for peer in arguments.peer:
        name, _, path = peer.partition("=")
        arguments.peers[name] = Path(path).resolve() if path else None
    arguments.models = arguments.models or [*arguments.peers, "ours"]
    return arguments


def run_row(about: dict[str, Any], arguments: argparse.Namespace, left: float) -> dict[str, Any]:
    """Measure in a process of its own, within the row's time and what is left of the run's."""
    command = [sys.executable, str(Path(__file__).resolve()), "--row", about["model"], "--device", arguments.device]
    command += ["--lengths", str(about["seq_len"]), "--batches", str(about["batch"])]
    command += ["--seconds", str(arguments.seconds), "--steps", str(arguments.steps)]
    command += ["--dry-run"] if arguments.dry_run else []
    command += ["--profile"] if arguments.profile else []
    for name, path in arguments.peers.items():
        command += ["--peer", name if path is None else f"{name}={path}"]
    for override in arguments.override:
        command += ["--override", override]
    return row_in_process(command, min(arguments.row_seconds, left))


def row(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model, in this process; a failure is told in `failed`."""
    from measuring import training
    from measuring.step_parts import ProfiledSteps, parts

    device = choose_device(arguments.device)
    vocab = 320 if arguments.dry_run else training.GPT2_VOCAB
    seq_len, batch = arguments.lengths[0], arguments.batches[0]
    try:
        overrides = arguments.override if arguments.row == "ours" else []
        config = training.make_config(seq_len, batch, overrides, arguments.dry_run)
        train = training.trainer_of(arguments.row, arguments.peers)
        if arguments.profile:
            profiled = ProfiledSteps(device)
            loss = train(config, device, profiled, vocab)
            return {"loss": loss, **parts(profiled.kernels(), profiled.steps)}
        timed = training.TimedSteps(device, arguments.seconds, arguments.steps)
        loss = train(config, device, timed, vocab)
        tokens = config.sequences_per_step * config.seq_len
        figures = timed.figures(tokens, training.step_flops(config, vocab), training.peak(config, device))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return {"failed": reason(error)}
    if not torch.isfinite(torch.tensor(loss)):
        return {"failed": f"the loss is {loss}"}
    return {"loss": loss, **figures}


def beside_peers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over each peer at each length that both were measured at: tokens/s, and peak memory."""
    measured = {(row["seq_len"], row["model"]): row for row in rows if row["failed"] is None}
    found = []
    for (seq_len, peer), other in measured.items():
        ours = measured.get((seq_len, "ours"))
        if ours is not None and peer != "ours":
            memory = ours["peak_gib"] / other["peak_gib"] if "peak_gib" in ours and "peak_gib" in other else None
            speed = ours["tokens_per_second"] / other["tokens_per_second"]
            found.append({"seq_len": seq_len, "peer": peer, "speed": speed, "memory": memory})
    return found


def line(found: dict[str, Any]) -> str:
    about = f"{found['model']} N {format_size(found['seq_len'])} x {found['batch']}"
    if found["failed"] is not None:
        return f"{about}: {found['failed']}"
    if "parts_ms" in found:
        return f"{about}: {found['step_ms']:.2f} ms a step"
    return f"{about}: {found['tokens_per_second']:,.0f} tokens/s, {found.get('peak_gib', 0):.1f} GiB"


def show_parts(found: dict[str, Any]) -> None:
    if found["failed"] is not None:
        return
    total = found["step_ms"] or 1.0
    rows = [(part, ms, f"{ms / total:.1%}") for part, ms in found["parts_ms"].items()]
    say(f"\n{line(found)}\n" + table(("part", "ms a step", "share"), rows))
    longest = [(item["ms"], item["part"], item["kernel"]) for item in found["longest"]]
    say("\n" + table(("ms a step", "part", "kernel"), longest))


def cells(found: dict[str, Any]) -> list[object]:
    start = [format_size(found["seq_len"]), found["batch"], found["model"]]
    if found["failed"] is not None:
        return [*start, *[None] * 7, found["failed"]]
    ms = found["step_ms"]
    return [
        *start,
        f"{found['tokens_per_second']:,.0f}",
        None if found["mfu"] is None else f"{found['mfu']:.1%}",
        found.get("peak_gib"),
        ms["median"],
        f"{ms['p25']:.2f}..{ms['p75']:.2f}",
        round(found["seconds_to_first_step"], 1),
        found["loss"],
        " ".join(f"{key.split('.')[-1]} {value}" for key, value in found["state"].items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
