"""The paper's table: time, FLOPs, and traffic as the profiler's CSV gives it."""

from __future__ import annotations

from pathlib import Path

import benchmark_paper_table
import pytest
from measuring import traffic
from measuring.report import Unavailable

from tests.scripts.conftest import check_facts

HEAD = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"


def _lines(number: int, name: str, read: str, written: str) -> str:
    start = f'"{number}","7","{name}","Command line profiler metrics"'
    return f'{start},"{READ}","byte","{read}"\n{start},"{WRITTEN}","byte","{written}"\n'


BY_LINE = (
    "==PROF== Connected to process 7\n"
    + HEAD
    + _lines(0, "forward", "400,000,000", "140,000,000")
    + _lines(1, "spin_kernel", "64", "0")
    + _lines(2, "delta", "270,000,000", "1,000,000")
    + _lines(3, "backward(float, int)", "700,000,000", "400,000,000")
    + "==PROF== Disconnected\n"
)
BY_COLUMN = (
    f'"ID","Kernel Name","{READ}","{WRITTEN}"\n"","","byte","byte"\n'
    '"0","forward","400000000","140000000"\n"1","spin_kernel","64","0"\n"2","backward","970000000","401000000"\n'
)


@pytest.mark.parametrize("text", [BY_LINE, BY_COLUMN])
def test_traffic_is_added_up_by_pass_from_either_layout_of_the_profiler(text):
    found = traffic.passes(traffic.parse(text))
    assert found["forward"]["read_gb"] == pytest.approx(0.4)
    assert found["forward"]["written_gb"] == pytest.approx(0.14)
    assert found["backward"]["read_gb"] == pytest.approx(0.97)
    assert found["backward"]["written_gb"] == pytest.approx(0.401)
    assert found["both"]["read_gb"] == pytest.approx(1.37)


def test_passes_that_cannot_be_told_apart_are_refused():
    with pytest.raises(Unavailable, match="spin_kernel"):
        traffic.passes([("forward", 1.0, 1.0), ("backward", 1.0, 1.0)])


def _profiler(tmp_path: Path, body: str) -> str:
    path = tmp_path / "ncu"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


def test_the_table_takes_traffic_from_the_profiler(dry_run, tmp_path):
    (tmp_path / "canned.csv").write_text(BY_LINE)
    log = 'while [ "$1" != --log-file ]; do shift; done\n'
    ncu = _profiler(tmp_path, f'echo "$@" > {tmp_path}/arguments\n{log}cp {tmp_path}/canned.csv "$2"\n')
    code, result = dry_run(benchmark_paper_table.main, "--implementations", "standard,sdpa", "--ncu", ncu)
    assert code == 0
    check_facts(result)
    for row in result["rows"]:
        assert row["traffic"]["both"]["read_gb"] == pytest.approx(1.37)
        assert row["ms"]["both"]["repeats"] >= 9
    asked = (tmp_path / "arguments").read_text()
    assert "--clock-control none" in asked and f"{READ},{WRITTEN}" in asked and "--profiled sdpa" in asked


def test_without_counters_the_table_says_why(dry_run, tmp_path, capsys):
    ncu = _profiler(tmp_path, 'echo "==ERROR== ERR_NVGPUCTRPERM: no permission"\nexit 1\n')
    code, result = dry_run(benchmark_paper_table.main, "--implementations", "standard", "--ncu", ncu)
    assert code == 0
    assert "ERR_NVGPUCTRPERM" in result["rows"][0]["traffic_missing"]
    code, result = dry_run(benchmark_paper_table.main, "--implementations", "standard", "--ncu", "no-such-profiler")
    assert "not installed" in result["rows"][0]["traffic_missing"]
    assert "traffic not measured" in capsys.readouterr().out


def test_the_least_traffic_of_the_papers_shape_is_1_61_gb():
    """Eight tensors read and four written, 134 MB each."""
    least = benchmark_paper_table.least_traffic(benchmark_paper_table.PAPER)
    assert least["both_gb"] == pytest.approx(1.61, abs=0.005)
    assert least["read_gb"] == pytest.approx(2 * least["written_gb"])


def test_flops_of_the_two_algorithms():
    """One product of all pairs is 137.4 GFLOP there: standard makes 6, a fused causal algorithm 7 halves."""
    assert benchmark_paper_table.gflops("standard", benchmark_paper_table.PAPER) == pytest.approx(824.6, abs=0.1)
    assert benchmark_paper_table.gflops("portable", benchmark_paper_table.PAPER) == pytest.approx(481.0, abs=0.1)
