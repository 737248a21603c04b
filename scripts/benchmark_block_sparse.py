"""Block-sparse attention against density: time in proportion to what is attended, or not.

    python scripts/benchmark_block_sparse.py --implementations hopper,portable,flex --lengths 64k,16k
    python scripts/benchmark_block_sparse.py --figure

For each length and head dim: dense attention (ours and cuDNN's), then layouts of random blocks at falling densities,
the same layout for every implementation, without a causal mask. Lengths and head dims come in the order in which they
are given, with all of the first block size before the second. A row is timed only after its out, dq, dk and dv on the
last head have been compared with float64; a wrong one gets no speed and makes the script end with 1.

--figure is figure 2 (right) of the FlashAttention paper (https://arxiv.org/abs/2205.14135): 4k tokens, from all blocks
down, with the batch and heads of the table beside it (64 x 16 heads of 64), as the paper does not print the figure's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from measuring.attention import Case, Implementation, Shape, build
from measuring.blocks import flex
from measuring.correctness import Truth, WrongResult, check
from measuring.environment import choose_device
from measuring.list_cost import ABOUT, list_cost
from measuring.report import Report, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.timing import Stopwatch, Times, take_turns, warm_up

from flashtrain.attention import BlockLayout, Plan, attention, layouts, lower
from flashtrain.config.sizes import format_size

HEADERS = (
    "d",
    "N",
    "block",
    "density",
    "implementation",
    "fwd",
    "bwd",
    "both TFLOP/s",
    "ms",
    "of density x dense",
    "note",
)
DENSE = ("hopper", "portable", "sdpa_cudnn")
LAYERS = 12
# What is measured where nothing is asked for.
TABLE: dict[str, Any] = {
    "implementations": ["hopper", "portable", "flex"],
    "lengths": [65536, 16384],
    "head_dims": [64, 128],
    "blocks": [128, 64],
    "densities": [0.5, 0.25, 0.125, 0.0625, 0.03],
    "batch": 1,
    "num_heads": None,
    "lists": True,
}
FIGURE = TABLE | {
    "implementations": ["hopper", "portable"],
    "lengths": [4096],
    "head_dims": [64],
    "blocks": [128],
    "densities": [1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05],
    "batch": 64,
    "num_heads": 16,
    "lists": False,
}
DRY = {"lengths": [256], "head_dims": [16], "num_heads": 2, "batch": 1, "blocks": [64], "densities": [0.5]}


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("block_sparse_figure" if arguments.figure else "block_sparse", arguments, device)
    report.content["settings"] = settings(arguments)
    deadline = time.monotonic() + 60 * arguments.minutes
    problems: dict[tuple[int, int], Length] = {}
    for block, seq_len, head_dim, density in order(arguments):
        if time.monotonic() > deadline:
            say(f"--minutes {arguments.minutes:g} are over: rows from here on are left out")
            break
        if (seq_len, head_dim) not in problems:
            num_heads = arguments.num_heads or arguments.hidden // head_dim
            shape = Shape(arguments.batch, num_heads, seq_len, head_dim, causal=False)
            problems[seq_len, head_dim] = Length(shape, arguments, device)
        rows = problems[seq_len, head_dim].measure(block, density)
        report.rows.extend(rows)
        report.write()
        for row in rows:
            say("  ".join(str(cell) for cell in cells(row)))
        if any(gpu_is_lost(row["failed"]) for row in rows):
            return 1
    say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
    report.finish()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def order(arguments: argparse.Namespace) -> Iterator[tuple[int, int, int, float | None]]:
    """block, seq_len, head_dim and density (None: dense) of each group of rows; dense ones once a shape."""
    for number, block in enumerate(arguments.blocks):
        for seq_len in arguments.lengths:
            for head_dim in arguments.head_dims:
                for density in (*([None] if number == 0 else []), *arguments.densities):
                    yield block, seq_len, head_dim, density


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="store_true", help="figure 2 (right) of the paper, not the table")
    parser.add_argument("--implementations", type=names, help="(hopper,portable,flex; figure: hopper,portable)")
    parser.add_argument("--lengths", type=sizes, help="(64k,16k; figure: 4k)")
    parser.add_argument("--head-dims", type=sizes, help="(64,128; figure: 64)")
    parser.add_argument("--batch", type=int, help="(1; figure: 64)")
    parser.add_argument("--hidden", type=int, default=768, help="heads x head_dim (768)")
    parser.add_argument("--num-heads", type=int, help="instead of hidden / head_dim (figure: 16)")
    parser.add_argument("--blocks", type=sizes, help="queries and keys a block, in turn (128,64; figure: 128)")
    parser.add_argument("--densities", type=lambda text: [float(x) for x in names(text)], help="shares of all blocks")
    parser.add_argument("--lists", action=argparse.BooleanOptionalAction, help="cost of lists, first block (table)")
    parser.add_argument("--seconds", type=float, default=0.1, help="timed seconds a row, of nine calls at least (0.1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1.8, help="start no rows after this long (1.8)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parse_arguments(parser, argv, "block_sparse")
    for key, value in (FIGURE if arguments.figure else TABLE).items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    if arguments.dry_run:
        vars(arguments).update(DRY | {"seconds": 0.02, "rounds": 2})
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "flops": "4 * batch * num_heads * head_dim * visible pairs, backward 2.5 times, both 3.5 times",
        "layout": f"random blocks, shared by all heads, no causal mask, bfloat16, batch {arguments.batch}",
        "of_density_times_dense": "time beside density times that of the same kernels on full attention in this run",
        "of_dense_rate": "FLOP/s beside those of the same kernels on full attention: the inverse",
        "lists": f"{LAYERS} layers; {ABOUT}",
    }


class Length:
    """All rows of one length and head dim: inputs are made once, and dense times are there for the sparse ones."""

    def __init__(self, shape: Shape, arguments: argparse.Namespace, device: torch.device) -> None:
        self.shape, self.arguments, self.device = shape, arguments, device
        self.inputs = shape.inputs(device, torch.bfloat16, arguments.seed)
        self.watch = Stopwatch(device)
        self.dense_ms: dict[str, float] = {}

    def measure(self, block: int, density: float | None) -> list[dict[str, Any]]:
        """One row for each implementation, taking turns; density None is full attention."""
        layout = plan = hidden = None
        if density is not None:
            layout = self.layout(block, density, self.arguments.seed)
            plan = self.lowered(layout)
            hidden = ~plan.dense(self.device)[0, 0]
        truth = Truth(*self.inputs, causal=False, last_head=True, hidden=hidden)
        rows, cases, call_ms = {}, {}, {}
        for name in self.dense_names() if density is None else self.arguments.implementations:
            rows[name] = self.row(name, density, layout, plan)
            try:
                case = Case(self.implementation(name, layout, plan), *self.inputs)
                with case.implementation.context():
                    call_ms[name] = rows[name]["call_ms"] = warm_up(case, self.watch)
                    rows[name]["errors"] = check(case, truth)
                cases[name] = case
            except Exception as error:
                rows[name] |= {"failed": reason(error), "wrong": isinstance(error, WrongResult)}
        del truth, hidden
        timed = take_turns(cases, self.watch, self.arguments.rounds, self.arguments.seconds, call_ms)
        for number, (name, times) in enumerate(timed.items()):
            self.finish(rows[name], times)
            if density is not None and number == 0 and self.arguments.lists and block == self.arguments.blocks[0]:
                rows[name]["lists"] = self.list_cost(name, block, density, rows[name]["ms"]["both"]["median"])
        return list(rows.values())

    def layout(self, block: int, density: float, seed: int) -> BlockLayout:
        return layouts.random_blocks(self.shape.seq_len, block, density=density, seed=seed, device=self.device)

    def lowered(self, layout: BlockLayout) -> Plan:
        return lower(layout, self.shape.batch, self.shape.seq_len, self.shape.seq_len, self.device)

    def dense_names(self) -> list[str]:
        return [name for name in DENSE if name in (*self.arguments.implementations, "sdpa_cudnn")]

    def implementation(self, name: str, layout: BlockLayout | None, plan: Plan | None) -> Implementation:
        if plan is None:
            return build(name, self.shape, self.device)
        if name == "flex" and layout is not None:
            return Implementation(name, flex(layout))
        return Implementation(name, functools.partial(attention, mask=plan, backend=name))

    def row(self, name: str, density: float | None, layout: BlockLayout | None, plan: Plan | None) -> dict[str, Any]:
        return {
            "implementation": name,
            **dataclasses.asdict(self.shape),
            "block": None if layout is None else layout.block_q,
            "blocks_a_row": None if layout is None else len(layout.blocks) / layout.num_q_blocks,
            "density_asked": density,
            "density": 1.0 if plan is None else plan.density,
            "failed": None,
            "wrong": False,
        }

    def finish(self, row: dict[str, Any], times: Times) -> None:
        row["ms"] = times.summary()
        row["rounds_both_ms"] = times.rounds
        flops = {name: self.shape.flops(name) * row["density"] for name in row["ms"]}
        row["tflops"] = {name: flops[name] / row["ms"][name]["median"] / 1e9 for name in flops}
        name, both = row["implementation"], row["ms"]["both"]["median"]
        if row["density_asked"] is None:
            self.dense_ms[name] = both
        elif name in self.dense_ms:
            row["of_density_times_dense"] = both / (row["density"] * self.dense_ms[name])
            row["of_dense_rate"] = 1 / row["of_density_times_dense"]

    def list_cost(self, name: str, block: int, density: float, both_ms: float) -> dict[str, float]:
        """What lists cost that are built once a step, by layouts of their own; no more steps than there is time for."""

        def step(plan: Plan) -> None:
            case = Case(self.implementation(name, None, plan), *self.inputs)
            for _ in range(LAYERS):
                case.forward_backward()

        count = min(9, max(2, int(4000 * self.arguments.seconds / (LAYERS * both_ms))))
        fresh = [self.layout(block, density, 100 + seed) for seed in range(2 * count + 1)]
        return list_cost(fresh, self.lowered, step, self.watch)


def cells(row: dict[str, Any]) -> list[object]:
    shape = [
        row["head_dim"],
        format_size(row["seq_len"]),
        row["block"],
        round(row["density"], 4),
        row["implementation"],
    ]
    if row["failed"] is not None:
        return [*shape, *[None] * 5, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    lists = row.get("lists")
    note = f"lists: {100 * lists['share']:.1f} % of {LAYERS} layers, {lists['alone_ms']:.2f} ms alone" if lists else ""
    rates = (round(row["tflops"][name], 1) for name in ("forward", "backward", "both"))
    return [*shape, *rates, row["ms"]["both"]["median"], row.get("of_density_times_dense"), note]


if __name__ == "__main__":
    sys.exit(main())
