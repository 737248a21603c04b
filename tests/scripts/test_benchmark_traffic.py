"""Bytes by the profiler are told apart by case and pass, and stand beside bytes counted by hand."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from types import SimpleNamespace

import benchmark_traffic
import plot_traffic
import pytest
import torch
from measuring import attention as compared
from measuring import theory, traffic, traffic_cases
from measuring.attention import Case, Shape
from measuring.correctness import Truth, check
from measuring.report import Unavailable

from flashtrain.attention.portable.configs import Config, Configs, table_entry
from tests.scripts.conftest import ROOT, check_facts
from tests.scripts.test_benchmark_attention import _fake
from tests.scripts.test_benchmark_paper_table import _profiler

KERNELS = [("a", 8, 1), ("spin", 0, 0), ("b", 4, 2), ("c", 2, 1), ("spin", 0, 0), ("d", 1, 1), ("spin", 0, 0)]
TOLD = [
    {"case": "portable@32", "passes": ["forward", "backward"], "failed": None},
    {"case": "16x16@32", "passes": ["forward"], "failed": None},
]


def _csv(kernels, cache):
    """As the profiler writes it, a line for each kernel and metric."""
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, (name, read, written) in enumerate(kernels):
        counts = {traffic.READ: f"{read},000,000,000", traffic.WRITTEN: f"{written},000,000,000"}
        counts |= {traffic.ASKED: f"{read}00,000,000"} if cache else {}
        kernel = "spin_kernel(long)" if name == "spin" else name
        lines += [f'"{number}","{kernel}","{metric}","byte","{value}"' for metric, value in counts.items()]
    return "\n".join([*lines, "==PROF== Disconnected\n"])


def test_cases_and_passes_of_one_profiled_run_are_told_apart():
    found, missing = traffic.by_case(traffic.parse(_csv(KERNELS, cache=True)), TOLD)
    assert not missing
    ours, tile = found["portable@32"], found["16x16@32"]
    assert (ours["forward"]["read_gb"], ours["backward"]["read_gb"], ours["both"]["read_gb"]) == (8, 6, 14)
    assert (ours["forward"]["written_gb"], ours["backward"]["written_gb"], ours["both"]["kernels"]) == (1, 3, 3)
    # The profiler counts pieces of 32 bytes there.
    assert ours["backward"]["asked_gb"] == pytest.approx(6 * 3.2)
    assert (tile["forward"]["read_gb"], set(tile)) == (1, {"forward", "both", "by_kernel"})
    assert [kernel["name"] for kernel in ours["by_kernel"]["backward"]] == ["b", "c"]


def test_a_case_that_fails_on_the_way_does_not_lend_its_kernels_to_the_next():
    told = [{**TOLD[0], "failed": "out of memory"}, TOLD[1], {**TOLD[1], "case": "late"}]
    found, missing = traffic.by_case(traffic.parse(_csv(KERNELS, cache=False)), told)
    assert found["16x16@32"]["both"]["read_gb"] == 1
    assert "asked_gb" not in found["16x16@32"]["both"]
    assert missing == {"portable@32": "out of memory", "late": "the profiler ended before it"}


def test_a_kernel_without_a_count_is_no_zero():
    with pytest.raises(Unavailable, match="did not count b"):
        traffic.parse(_csv(KERNELS, cache=False).replace('"4,000,000,000"', '"n/a"'))


@pytest.fixture
def queue(monkeypatch):
    """What a profiled process launches inside the profiled range, on a machine without a GPU."""
    launched, state = [], {"on": False}

    def launch(name):
        if state["on"]:
            launched.append(traffic.Kernel(name, 1e9, 0))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: launch("spin_kernel"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: state.update(on=True))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: state.update(on=False))
    return SimpleNamespace(launched=launched, launch=launch)


class _Recorded:
    """A case of which the calls number `fails` and on fail, after a kernel."""

    implementation = SimpleNamespace(context=contextlib.nullcontext)

    def __init__(self, queue, fails=99):
        self.queue, self.fails, self.calls = queue, fails, 0

    def forward(self):
        self.queue.launch("forward")
        self.calls += 1
        if self.calls >= self.fails:
            raise torch.OutOfMemoryError("no room")

    def backward(self, out):
        self.queue.launch("backward 1")
        self.queue.launch("backward 2")

    def forward_backward(self):
        self.backward(self.forward())


def test_what_a_profiled_process_launches_is_what_its_parent_reads(queue, capsys):
    both, forward = ("forward", "backward"), ("forward",)
    cases = [("first", both, _Recorded(queue)), ("never", both, _Recorded(queue, fails=1))]
    cases += [("halfway", both, _Recorded(queue, fails=3)), ("tile", forward, _Recorded(queue))]
    traffic.profiled_calls([(name, passes, lambda case=case: case) for name, passes, case in cases], 60)
    told = [json.loads(line.removeprefix("profiled: ")) for line in capsys.readouterr().out.splitlines()]
    found, missing = traffic.by_case(queue.launched, told)
    assert {name: counts["both"]["read_gb"] for name, counts in found.items()} == {"first": 3, "tile": 1}
    assert missing == {"never": "out of memory", "halfway": "out of memory"}


def test_no_profiled_call_begins_after_the_time_is_over(queue, capsys):
    traffic.profiled_calls([("late", ("forward",), lambda: _Recorded(queue))], -1)
    assert "out of time" in capsys.readouterr().out
    assert not queue.launched


def test_a_profiler_that_hangs_is_ended_with_what_it_started(tmp_path):
    ncu = _profiler(tmp_path, f"(sleep 1.5; touch {tmp_path}/survived) &\nwait\n")
    start = time.monotonic()
    with pytest.raises(Unavailable, match="longer than"):
        traffic.profile(ncu, ROOT / "train.py", [], 0.3)
    assert time.monotonic() - start < 1.4
    time.sleep(1.6)
    assert not (tmp_path / "survived").exists()


def _canned(tmp_path, with_cache=True):
    """A profiler that knows three cases; without the L2 cache's counters, if so told."""
    told = "".join(f"echo '{traffic._TOLD}{json.dumps(about)}'\n" for about in TOLD)
    (tmp_path / "cache.csv").write_text(_csv(KERNELS, cache=True))
    (tmp_path / "plain.csv").write_text(_csv(KERNELS, cache=False))
    refuse = "" if with_cache else 'echo "==ERROR== no such metric"; exit 1;'
    body = f'echo "$@" >> {tmp_path}/arguments\n{told}'
    body += f'case "$*" in *lts__*) {refuse} which=cache;; *) which=plain;; esac\n'
    body += f'while [ "$1" != --log-file ]; do shift; done\ncp {tmp_path}/$which.csv "$2"\n'
    return _profiler(tmp_path, body)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU Triton does not interpret a dry run's tiles"
)
def test_rows_hold_measured_bytes_beside_those_counted_by_hand(dry_run, monkeypatch, tmp_path):
    monkeypatch.setitem(compared.BUILDERS, "portable", _fake)  # the interpreter takes its time
    ncu = _canned(tmp_path)
    code, result = dry_run(benchmark_traffic.main, "--implementations", "portable,nonsense", "--ncu", ncu)
    assert code == 0
    check_facts(result)
    rows = {f"{row['implementation']}@{row['seq_len']}": row for row in result["rows"]}
    for name in ("portable@32", "16x16@32"):
        assert rows[name]["failed"] is None
        assert set(rows[name]["errors"]) == {"out", "dq", "dk", "dv"}
        assert rows[name]["theory"]["forward"]["asked_gb"] > rows[name]["least"]["forward"]["read_gb"] > 0
        assert rows[name]["ms"]["forward"]["median"] > 0
        assert rows[name]["traffic"]["forward"]["asked_gb"] > 0
    assert rows["portable@32"]["traffic"]["both"]["read_gb"] == 14
    assert rows["16x16@32"]["tile"]["block_m"] == 16
    assert "backward" not in rows["16x16@32"]["ms"]
    assert "did not come to it" in rows["portable@64"]["traffic_missing"]
    assert "there are portable" in rows["nonsense@32"]["failed"]
    asked = (tmp_path / "arguments").read_text()
    assert "--profiled portable@32,16x16@32,portable@64" in asked and "nonsense@" not in asked


def test_where_the_profiler_does_not_know_the_cache_it_counts_hbm(tmp_path):
    arguments = benchmark_traffic.parse(["--ncu", _canned(tmp_path, with_cache=False)])
    found, _ = benchmark_traffic.profile(["portable@32", "16x16@32"], arguments, True)
    assert found["portable@32"]["both"]["read_gb"] == 14
    assert "asked_gb" not in found["portable@32"]["both"]


def test_a_wrong_kernel_gets_no_figures_and_is_not_profiled(dry_run, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(compared.BUILDERS, "fake", functools.partial(_fake, grad_scale=1.03))
    monkeypatch.setattr(benchmark_traffic, "TINY", [])
    ncu = _canned(tmp_path)
    code, result = dry_run(benchmark_traffic.main, "--implementations", "fake,standard", "--ncu", ncu)
    assert code == 1
    wrong = [row for row in result["rows"] if row["implementation"] == "fake"]
    assert len(wrong) == 2
    for row in wrong:
        assert row["wrong"] and "ms" not in row and "traffic" not in row
    assert "WRONG" in capsys.readouterr().out
    assert "fake@" not in (tmp_path / "arguments").read_text()


def test_a_forward_kernel_that_leaves_a_wrong_lse_is_wrong(monkeypatch, device):
    shape, right = Shape(1, 1, 32, 16, True), traffic_cases.forward
    inputs = shape.inputs(device, torch.bfloat16, seed=1)
    truth = Truth(*inputs, causal=True)
    build = functools.partial(traffic_cases.tiled, Config(16, 16, 4, 1), shape, device)
    check(Case(build(), *inputs), truth)

    def off(*arguments):
        out, lse = right(*arguments)
        return out, lse + 0.1

    monkeypatch.setattr(traffic_cases, "forward", off)
    with pytest.raises(RuntimeError, match="dv is off"):
        check(Case(build(), *inputs), truth)


def test_a_dry_run_without_a_profiler_has_theory_and_time(dry_run, monkeypatch):
    monkeypatch.setattr(benchmark_traffic, "TINY", [])
    code, result = dry_run(benchmark_traffic.main, "--implementations", "standard")
    assert code == 0
    assert all(row["failed"] is None and "traffic" not in row for row in result["rows"])


def test_the_default_shapes_hold_as_many_tokens_at_every_length():
    arguments = benchmark_traffic.parse([])
    groups = benchmark_traffic.points(arguments)
    assert [group[0].shape.seq_len for group in groups] == [2**n for n in range(9, 17)]
    assert {group[0].shape.batch * group[0].shape.seq_len for group in groups} == {65_536}
    assert groups[1][0].shape == Shape(64, 16, 1024, 64, True)  # the paper's GPT-2 medium
    assert len({point.name for group in groups for point in group}) == sum(map(len, groups))
    assert [sum(point.config is not None for point in group) for group in groups] == [0, 8, 8, 8, 8, 0, 0, 0]


def test_standard_attention_by_hand():
    """One head, 4 tokens of 8 numbers: a tensor is 64 bytes, a matrix of pairs 32."""
    moved = theory.totals(theory.standard(Shape(1, 1, 4, 8, causal=False)))
    # q k^T, scale, softmax, p v: q, k, 3 matrices, v in; 3 matrices and out out.
    assert moved["forward"]["read_gb"] == pytest.approx((3 * 64 + 3 * 32) / 1e9)
    assert moved["forward"]["written_gb"] == pytest.approx((64 + 3 * 32) / 1e9)
    # dout, v, dout, k, q and 8 matrices in; 4 matrices, dv, dq and dk out.
    assert moved["backward"]["read_gb"] == pytest.approx((5 * 64 + 8 * 32) / 1e9)
    assert moved["backward"]["written_gb"] == pytest.approx((3 * 64 + 4 * 32) / 1e9)
    assert moved["both"]["copied_gb"] == 0
    masked = theory.totals(theory.standard(Shape(1, 1, 4, 8, causal=True)))
    # The mask, a byte a pair, is made (two written, one read) and read; one matrix more in and out, one copied.
    assert masked["forward"]["read_gb"] - moved["forward"]["read_gb"] == pytest.approx((32 + 2 * 16) / 1e9)
    assert masked["forward"]["written_gb"] - moved["forward"]["written_gb"] == pytest.approx((32 + 2 * 16) / 1e9)
    assert masked["both"]["copied_gb"] == pytest.approx(4 * 32 / 1e9)


def test_a_mask_that_the_cache_cannot_hold_is_read_for_every_head():
    shape = Shape(2, 3, 8, 16, causal=True)
    large, small = (theory.totals(theory.standard(shape, l2_bytes))["both"] for l2_bytes in (2**20, 1))
    assert small["read_gb"] - large["read_gb"] == pytest.approx(2 * 5 * 64 / 1e9)


def test_tiles_of_the_forward_kernel_by_hand():
    """One head, 256 tokens of 64, tiles of 128 queries and 64 keys: the first loads 128 keys, the second 256."""
    configs = Configs(Config(128, 64, 4, 1), Config(128, 64, 4, 1), Config(64, 64, 4, 1))
    tensor, lse = 256 * 128, 256 * 4
    causal = theory.portable(Shape(1, 1, 256, 64, True), configs)["forward"][0]
    assert causal.asked == tensor + (128 + 256) * 2 * 128 + tensor + lse
    full = theory.portable(Shape(1, 1, 256, 64, False), configs)["forward"][0]
    assert full.asked == tensor + 2 * 256 * 2 * 128 + tensor + lse
    assert (full.read, full.written) == (3 * tensor, tensor + lse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_len", "rows", "columns"), [(256, 64, 128), (256, 128, 64), (500, 192, 128)])
def test_tiles_that_are_counted_are_those_with_something_visible(seq_len, rows, columns, causal):
    def loaded(tile, step, visible):
        """Columns of whole steps in which a row of the tile sees something."""
        blocks = [(r, c) for r in range(0, seq_len, tile) for c in range(0, seq_len, step)]
        return sum(min(step, seq_len - c) for r, c in blocks if not causal or visible[r : r + tile, c : c + step].any())

    sees = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    assert theory.keys_loaded(seq_len, rows, columns, causal) == loaded(rows, columns, sees)
    assert theory.queries_loaded(seq_len, columns, rows, causal) == loaded(columns, rows, sees.T)


def test_bytes_counted_by_hand_are_those_that_the_profiler_counted():
    """GPT-2 medium's attention on an H200: within 5 %, or what stays in a cache of 50 MB at the end of a kernel."""
    measured = {row["implementation"]: row["traffic"] for row in _committed("paper_table")["rows"]}
    shape = Shape(64, 16, 1024, 64, True)
    for name in ("standard", "portable"):
        moved = theory.of(name, shape, table_entry("hopper", 64, 2))
        assert moved is not None
        for passed, by_hand in theory.totals(moved).items():
            counted = measured[name][passed]
            assert counted["read_gb"] == pytest.approx(by_hand["read_gb"], rel=0.05)
            both = [counts["read_gb"] + counts["written_gb"] for counts in (counted, by_hand)]
            assert both[0] == pytest.approx(both[1], rel=0.05)
            assert by_hand["written_gb"] - 0.05 * counted["kernels"] < counted["written_gb"]
            assert counted["written_gb"] < 1.01 * by_hand["written_gb"]


def _committed(benchmark):
    return json.loads((ROOT / "benchmarks" / f"{benchmark}.json").read_text())


def test_the_least_is_less_than_what_kernels_move_and_that_than_what_they_ask_for():
    shape, configs = Shape(16, 16, 4096, 64, True), table_entry("hopper", 64, 2)
    least = theory.least(shape)
    for name in ("portable", "hopper"):
        moved = theory.of(name, shape, configs)
        assert moved is not None
        for passed, counts in theory.totals(moved).items():
            hbm = counts["read_gb"] + counts["written_gb"]
            assert least[passed]["read_gb"] + least[passed]["written_gb"] < hbm < counts["asked_gb"]
    assert theory.of("sdpa", shape, configs) is None


@pytest.fixture
def drawn_from(tmp_path):
    """A result with a length at which standard attention does not fit, and a tile that spills."""
    arguments = benchmark_traffic.parse(["--lengths", "1k,4k", "--tile-lengths", "1k,4k"])
    rows = []
    for point in (point for group in benchmark_traffic.points(arguments) for point in group):
        row = point.row(table_entry("hopper", 64, 2)) | {"failed": None}
        if (point.implementation, point.shape.seq_len) == ("standard", 4096):
            row["failed"] = "out of memory"
        else:
            row["ms"] = {name: {"median": 1.0 + point.shape.seq_len / 1024} for name in ("forward", "both")}
            row["traffic"] = row["theory"]
        if point.config is not None:
            row["resources"] = {"spilled_bytes": 8 if point.config.block_n == 256 else 0}
        rows.append(row)
    result = {"rows": rows, "gpu": "NVIDIA H200", "settings": benchmark_traffic.settings(arguments)}
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(result))
    return path, result


def test_lengths_and_tiles_become_pictures(drawn_from, tmp_path):
    path, _ = drawn_from
    out = [tmp_path / "lengths.png", tmp_path / "tiles.png"]
    assert plot_traffic.main([str(path), "--lengths", str(out[0]), "--tiles", str(out[1])]) == 0
    for picture in out:
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_a_length_that_failed_has_theory_in_the_picture_and_nothing_measured(drawn_from):
    _, result = drawn_from
    first = plot_traffic.over_length(result).axes[0]
    standard = [
        line for line in first.lines if line.get_color() == plot_traffic.style_of(["standard"])["standard"]["color"]
    ]
    lengths = {line.get_linestyle(): list(line.get_xdata()) for line in standard}
    assert lengths == {"-": [1024], "--": [1024, 4096]}


def test_a_result_without_figures_is_not_drawn(drawn_from):
    _, result = drawn_from
    for row in result["rows"]:
        row["failed"] = "not run: out of time"
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_traffic.over_length(result)
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_traffic.over_tiles(result)
