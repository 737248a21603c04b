"""Time tile sizes of the attention kernels on this GPU: what `flashtrain/attention/portable/configs.py` should say.

    python scripts/tune_attention.py --seconds 540 --out tune.json
    python scripts/tune_attention.py --head-dims 96,256 --kernels forward
    python scripts/tune_attention.py --dry-run 90     # what each candidate takes of a GPU; no GPU needed

First every candidate is compiled and held against float32 attention on a small shape, each in a process of its own, so
that one that crashes takes nothing with it. Then the good ones are timed at 16,384 tokens and a hidden size of 2048 in
bfloat16; after the first shape only those within 30 % of the fastest go on. FLOPs are those of the products that the
kernel itself computes (2 in the forward, 3 for dq, 4 for dk and dv), half of them if causal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from flashtrain.attention import Causal, Full, Mask, SlidingWindow, lower, standard_attention
from flashtrain.attention.plan import Limits
from flashtrain.attention.portable import delta, forward
from flashtrain.attention.portable.configs import Config, generation_of, table_entry
from flashtrain.attention.portable.dkdv import grad_kv
from flashtrain.attention.portable.dq import grad_q
from flashtrain.attention.portable.launch import row_statistics

TOKENS, HIDDEN = 16_384, 2048
SHAPES = [(16_384, True), (4096, True), (16_384, False), (4096, False), (1024, True), (1024, False)]
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
DROP_BEYOND = 1.3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU only with TRITON_INTERPRET=1, to try --check

# Queries, keys, warps, stages, register limit. Up to which padded head dim -> kernel -> candidates.
GRID: dict[int, dict[str, list[tuple[int, ...]]]] = {
    64: {
        "forward": [
            (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3, 128), (128, 64, 8, 4, 128), (64, 64, 4, 3, 128),
            (64, 64, 4, 3, 168), (64, 64, 4, 2, 128), (64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2),
            (128, 128, 8, 3), (128, 128, 4, 2), (128, 32, 4, 4),
        ],
        "dq": [
            (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2, 128), (128, 64, 8, 3, 128), (128, 64, 8, 3),
            (64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 2, 168), (64, 64, 4, 2, 128), (64, 128, 4, 2),
            (128, 128, 8, 2), (128, 32, 4, 3),
        ],
        "dkdv": [
            (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3), (32, 128, 8, 3, 128),
            (32, 64, 4, 3), (32, 64, 4, 4, 128), (32, 128, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2),
        ],
    },
    128: {
        "forward": [
            (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
            (64, 64, 4, 2, 168), (64, 128, 4, 2), (128, 32, 8, 4), (128, 32, 4, 3), (64, 32, 4, 4, 168),
        ],
        "dq": [
            (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 32, 4, 3), (64, 32, 4, 3, 168),
            (128, 32, 8, 3), (128, 32, 8, 3, 128), (64, 128, 8, 2), (128, 128, 8, 1), (64, 64, 4, 1),
        ],
        "dkdv": [
            (64, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 1), (64, 64, 4, 2), (32, 64, 4, 2),
            (32, 64, 4, 3), (32, 128, 8, 2), (32, 128, 8, 3), (128, 64, 8, 1),
        ],
    },
    256: {
        "forward": [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 1)],
        "dq": [(128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 1), (128, 64, 8, 1)],
        "dkdv": [(32, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 2), (32, 128, 8, 1)],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One kernel with one choice of tiles, and what its check said."""

    kernel: str
    head_dim: int
    config: Config
    error: float | None = None
    failed: str | None = None

    def __str__(self) -> str:
        return f"{self.kernel} d{self.head_dim} {astuple(self.config)}"


@dataclass(frozen=True)
class Timing:
    candidate: Candidate
    seq_len: int
    causal: bool
    milliseconds: float
    tflops: float


@dataclass
class Problem:
    """Inputs for one shape, and what the kernels need of the forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    limits: Limits
    scale: float
    statistics: Tensor

    def runner(self, kernel: str, config: Config) -> Callable[[], tuple[Tensor, ...]]:
        q, k, v, dout, statistics = self.q, self.k, self.v, self.dout, self.statistics
        limits, scale = self.limits, self.scale
        if kernel == "forward":
            return lambda: forward(q, k, v, limits, scale, config)[:1]
        if kernel == "dq":
            return lambda: (grad_q(dout, q, k, v, statistics, limits, scale, config),)
        return lambda: grad_kv(dout, q, k, v, statistics, limits, scale, config)


def make_problem(batch: int, heads: tuple[int, int], seq_len: int, head_dim: int, mask: Mask) -> Problem:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def randn(count: int) -> Tensor:
        return torch.randn(batch, count, seq_len, head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    q, k, v, dout = randn(heads[0]), randn(heads[1]), randn(heads[1]), randn(heads[0])
    plan = lower(mask, batch, seq_len, seq_len, DEVICE)
    scale = head_dim**-0.5
    out, lse = forward(q, k, v, plan.limits, scale)
    return Problem(q, k, v, dout, plan.limits, scale, row_statistics(lse, delta(out, dout, None)))


def candidates(kernel: str, head_dim: int, generation: str) -> Iterator[Candidate]:
    """The table's own first, then the grid's."""
    own: Config = getattr(table_entry(generation, head_dim, 2), kernel)
    grid = GRID[next(size for size in GRID if head_dim <= size)][kernel]
    for config in dict.fromkeys([own, *(Config(*numbers) for numbers in grid)]):
        yield Candidate(kernel, head_dim, config)


def worst_error(candidate: Candidate) -> float:
    """The largest error against float32 attention, relative to the largest value, over three masks and lengths."""
    worst = 0.0
    masks: list[tuple[Mask, int]] = [(Full(), 512), (Causal(), 515), (SlidingWindow(70, 9), 387)]
    for mask, seq_len in masks:
        problem = make_problem(2, (4, 4), seq_len, candidate.head_dim, mask)
        q, k, v = (tensor.float().requires_grad_() for tensor in (problem.q, problem.k, problem.v))
        out, _ = standard_attention(q, k, v, lower(mask, 2, seq_len, seq_len, DEVICE), problem.scale)
        dq, dk, dv = torch.autograd.grad(out, [q, k, v], problem.dout.float())
        truth = {"forward": [out.detach()], "dq": [dq], "dkdv": [dk, dv]}[candidate.kernel]
        for got, wanted in zip(problem.runner(candidate.kernel, candidate.config)(), truth, strict=True):
            error = (got.float() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


def check(candidate: Candidate, seconds: float) -> Candidate:
    """Compile and check one candidate in its own process."""
    text = json.dumps([candidate.kernel, candidate.head_dim, astuple(candidate.config)])
    command = [sys.executable, "-W", "ignore", __file__, "--check", text]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return replace(candidate, failed=f"not done after {seconds:.0f} s")
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return replace(candidate, failed=lines[-1][:200] if lines else f"exit code {result.returncode}")
    error = float(result.stdout.split()[-1])
    return replace(candidate, error=error, failed=None if error < 0.03 else f"wrong by {error:.3g}")


def time_candidates(good: list[Candidate], deadline: float) -> list[Timing]:
    """Every shape for every candidate that is still in the race, until the deadline."""
    timings: list[Timing] = []
    for seq_len, causal in SHAPES:
        for head_dim in sorted({candidate.head_dim for candidate in good}):
            heads = HIDDEN // head_dim
            problem = make_problem(TOKENS // seq_len, (heads, heads), seq_len, head_dim, Causal() if causal else Full())
            for kernel in PRODUCTS:
                racing = [c for c in good if (c.kernel, c.head_dim) == (kernel, head_dim)]
                timed = [timing for c in racing if (timing := time_one(c, problem, seq_len, causal, deadline))]
                timed.sort(key=lambda timing: timing.milliseconds)
                print_timed(timed)
                timings += timed
                kept = [t.candidate for t in timed if t.milliseconds <= DROP_BEYOND * timed[0].milliseconds]
                good = [c for c in good if c not in racing or c in kept]
                if time.monotonic() > deadline:
                    return timings
    return timings


def time_one(candidate: Candidate, problem: Problem, seq_len: int, causal: bool, deadline: float) -> Timing | None:
    from triton.testing import do_bench

    if time.monotonic() > deadline:
        return None
    try:
        run = problem.runner(candidate.kernel, candidate.config)
        milliseconds = do_bench(run, warmup=10, rep=60, return_mode="median")
    except Exception as error:  # reported, and the others go on
        print(f"failed: {candidate}: {str(error)[:200]}", flush=True)
        return None
    flops = PRODUCTS[candidate.kernel] * 2 * TOKENS * seq_len * HIDDEN / (2 if causal else 1)
    return Timing(candidate, seq_len, causal, milliseconds, flops / milliseconds / 1e9)


def print_timed(timed: list[Timing]) -> None:
    for place, t in enumerate(timed):
        if place == 0:
            name = f"{t.candidate.kernel} d{t.candidate.head_dim}"
            print(f"\n{name} N {t.seq_len} {'causal' if t.causal else 'full'}")
        print(f"  {t.milliseconds:8.3f} ms {t.tflops:6.0f} TFLOP/s  {astuple(t.candidate.config)}", flush=True)


def print_best(timings: list[Timing]) -> None:
    """For each shape the best of each kernel together, in the usual count."""
    print("\nbest of each kernel together, TFLOP/s of 4 N^2 d forward and 2.5 times that backward")
    for head_dim in sorted({t.candidate.head_dim for t in timings}):
        for seq_len, causal in SHAPES:
            best: dict[str, float] = {}
            for t in timings:
                if (t.candidate.head_dim, t.seq_len, t.causal) == (head_dim, seq_len, causal):
                    best[t.candidate.kernel] = min(t.milliseconds, best.get(t.candidate.kernel, t.milliseconds))
            if len(best) < len(PRODUCTS):
                continue
            flops = 4 * TOKENS * seq_len * HIDDEN / (2 if causal else 1) / 1e9
            backward = best["dq"] + best["dkdv"]
            rates = flops / best["forward"], 2.5 * flops / backward, 3.5 * flops / (best["forward"] + backward)
            text = "forward {:4.0f} backward {:4.0f} both {:4.0f}".format(*rates)
            print(f"  d{head_dim} N {seq_len:6} {'causal' if causal else 'full':6} {text}")


def dry_run(capability: int, chosen: list[Candidate]) -> None:
    """What each candidate takes of a GPU that need not be here."""
    from flashtrain.attention.portable.offline import SHARED_LIMIT, compile_kernel

    for candidate in chosen:
        try:
            taken = compile_kernel(candidate.kernel, capability, candidate.head_dim, torch.bfloat16, candidate.config)
        except Exception as error:  # reported, and the others go on
            print(f"{candidate}: does not compile: {str(error)[:150]}", flush=True)
            continue
        limit, threads = SHARED_LIMIT[capability], 32 * candidate.config.num_warps
        programs = min(65_536 // (taken.registers * threads), limit // taken.shared_bytes)
        note = " serialized" if taken.serialized else ""
        note += " TOO MUCH SHARED MEMORY" if taken.shared_bytes > limit else ""
        print(
            f"{candidate}: {taken.registers} registers, {taken.spilled_bytes} bytes spilled, {taken.shared_bytes} "
            f"bytes shared, {programs} programs a multiprocessor{note}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128", help="comma-separated, for example 96,256")
    parser.add_argument("--kernels", default="forward,dq,dkdv")
    parser.add_argument("--seconds", type=float, default=540, help="stop after this long and report what there is")
    parser.add_argument("--out", help="JSON file for everything measured")
    parser.add_argument("--dry-run", type=int, metavar="CAPABILITY", help="compile only: 80, 86, 89, 90, 100 or 120")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.check:
        kernel, head_dim, config = json.loads(args.check)
        print(worst_error(Candidate(kernel, head_dim, Config(*config))))
        return
    start = time.monotonic()
    capability = divmod(args.dry_run, 10) if args.dry_run else torch.cuda.get_device_capability()
    generation = generation_of(*capability)
    chosen = [
        candidate
        for head_dim in map(int, args.head_dims.split(","))
        for kernel in args.kernels.split(",")
        for candidate in candidates(kernel, head_dim, generation)
    ]
    if args.dry_run:
        dry_run(args.dry_run, chosen)
        return
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    print(f"{len(chosen)} candidates, {workers} at a time", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        checked = list(pool.map(lambda candidate: check(candidate, args.seconds / 2), chosen))
    for candidate in checked:
        if candidate.failed:
            print(f"failed: {candidate}: {candidate.failed}", flush=True)
    print(f"compiled and checked after {time.monotonic() - start:.0f} s", flush=True)
    timings = time_candidates([c for c in checked if not c.failed], start + args.seconds)
    print_best(timings)
    if args.out:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
        results = {"checked": [asdict(c) for c in checked], "timed": [asdict(t) for t in timings]}
        Path(args.out).write_text(json.dumps(about | results, indent=1))


if __name__ == "__main__":
    main()
