"""The forecast held against what is measured: peak memory and time of a step over models, lengths, memory settings and
kernels. Every row is a few real steps through the task and trainer of train.py, in a process of its own.

    python scripts/check_forecast.py
    python scripts/check_forecast.py --also benchmarks/forecast.json     # goes on with what is missing or failed there
    python scripts/check_forecast.py --part 2/3 --also benchmarks/forecast.json

Memory is what PyTorch has allocated at most, time is the median of the timed steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from measuring import ROOT
from measuring.environment import choose_device
from measuring.process import row_in_process, tell_row
from measuring.report import Report, parse_arguments, reason, say, table
from omegaconf import OmegaConf

from flashtrain.config import Config, build, parse_size

HEADERS = ("run", "GiB", "forecast", "off by", "step ms", "forecast", "off by", "note")
# model, seq_len x sequences in a step (one micro-batch), and what else differs from model=... seq_len=... memory=none.
RUNS = (
    "gpt2 1k x 32",
    "gpt2 4k x 8",
    "gpt2 16k x 2",
    "gpt2 64k x 1",
    "gpt2 16k x 2 attention.backend=portable",
    "gpt2 16k x 2 attention=sdpa",
    "gpt2 4k x 4 attention=standard",
    "gpt2 8k x 1 attention=standard memory=full",
    "gpt2 4k x 8 trainer.compile=false",
    "gpt2_rope 16k x 2",
    "gpt2_rope 64k x 1 memory=selective",
    "gpt2_rope 64k x 1 memory=full",
    "gpt2_rope 64k x 1 memory=offload",
    "gpt2_rope 128k x 1 memory=selective",
    "gpt2_rope 128k x 1 memory=full attention=sdpa",
    "gpt2_rope 128k x 1 memory=selective memory.offload=true",
    "gpt2_rope 128k x 1 memory=selective memory.mlp_chunk_tokens=16k",
    "gpt2_rope 128k x 1 memory=full trainer.compile=false",
    "gpt2_medium 4k x 8",
    "gpt2_medium 16k x 2 memory=selective",
    "gpt2_medium 64k x 1 memory=full",
    "modern 4k x 8",
    "modern 16k x 2 memory=selective",
    "modern 64k x 1 memory=full attention.backend=portable",
    "gpt2_xl 4k x 2 memory=selective",
    "gpt2_xl 16k x 1 memory=full",
    "gpt2_large 8k x 2 memory=selective",
    "gpt2 4k x 8 memory.loss=chunked",
)
TINY = ("model.num_layers=2", "model.num_heads=2", "model.hidden_size=32", "trainer.compile=false")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.row is not None:
        tell_row(row(arguments))
        return 0
    report = Report("forecast", arguments, choose_device(arguments.device))
    report.content["settings"] = {
        "step": "forward, backward, clipping, fused AdamW; bfloat16 autocast; one micro-batch of random tokens",
        "peak_gib": "allocated at most in the timed steps",
        "off_by": "forecast / measured - 1",
    }
    if arguments.also is not None:
        known = json.loads(arguments.also.read_text())["rows"]
        report.rows.extend(found for found in known if not found["failed"])
    done = {found["run"] for found in report.rows}
    deadline = time.monotonic() + 60 * arguments.minutes
    for run in (run for run in arguments.runs if run not in done):
        left = deadline - time.monotonic()
        found = {"failed": "not run: out of time"} if left < 10 else run_row(run, arguments, left)
        report.rows.append({"run": run, "failed": None} | found)
        report.write()
        say(" | ".join(str(cell) for cell in cells(report.rows[-1])))
    say("\n" + table(HEADERS, [cells(found) for found in report.rows]))
    report.finish()
    return 1 if any(found["failed"] for found in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="which share of the runs, such as 2/3 (1/1)")
    parser.add_argument("--run", action="append", dest="runs", help="a run of one's own, such as 'gpt2 4k x 8'")
    parser.add_argument("--also", type=Path, help="JSON of an earlier call, to go on from")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed seconds of a row (3)")
    parser.add_argument("--row-seconds", type=float, default=120.0, help="longest a row may take in all (120)")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no row after this long (9)")
    parser.add_argument("--row", help="measure one run in this process")
    arguments = parse_arguments(parser, argv, "forecast")
    arguments.command = arguments.command.replace("benchmark_forecast", "check_forecast")
    part, parts = map(int, arguments.part.split("/"))
    if arguments.runs is None:
        arguments.runs = (
            ["gpt2 64 x 2", "modern 64 x 2 memory=offload"] if arguments.dry_run else RUNS[part - 1 :: parts]
        )
    return arguments


def run_row(run: str, arguments: argparse.Namespace, left: float) -> dict[str, Any]:
    """Measure in a process of its own, within the row's time and what is left."""
    command = [sys.executable, str(Path(__file__).resolve()), "--row", run, "--device", arguments.device]
    command += ["--seconds", str(arguments.seconds), *(["--dry-run"] if arguments.dry_run else [])]
    return row_in_process(command, min(arguments.row_seconds, left))


def config_of(run: str, dry_run: bool) -> Config:
    """The configuration of a run as RUNS writes them."""
    model, seq_len, _, sequences, *overrides = run.split()
    tokens = parse_size(seq_len) * int(sequences)
    own = [f"model={model}", f"seq_len={seq_len}", "logger=csv", "trainer.max_steps=1000000"]
    own += [f"trainer.batch_tokens={tokens}", f"trainer.micro_batch_tokens={tokens}"]
    own += ["memory=none"] * (not any(text.startswith("memory=") for text in overrides))
    own += ["trainer.compile=true"] * (not dry_run and "trainer.compile=false" not in overrides)
    own += [*TINY, *["model.num_kv_heads=1"] * (model == "modern")] if dry_run else []
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(OmegaConf.to_container(compose("config", [*own, *overrides]), resolve=True))  # type: ignore[arg-type]


def row(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forecast and figures of one run, in this process; a failure is told in `failed`."""
    from measuring import training

    from flashtrain.training.hardware import choose_precision
    from flashtrain.training.memory import forecast_of

    device, vocab = choose_device(arguments.device), 320 if arguments.dry_run else training.GPT2_VOCAB
    try:
        config = config_of(arguments.row, arguments.dry_run)
        found = forecast_of(config, vocab, choose_precision(config.trainer, device), device)
        timed = training.TimedSteps(device, arguments.seconds, 10)
        training.train_ours(config, device, timed, vocab)
        figures = timed.figures(config.sequences_per_step * config.seq_len, 0.0, None)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return {"failed": reason(error)}
    seconds = None if found.time is None else found.time.step
    about = {
        "backend": found.case.backend,
        "forecast_gib": found.memory.peak / 2**30,
        "forecast_moments_gib": {name: size / 2**30 for name, size in found.memory.moments.items()},
        "forecast_ms": None if seconds is None else 1000 * seconds,
        "forecast_parts_ms": None if found.time is None else {k: 1000 * v for k, v in vars(found.time).items()},
        "peak_gib": figures.get("peak_gib"),
        "step_ms": figures["step_ms"],
        "tokens_per_second": figures["tokens_per_second"],
    }
    return about | {
        "memory_off_by": off_by(about["forecast_gib"], about["peak_gib"]),
        "time_off_by": off_by(about["forecast_ms"], figures["step_ms"]["median"]),
    }


def off_by(forecast: float | None, measured: float | None) -> float | None:
    return None if forecast is None or not measured else forecast / measured - 1


def cells(found: dict[str, Any]) -> list[object]:
    if found["failed"] is not None:
        return [found["run"], *[None] * 6, found["failed"]]

    def percent(value: float | None) -> str | None:
        return None if value is None else f"{value:+.1%}"

    return [
        found["run"],
        found["peak_gib"],
        found["forecast_gib"],
        percent(found["memory_off_by"]),
        found["step_ms"]["median"],
        found["forecast_ms"],
        percent(found["time_off_by"]),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
