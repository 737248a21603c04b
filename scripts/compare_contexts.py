r"""A longer context that pays: runs that differ in their seq_len alone, beside each other on the same held-out tokens.

    python train.py -m run_id=contexts experiment=longer_context seq_len=1k,4k,16k,64k
    python scripts/compare_contexts.py runs/contexts --plot docs/images/longer_context.png
    python scripts/compare_contexts.py benchmarks/longer_context.json --plot docs/images/longer_context.png

Takes folders of finished runs, or of a sweep, and refuses runs that saw other tokens; or a JSON of its own, to draw it.
Each model reads each held-out document in windows of the length it was trained at, which move on by half of it. All
losses are of the same tokens, sorted by how many tokens of the document stand before them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compare_runs import jobs
from measuring.contexts import documents, loss_by_place
from measuring.drawing import COLOURS, figure, save
from measuring.environment import choose_device
from measuring.language import Judge
from measuring.reading import load_reader
from measuring.report import Report, parse_arguments, say, table
from measuring.runs import Run, require_comparable

from flashtrain.config.sizes import format_size, parse_size
from flashtrain.data.prepare import prepare

FROM = 64  # places in the document that are drawn: before, every model sees the same


def main(argv: list[str] | None = None) -> int:
    parser, arguments = parse(argv)
    try:
        if arguments.runs[0].suffix == ".json":
            result = json.loads(arguments.runs[0].read_text())
        else:
            result = compare(jobs(arguments.runs), arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    say("\n" + table(*as_table(result["rows"])))
    if arguments.plot is not None:
        draw(result, arguments.plot)
    return 0


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or of a sweep; or a JSON of this script")
    parser.add_argument("--tokens", type=parse_size, default=2**20, help="held-out tokens to read at most, about (1M)")
    parser.add_argument("--stride", type=parse_size, help="tokens that a window moves on (half of each context)")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    arguments = parse_arguments(parser, argv, "longer_context")
    arguments.command = arguments.command.replace("benchmark_longer_context", "compare_contexts")
    return parser, arguments


def compare(folders: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the held-out documents with each run's model; the report, which is written.

    Raises:
        ValueError: runs that differ in more than seq_len, or are not finished.
    """
    runs = [Run.read(folder) for folder in folders]
    require_comparable(runs, ("seq_len", "trainer.micro_batch_tokens"))
    device, reach = choose_device(arguments.device), max(run.summary["seq_len"] for run in runs)
    report = Report("longer_context", arguments, device)
    report.content["spread"] = "single runs"
    texts: list[Any] = []
    for folder, run in zip(folders, runs, strict=True):
        reader = load_reader(folder, None, None, device)
        assert reader.run is not None
        texts = texts or documents(prepare(reader.run.config.data, reader.tokenizer).val, reach, arguments.tokens)
        context = reader.model.seq_len
        stride = min(context, arguments.stride or max(1, context // 2))
        half = device.type == "cuda" and run.summary["precision"] != "32-true"
        bins = loss_by_place(Judge(reader, half), texts, context, stride, reach)
        report.rows.append(row_of(run, stride, bins.mean(), bins.rows()))
        say(f"context {format_size(context)}: {report.rows[-1]['loss']:.4f} nats a token")
        del reader
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.content["settings"] = settings(runs[0], texts)
    report.finish()
    return report.content


def settings(run: Run, texts: Sequence[Any]) -> dict[str, Any]:
    tokens, summary = sum(len(text) - 1 for text in texts), run.summary
    shown = f"{summary['tokens'] / 1e6:.3g} million tokens"
    return {
        "model": summary["model"],
        "tokens": summary["tokens"],
        "held_out": {"documents": len(texts), "targets": tokens},
        "read": "each document from its start, in windows of the context; each scores its last `stride` tokens",
        "by_position": "first and last number of tokens of the document before a token, and the mean loss in nats",
        "corpus": summary.get("corpus"),
        "title": f"{summary['model']} after {shown} at each context, {len(texts)} held-out documents",
    }


def row_of(run: Run, stride: int, loss: float, bins: list[dict[str, Any]]) -> dict[str, Any]:
    summary = run.summary
    names = ("tokens_per_second", "mfu", "peak_memory_gib", "train_loss", "val_loss")
    return {
        "run": run.name,
        "seq_len": summary["seq_len"],
        "failed": None,
        "stride": stride,
        "loss": loss,
        "by_position": bins,
        **{name: summary.get(name) for name in names},
    }


def as_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Headers and rows: a bin of places a row, a context a column, the whole at the end."""
    headers = ["tokens before", "targets", *(format_size(row["seq_len"]) for row in rows)]
    cells: list[list[object]] = []
    for same in zip(*(row["by_position"] for row in rows), strict=True):
        if same[0]["targets"]:
            cells.append([f"{same[0]['first']:,}..", same[0]["targets"], *(each["loss"] for each in same)])
    targets = sum(each["targets"] for each in rows[0]["by_position"])
    cells.append(["all", targets, *(row["loss"] for row in rows)])
    return headers, cells


def draw(result: dict[str, Any], path: Path) -> None:
    """Loss over the place in the document, a line for each context."""
    drawn, axes = figure()
    axis, ends = axes[0, 0], set()
    for row, colour in zip(result["rows"], COLOURS, strict=False):
        known = [each for each in row["by_position"] if each["targets"] and each["last"] >= FROM]
        places = [math.sqrt((each["first"] + 1) * (each["last"] + 1)) for each in known]
        label = f"context {format_size(row['seq_len'])}: {row['loss']:.3f} over all"
        axis.plot(places, [each["loss"] for each in known], marker="o", markersize=4, color=colour, label=label)
        ends |= {each["last"] + 1 for each in known}
    axis.set_xscale("log", base=2)
    ticks = sorted(ends)
    axis.set_xticks(ticks, [format_size(end) for end in ticks])
    axis.minorticks_off()
    axis.set_xlabel("tokens of the document before")
    axis.set_ylabel("held-out loss, nats a token")
    axis.set_title(result["settings"]["title"], fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    save(drawn, path)


if __name__ == "__main__":
    sys.exit(main())
