"""The longest sequence that trains: GPT-2 small, medium and a GPT of 1.3 billion parameters, one sequence a step, by
standard attention, other models and ours; and peak memory over length.

    python scripts/benchmark_longest.py --peer nanogpt=PATH --peer huggingface --models gpt2
    python scripts/benchmark_longest.py --peer nanogpt=PATH --peer huggingface --also benchmarks/longest.json
    python scripts/benchmark_longest.py --also benchmarks/longest.json --confirm 3

Lengths are powers of two times 1, 1.25, 1.5 and 1.75. Each try is a process of its own that makes two whole steps
(forward, backward, clipping, fused AdamW, bfloat16 autocast) and tells the peak of the second, or runs out of memory.
With our kernels a token sees 128 tokens meanwhile, which takes the same tensors and work space; --confirm makes steps
of found lengths with all of attention. Everything else is real.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring.environment import choose_device
from measuring.longest import MODELS, OURS, Tries, config_of, grid, guess
from measuring.process import row_in_process, tell_row
from measuring.report import Report, Unavailable, names, parse_arguments, reason, say, sizes, table

from flashtrain.config.sizes import format_size, parse_size

HEADERS = ("model", "implementation", "longest", "peak GiB", "out of memory at", "confirmed, GiB", "note")
LADDER = "16k,64k,128k,512k,1M"
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
FASTEST_TRY = 15.0  # seconds that must be left for one


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.row is not None:
        tell_row(row(arguments))
        return 0
    report = Report("longest", arguments, choose_device(arguments.device))
    report.content["settings"] = settings(arguments)
    if arguments.also is not None:
        known = json.loads(arguments.also.read_text())["rows"]
        report.rows.extend(found for found in known if not failed_otherwise(found))
    Search(report, arguments).run()
    report.content["longest"] = summary(report.rows)
    say("\n" + table(HEADERS, [cells(found) for found in report.content["longest"]]))
    report.finish()
    return 1 if any(failed_otherwise(found) for found in report.rows if found["implementation"] in OURS) else 0


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "step": "one sequence: forward, backward, clipping, fused AdamW; bfloat16 autocast; random tokens",
        "peak_gib": "allocated at most in the second of two steps; seconds: what that step took, compiling included",
        "how": "step: all of attention is computed. window: by our kernels, a token sees 128 tokens; the same memory. "
        "confirmed: after a step with the window, one with all of attention",
        "models": {name: "layers {}, heads {}, width {}".format(*sizes) for name, sizes in MODELS.items()},
        "implementations": {
            **{name: "rotary positions, compiled, " + " ".join(changes) for name, changes in OURS.items()},
            "nanogpt": "its model.py, compiled, SDPA, a table of positions",
            "huggingface": "GPT2LMHeadModel, SDPA, a table of positions",
        },
        "overrides": arguments.override,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PATH]", help="nanogpt=PATH, huggingface")
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"of {','.join(MODELS)} (all)")
    parser.add_argument("--implementations", type=names, help=f"of {','.join(OURS)} and the peers (all)")
    parser.add_argument("--ladder", type=sizes, default=sizes(LADDER), help=f"lengths to draw through ({LADDER})")
    parser.add_argument("--most", type=parse_size, default=2**23, help="longest length to try (8M)")
    parser.add_argument("--confirm", type=int, default=0, help="so many found lengths of ours with real steps (0)")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of conf/, for all")
    parser.add_argument("--also", type=Path, help="JSON of an earlier call, to go on from")
    parser.add_argument("--row-seconds", type=float, default=120.0, help="longest a try may take in all (120)")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no try after this long (9)")
    parser.add_argument(
        "--row", metavar="IMPLEMENTATION", help="one try in this process: first model, first of --ladder"
    )
    parser.add_argument("--real", action="store_true", help="with --row: all of attention in the second step")
    arguments = parse_arguments(parser, argv, "longest")
    arguments.peers = {}
    for peer in arguments.peer:
        name, _, path = peer.partition("=")
        arguments.peers[name] = Path(path).resolve() if path else None
    arguments.implementations = arguments.implementations or ["standard", *arguments.peers, "ours", "ours_full"]
    for key, given, known in (
        ("models", arguments.models, MODELS),
        ("implementations", arguments.implementations, None),
    ):
        unknown = [name for name in given if name not in (known or (*OURS, *arguments.peers))]
        if unknown:
            parser.error(f"--{key} {','.join(unknown)}: there are {', '.join(known or (*OURS, *arguments.peers))}")
    if arguments.dry_run and arguments.row is None:
        arguments.models, arguments.ladder, arguments.most = arguments.models[:1], [32], 40
    return arguments


class Search:
    """Fills a report: first the longest of each model and implementation, then the ladder below it, then
    confirmations."""

    def __init__(self, report: Report, arguments: argparse.Namespace) -> None:
        self.report, self.arguments = report, arguments
        self.capacity: float | None = report.content.get("gpu_memory_gib")
        self.deadline = time.monotonic() + 60 * arguments.minutes
        least = 32 if arguments.dry_run else 1024
        self.lengths = grid(least, arguments.most)

    def run(self) -> None:
        pairs = [(model, name) for model in self.arguments.models for name in self.arguments.implementations]
        for model, name in pairs:
            self.find_longest(model, name)
        for model, name in pairs:
            known = tries(self.report.rows, model, name)
            for length in self.arguments.ladder:
                if length not in known.fits and length < (known.longest or 0):
                    self.try_length(model, name, length)
        for found in to_confirm(self.report.rows, self.arguments.confirm):
            self.try_length(found["model"], found["implementation"], found["seq_len"], confirm=True)

    def find_longest(self, model: str, name: str) -> None:
        """Until it is found, a try fails for another reason, or time is up."""
        begin = self.lengths[0]
        if self.capacity is not None:
            begin = guess(model, name, self.capacity * 2**30, self.arguments.override)
        while (length := tries(self.report.rows, model, name).next(self.lengths, begin, self.capacity)) is not None:
            found = self.try_length(model, name, length)
            if found is None or failed_otherwise(found):
                return

    def try_length(self, model: str, name: str, seq_len: int, confirm: bool = False) -> dict[str, Any] | None:
        """The row of a try, which is in the report then; None where no time is left for it."""
        left = self.deadline - time.monotonic()
        if left < FASTEST_TRY:
            return None
        windowed = name in OURS and name != "standard"
        about = {"model": model, "implementation": name, "seq_len": seq_len}
        about |= {"how": "confirmed" if confirm else "window" if windowed else "step", "failed": None}
        limit = left if confirm else min(left, self.arguments.row_seconds)
        found = about | row_in_process(self.command(model, name, seq_len, confirm), limit)
        self.report.rows.append(found)
        self.report.write()
        say(line(found))
        return found

    def command(self, model: str, name: str, seq_len: int, confirm: bool) -> list[str]:
        given = self.arguments
        command = [sys.executable, str(Path(__file__).resolve()), "--row", name, "--models", model]
        command += ["--ladder", str(seq_len), "--device", given.device]
        command += [*(["--dry-run"] if given.dry_run else []), *(["--real"] if confirm else [])]
        for peer, path in given.peers.items():
            command += ["--peer", peer if path is None else f"{peer}={path}"]
        for override in given.override:
            command += ["--override", override]
        return command


def tries(rows: list[dict[str, Any]], model: str, name: str) -> Tries:
    """What the rows say of a model and an implementation; confirmations are for themselves."""
    own = [r for r in rows if (r["model"], r["implementation"]) == (model, name) and r["how"] != "confirmed"]
    fits = {r["seq_len"]: r.get("peak_gib") for r in own if r["failed"] is None}
    return Tries(fits, frozenset(r["seq_len"] for r in own if ran_out(r)))


def ran_out(found: dict[str, Any]) -> bool:
    return found["failed"] is not None and any(sign in found["failed"] for sign in OUT_OF_MEMORY)


def failed_otherwise(found: dict[str, Any]) -> bool:
    return found["failed"] is not None and not ran_out(found)


def to_confirm(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The longest of ours that are not confirmed yet, those of different models first, by what a step costs."""

    def cost(found: dict[str, Any]) -> float:
        layers, _, hidden = MODELS[found["model"]]
        return float(layers * hidden * found["seq_len"] ** 2)

    done = {
        (r["model"], r["implementation"], r["seq_len"]) for r in rows if r["how"] == "confirmed" and not r["failed"]
    }
    ours = [r for r in summary(rows) if r["implementation"] in OURS and r["seq_len"] and r["how"] == "window"]
    ours.sort(key=cost)
    first = {r["model"]: r for r in reversed(ours)}
    ours.sort(key=lambda found: first[found["model"]] is not found)
    left = [r for r in ours if (r["model"], r["implementation"], r["seq_len"]) not in done]
    return left[: max(0, count - len(done))]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest of each model and implementation: its peak, the next length that failed, and its confirmation."""
    found = []
    for model, name in dict.fromkeys((r["model"], r["implementation"]) for r in rows):
        own = [r for r in rows if (r["model"], r["implementation"]) == (model, name)]
        known = tries(rows, model, name)
        confirmed = next((r for r in own if r["how"] == "confirmed" and r["seq_len"] == known.longest), {})
        other = next((r["failed"] for r in own if failed_otherwise(r)), None)
        found.append(
            {
                "model": model,
                "implementation": name,
                "seq_len": known.longest,
                "how": next((r["how"] for r in own), None),
                "peak_gib": known.fits.get(known.longest or 0),
                "out_of_memory_at": min(known.fails, default=None),
                "confirmed_peak_gib": confirmed.get("peak_gib"),
                "confirmed_seconds": confirmed.get("seconds"),
                "failed": other,
            }
        )
    return found


def row(arguments: argparse.Namespace) -> dict[str, Any]:
    """One try, in this process; a failure is told in `failed`."""
    from measuring import longest, training

    device = choose_device(arguments.device)
    vocab = 320 if arguments.dry_run else training.GPT2_VOCAB
    name, steps = arguments.row, longest.SecondStep(device)
    try:
        config = config_of(arguments.models[0], name, arguments.ladder[0], arguments.override, arguments.dry_run)
        if name in OURS:
            loss = longest.try_ours(config, device, steps, vocab, arguments.real)
        else:
            loss = training.trainer_of(name, arguments.peers)(config, device, steps, vocab)
        if not torch.isfinite(torch.tensor(loss)):
            raise Unavailable(f"the loss is {loss}")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return {"failed": reason(error)}
    return {"loss": loss, **steps.figures()}


def line(found: dict[str, Any]) -> str:
    about = f"{found['model']} {found['implementation']} {format_size(found['seq_len'])}"
    if found["failed"] is not None:
        return f"{about}: {found['failed']}"
    return f"{about}: {found.get('peak_gib', 0):.2f} GiB, {found['seconds']:.1f} s ({found['how']})"


def cells(found: dict[str, Any]) -> list[object]:
    failing = found["out_of_memory_at"]
    return [
        found["model"],
        found["implementation"],
        None if found["seq_len"] is None else format_size(found["seq_len"]),
        found["peak_gib"],
        None if failing is None else format_size(failing),
        found["confirmed_peak_gib"],
        found["failed"],
    ]


if __name__ == "__main__":
    sys.exit(main())
