"""The same run on one GPU and on several, by train.py itself, and how far their losses are apart.

Rounding alone makes runs differ, more with every step. How much is seen from runs on one GPU that differ in nothing
else: the same one again, whose kernels add up in whatever order they run, and one with other kernels, which add up in
another order.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import ROOT
from measuring.report import Report, say, table
from measuring.runs import metrics
from measuring.scaling_meshes import Mesh, heads_fit, usual
from measuring.scaling_processes import Job, run_all
from measuring.training import TINY

FACTOR = 2.0  # times the largest difference between runs on one GPU
FLOAT32 = 1e-5  # of the loss, on top: where those on one GPU are equal, sums of several may still be rounded
RULE = (
    f"same: at no step further from the run on one GPU than {FACTOR:g} times the largest difference, at any step up to "
    f"that one, of runs on one GPU from each other, and {FLOAT32:g} of the loss"
)


@dataclass(frozen=True)
class LossRun:
    """A run to compare: its name, its mesh and what else differs."""

    name: str
    mesh: Mesh
    changes: tuple[str, ...] = ()


def runs_to_compare(meshes: Sequence[Mesh], on_cpu: bool) -> list[LossRun]:
    """Three on one GPU, then one on each mesh."""
    one = Mesh.parse("1")
    other = f"attention.backend={'standard' if on_cpu else 'portable'}"
    found = [LossRun("1", one), LossRun("1 again", one), LossRun("1 with other kernels", one, (other,))]
    return found + [LossRun(mesh.text, mesh) for mesh in meshes if mesh.devices > 1]


def add_same_loss(report: Report, arguments: argparse.Namespace, gpus: int, deadline: float) -> bool:
    """Train all of them, write what they lost and whether it is the same; False unless it is for every mesh."""
    on_cpu = arguments.device == "cpu"
    chosen = arguments.meshes or [mesh for mesh in usual(gpus) if heads_fit(mesh, 12)]
    runs = runs_to_compare([mesh for mesh in chosen if mesh.devices <= gpus], on_cpu)
    sequences = max(run.mesh.shares for run in runs)
    found: dict[str, Any] = {"rule": RULE, "steps": arguments.same_loss, "call": len(report.content["calls"])}
    report.content["same_loss"] = found
    with tempfile.TemporaryDirectory() as folder:
        commands = [command(run, sequences, arguments, Path(folder)) for run in runs]
        found |= {"run": shown(commands[0], folder), "runs": [], "versions": report.content["versions"]}

        def done(number: int, told: dict[str, Any]) -> None:
            run = runs[number]
            about = {"name": run.name, "changes": [*run.changes], "failed": None, "seconds": told.get("seconds")}
            csv = Path(folder) / name_of(run) / "metrics.csv"
            losses = read_losses(csv) if csv.is_file() else []
            if told.get("failed") or len(losses) < arguments.same_loss:
                about["failed"] = f"{told.get('failed') or 'ended early'}, after {len(losses)} steps"
            found["runs"].append({**about, "losses": losses})
            found["runs"].sort(key=lambda each: [run.name for run in runs].index(each["name"]))
            compare(found["runs"])
            report.write()
            say(f"{run.name}: {about['failed'] or f'loss {losses[-1]:.5f} after {len(losses)} steps'}")

        def limit() -> float:
            return min(arguments.row_seconds, deadline - time.monotonic())

        # The first one alone: it prepares the text for all.
        jobs = [Job(each, run.mesh.devices, tells=False) for each, run in zip(commands, runs, strict=True)]
        run_all(jobs[:1], gpus, False, limit, done)
        run_all(jobs[1:], gpus, arguments.side_by_side, limit, lambda number, told: done(number + 1, told))
    say("\n" + table(("run", "last loss", "apart at most", "may be", "at step", "same"), map(cells, found["runs"])))
    return all(each["failed"] is None and each.get("same") is not False for each in found["runs"])


def command(run: LossRun, sequences: int, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """train.py's command line; the step has the same sequences for all, a micro-batch one."""
    seq_len = 64 if arguments.dry_run else 16384
    steps, mesh = arguments.same_loss, run.mesh
    of_mesh = {key.partition("=")[0]: key for key in mesh.overrides(seq_len)}
    of_mesh["trainer.batch_tokens"] = f"trainer.batch_tokens={sequences * seq_len}"
    never = 10 * steps
    found = [sys.executable, "train.py", "model=gpt2_rope", f"seq_len={seq_len}", "logger=csv", f"runs_dir={folder}"]
    found += [f"run_id={name_of(run)}", f"trainer.max_steps={steps}", "trainer.log_every_n_steps=1"]
    found += [f"trainer.val_every_n_steps={never}", f"trainer.checkpoint_every_n_steps={never}"]
    found += ["trainer.keep_checkpoints=1", "trainer.sample_tokens=0", f"schedule.warmup_steps={max(1, steps // 5)}"]
    if arguments.dry_run:
        text = ["data=text", f"data.path={ROOT / 'docs'}", "data.tokenizer=bytes", f"data.prepared_dir={folder}/text"]
        found += [*TINY, *text, "trainer.compile=false"]
    if arguments.device == "cpu":
        found += ["trainer.accelerator=cpu", "attention.backend=sdpa"]
    given = [*of_mesh.values(), *arguments.override, *run.changes]
    last = {each.partition("=")[0]: each for each in (*found[2:], *given)}  # of several values the last one holds
    return [*found[:2], *last.values()]


def name_of(run: LossRun) -> str:
    return "run-" + "".join(letter if letter.isalnum() else "-" for letter in run.name)


def shown(command: Sequence[str], folder: str) -> str:
    """The command line without the places of this machine."""
    return " ".join(["python", *(each for each in command[1:] if folder not in each and str(ROOT) not in each)])


def read_losses(path: Path) -> list[float]:
    """Training losses of a run's metrics.csv, one a step."""
    return [float(each["train_loss"]) for each in metrics(path) if each.get("train_loss")]


def compare(runs: Sequence[dict[str, Any]]) -> None:
    """Say of each finished run how far it is from the first, and of those on several GPUs whether that is the same."""
    finished = [run for run in runs if run["failed"] is None]
    alone = [run["losses"] for run in finished if run["name"].partition(" ")[0] == "1"]
    first = next((run["losses"] for run in finished if run["name"] == "1"), None)
    if first is None:
        return
    apart_alone = [max(step) - min(step) for step in zip(*alone, strict=True)]
    noise = [max(apart_alone[: step + 1]) for step in range(len(apart_alone))]
    for run in finished:
        apart = [abs(a - b) for a, b in zip(run["losses"], first, strict=True)]
        allowed = [FACTOR * most + FLOAT32 * abs(loss) for most, loss in zip(noise, first, strict=True)]
        worst = max(range(len(apart)), key=lambda step: apart[step] / allowed[step])
        run |= {"largest_difference": max(apart), "worst_step": worst + 1}
        run |= {"difference_there": apart[worst], "allowed_there": allowed[worst]}
        if run["name"].partition(" ")[0] != "1" and len(alone) > 1:
            run["same"] = apart[worst] <= allowed[worst]


def cells(run: dict[str, Any]) -> list[object]:
    if run["failed"] is not None:
        return [run["name"], *[None] * 4, run["failed"]]
    names = ("largest_difference", "allowed_there", "worst_step")
    differences = [f"{run[name]:.2g}" if name in run and name != "worst_step" else run.get(name) for name in names]
    said = {True: "yes", False: "NO"}.get(run.get("same"), "")  # type: ignore[arg-type]
    return [run["name"], run["losses"][-1], *differences, said]
