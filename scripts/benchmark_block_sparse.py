"""Block-sparse attention against density: time in proportion to what is attended, or not.

    python scripts/benchmark_block_sparse.py --implementations hopper,portable,flex --lengths 16k,64k

For each length and head dim: dense attention (ours and cuDNN's), then layouts of random blocks at falling densities,
the same layout for every implementation, without a causal mask. A row is timed only after its out, dq, dk and dv on the
last head have been compared with float64; a wrong one gets no speed and makes the script end with 1.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring.attention import Case, Implementation, Shape, build
from measuring.correctness import Truth, WrongResult, check
from measuring.environment import choose_device
from measuring.report import Report, Unavailable, gpu_is_lost, names, parse_arguments, reason, say, sizes, table
from measuring.timing import Stopwatch, Times, time_round, warm_up
from torch import Tensor

from flashtrain.attention import BlockLayout, Plan, attention, layouts, lower
from flashtrain.config.sizes import format_size

HEADERS = ("d", "N", "density", "implementation", "fwd", "bwd", "both TFLOP/s", "ms", "of density x dense", "note")
DENSE = ("hopper", "portable", "sdpa_cudnn")
LAYERS = 12


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    report = Report("block_sparse", arguments, device)
    report.content["settings"] = {
        "flops": "4 * num_heads * head_dim * visible pairs, backward 2.5 times, both 3.5 times",
        "layout": f"random blocks of {arguments.block}, shared by all heads, no causal mask, bfloat16, batch 1",
        "of density x dense": "time beside density times that of the same kernels on full attention in this run",
        "list_ms": f"one set of work lists, and its share of {LAYERS} layers' forward and backward",
    }
    deadline = time.monotonic() + 60 * arguments.minutes
    for head_dim in arguments.head_dims:
        for seq_len in arguments.lengths:
            shape = Shape(1, arguments.hidden // head_dim, seq_len, head_dim, causal=False)
            length = Length(shape, arguments, device)
            for density in (None, *arguments.densities):
                if time.monotonic() > deadline:
                    break
                rows = length.measure(density)
                report.rows.extend(rows)
                report.write()
                for row in rows:
                    say("  ".join(str(cell) for cell in cells(row)))
                if any(gpu_is_lost(row["failed"]) for row in rows):
                    return 1
    say("\n" + table(HEADERS, [cells(row) for row in report.rows]))
    report.finish()
    return 1 if any(row["wrong"] for row in report.rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", type=names, default=names("hopper,portable,flex"))
    parser.add_argument("--lengths", type=sizes, default=sizes("16k,64k"), help="(16k,64k)")
    parser.add_argument("--head-dims", type=sizes, default=[64, 128], help="(64,128)")
    parser.add_argument("--hidden", type=int, default=768, help="heads x head_dim (768)")
    parser.add_argument("--block", type=int, default=128, help="queries and keys a block (128)")
    densities = [0.5, 0.25, 0.125, 0.0625, 0.03]
    parser.add_argument("--densities", type=lambda text: [float(x) for x in names(text)], default=densities)
    parser.add_argument("--seconds", type=float, default=0.5, help="timed seconds a row (0.5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no row after this long (8)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parse_arguments(parser, argv, "block_sparse")
    if arguments.dry_run:
        arguments.lengths, arguments.head_dims, arguments.hidden, arguments.block = [256], [16], 32, 64
        arguments.densities, arguments.seconds, arguments.rounds = [0.5], 0.02, 2
    return arguments


class Length:
    """All rows of one length and head dim: inputs are made once, and dense times are there for the sparse ones."""

    def __init__(self, shape: Shape, arguments: argparse.Namespace, device: torch.device) -> None:
        self.shape, self.arguments, self.device = shape, arguments, device
        self.inputs = shape.inputs(device, torch.bfloat16, arguments.seed)
        self.watch = Stopwatch(device)
        self.dense_ms: dict[str, float] = {}

    def measure(self, density: float | None) -> list[dict[str, Any]]:
        """One row for each implementation, taking turns; density None is full attention."""
        layout = plan = hidden = None
        if density is not None:
            layout = self.layout(density, self.arguments.seed)
            plan = self.lowered(layout)
            hidden = ~plan.dense(self.device)[0, 0]
        truth = Truth(*self.inputs, causal=False, last_head=True, hidden=hidden)
        rows, cases, times = {}, {}, {}
        for name in self.dense_names() if density is None else self.arguments.implementations:
            rows[name] = self.row(name, density, plan)
            try:
                case = Case(self.implementation(name, layout, plan), *self.inputs)
                with case.implementation.context():
                    rows[name]["call_ms"] = warm_up(case, self.watch)
                    rows[name]["errors"] = check(case, truth)
                cases[name], times[name] = case, Times.none()
            except Exception as error:
                rows[name] |= {"failed": reason(error), "wrong": isinstance(error, WrongResult)}
        del truth, hidden
        seconds = self.arguments.seconds / self.arguments.rounds
        for turn in range(self.arguments.rounds):
            for name in list(cases)[:: 1 if turn % 2 == 0 else -1]:
                with cases[name].implementation.context():
                    times[name].add(time_round(cases[name], self.watch, seconds, rows[name]["call_ms"]))
        for number, name in enumerate(cases):
            self.finish(rows[name], times[name])
            if density is not None and number == 0:
                rows[name]["list_ms"] = self.list_ms(rows[name])
        return list(rows.values())

    def layout(self, density: float, seed: int) -> BlockLayout:
        block = self.arguments.block
        return layouts.random_blocks(self.shape.seq_len, block, density=density, seed=seed, device=self.device)

    def lowered(self, layout: BlockLayout) -> Plan:
        return lower(layout, 1, self.shape.seq_len, self.shape.seq_len, self.device)

    def dense_names(self) -> list[str]:
        return [name for name in DENSE if name in (*self.arguments.implementations, "sdpa_cudnn")]

    def implementation(self, name: str, layout: BlockLayout | None, plan: Plan | None) -> Implementation:
        if layout is None:
            return build(name, self.shape, self.device)
        if name == "flex":
            return Implementation(name, flex(layout, self.device))
        return Implementation(name, functools.partial(attention, mask=plan, backend=name))

    def row(self, name: str, density: float | None, plan: Plan | None) -> dict[str, Any]:
        shape = self.shape
        return {
            "implementation": name,
            "seq_len": shape.seq_len,
            "head_dim": shape.head_dim,
            "num_heads": shape.num_heads,
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

    def list_ms(self, row: dict[str, Any]) -> dict[str, float]:
        """What it takes to lower one layout: a layout of its own each time, since plans are cached."""
        times = []
        for seed in range(5):
            layout = self.layout(row["density_asked"], 100 + seed)
            self.watch.wait()
            start = time.perf_counter()
            self.lowered(layout)
            self.watch.wait()
            times.append(1000 * (time.perf_counter() - start))
        median = sorted(times)[2]
        return {"median": median, "share_of_layers": median / (LAYERS * row["ms"]["both"]["median"])}


def flex(layout: BlockLayout, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with the same blocks, all of them full."""
    if device.type != "cuda":
        raise Unavailable("FlexAttention's kernels run on GPUs")
    import torch._dynamo.config
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    counts = layout.starts.diff()
    # As wide as there are blocks of keys: FlexAttention takes the length from it.
    indices = torch.zeros(len(counts), -(-layout.seq_k // layout.block_k), dtype=torch.int32, device=device)
    place = torch.arange(indices.shape[1], device=device)
    indices[place < counts[:, None]] = layout.blocks.int()
    num = counts.int()[None, None]
    none = torch.zeros_like(num), torch.zeros_like(indices)[None, None]
    seen = torch.zeros_like(indices, dtype=torch.bool)
    seen[torch.repeat_interleave(torch.arange(len(counts), device=device), counts), layout.blocks.long()] = True

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[query // layout.block_q, key // layout.block_k]

    mask = BlockMask.from_kv_blocks(*none, num, indices[None, None], BLOCK_SIZE=layout.block_q, mask_mod=visible)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask)


def cells(row: dict[str, Any]) -> list[object]:
    shape = [row["head_dim"], format_size(row["seq_len"]), round(row["density"], 4), row["implementation"]]
    if row["failed"] is not None:
        return [*shape, *[None] * 5, ("WRONG: " if row["wrong"] else "") + row["failed"]]
    lists = row.get("list_ms")
    note = f"lists {lists['median']:.2f} ms, {100 * lists['share_of_layers']:.1f} % of 12 layers" if lists else ""
    rates = (round(row["tflops"][name], 1) for name in ("forward", "backward", "both"))
    return [*shape, *rates, row["ms"]["both"]["median"], row.get("of_density_times_dense"), note]


if __name__ == "__main__":
    sys.exit(main())
