"""Training on several GPUs: each row is measured whatever becomes of another, against the right row and loss."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import benchmark_scaling
import pytest
import torch
from measuring import scaling, scaling_processes
from measuring.scaling import Amount, Steps
from measuring.scaling_communication import communication
from measuring.scaling_meshes import Mesh, heads_fit, usual
from measuring.scaling_processes import Job, run_all
from measuring.step_parts import Kernel
from measuring.training import batches

from flashtrain.training.distributed.processes import ALONE, Processes
from tests.scripts.conftest import ROOT, check_facts


def test_rows_of_one_two_and_a_shared_sequence(dry_run):
    """Equal sequences give equal losses, and a step's tokens are counted once, whoever has them."""
    code, result = dry_run(benchmark_scaling.main, "--meshes", "1,ddp:2,context:2:ring", "--models", "gpt2")
    assert code == 0
    check_facts(result)
    one, data, shared = result["rows"]
    assert [row["failed"] for row in result["rows"]] == [None] * 3
    for row, tokens in ((one, 64), (data, 128), (shared, 64)):
        seconds = sum(row["steps_ms"]) / len(row["steps_ms"]) / 1000
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
        assert row["step_ms"]["repeats"] >= 2 and row["forecast_gib"] > 0
        assert row["efficiency"] == pytest.approx(
            row["tokens_per_second"] / row["devices"] / one["tokens_per_second"], rel=1e-3
        )
    assert shared["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert data["losses"] != pytest.approx(one["losses"], rel=1e-5)
    assert one["communication"] is None and shared["communication"] > 0 and len(shared["profile"]["step_ms"]) == 2
    assert shared["forecast_sent_gib"]["sequences"] > 0 == data["forecast_sent_gib"]["sequences"]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes each process of a row run this shell script."""

    def become(script: str) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(python))
        monkeypatch.setattr(scaling_processes, "_GRACE", 0.3)

    return become


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_row_that_hangs_is_told_and_none_of_its_processes_is_left(dry_run, program, tmp_path):
    program(f"sleep 60 & echo $! >> {tmp_path}/pids; echo $$ >> {tmp_path}/pids; sleep 60")
    code, result = dry_run(benchmark_scaling.main, "--meshes", "ddp:2,fsdp:2", "--row-seconds", "1.5")
    assert code == 1
    assert [row["failed"] for row in result["rows"]] == ["took longer than 2 s"] * 2
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 8
    time.sleep(0.2)
    assert not any(map(_is_running, pids))


@pytest.mark.parametrize(
    ("of_rank_1", "failed"),
    [
        ("echo lost >&2; kill -9 $$", "rank 1 of 2: ended with -9: lost"),
        ("""echo 'RESULT {"failed": "out of memory"}'; exit 1""", "rank 1 of 2: out of memory"),
    ],
)
def test_the_rank_that_crashes_is_named_and_the_next_row_is_measured(dry_run, program, of_rank_1, failed):
    """Not the one that waits for it, nor the one that fails because the other is gone."""
    program(f"""
        [ -z "$RANK" ] && echo 'RESULT {{"tokens_per_second": 9.0, "failed": "made up"}}' && exit 0
        [ "$RANK" = 0 ] && echo "the connection is gone" >&2 && exit 1
        sleep 0.1; {of_rank_1}""")
    code, result = dry_run(benchmark_scaling.main, "--meshes", "context:2:ulysses,1")
    assert code == 1
    assert [row["failed"] for row in result["rows"]] == [failed, "made up"]


def test_a_mesh_of_more_gpus_than_there_are_and_a_row_without_time_say_so(dry_run):
    code, result = dry_run(benchmark_scaling.main, "--meshes", "1,ddp:4096", "--minutes", "0")
    assert code == 1
    found = {row["mesh"]: row["failed"] for row in result["rows"]}
    assert found["1"] == "not run: out of time"
    assert found["ddp:4096"].startswith("not run: ") and found["ddp:4096"].endswith(" GPUs here")


def test_processes_that_were_started_ahead_end_with_the_one_that_started_them():
    """Before they may begin and afterwards, even where that one was killed: all it takes is that it is gone."""
    code = "from measuring.scaling_processes import wait_for_go\nwait_for_go()\nprint('on', flush=True)\nwhile 1: pass"
    for said in (b"", b"g"):
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT / "scripts", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(said)
            process.stdin.flush()
            if said:
                assert process.stdout.readline() == b"on\n"
            process.stdin.close()
            assert process.wait(30) == 1
        finally:
            process.kill()


@pytest.mark.parametrize("visible", [None, "5,GPU-1a2b"])
def test_side_by_side_rows_of_one_gpu_have_one_each_and_larger_ones_have_all(tmp_path, monkeypatch, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    first, second = (visible or "0,1").split(",")
    script = f"""head -c1 > /dev/null; echo "begin $1 ${{CUDA_VISIBLE_DEVICES:-all}}" >> {tmp_path}/log; sleep 0.4
        echo "end $1" >> {tmp_path}/log; echo 'RESULT {{"ok": 1}}'"""
    jobs = [Job(["sh", "-c", script, "sh", str(n)], size) for n, size in enumerate((1, 1, 1, 2))]
    found: dict[int, dict] = {}
    run_all(jobs, 2, True, lambda: 20.0, lambda number, row: found.update({number: row}))
    assert sorted(found) == [0, 1, 2, 3] and all(row["ok"] == 1 for row in found.values())
    log = (tmp_path / "log").read_text().splitlines()
    assert sorted(log[:2]) == [f"begin 0 {first}", f"begin 1 {second}"]
    both = f"begin 3 {visible or 'all'}"
    assert log.index("end 2") < log.index(both)
    assert log.count(both) == 2


def _row(mesh: str, rate: float, call: int = 1, failed: str | None = None, **changes: object) -> dict:
    about = {"model": "gpt2", "seq_len": 65536, "mesh": mesh, "devices": Mesh.parse(mesh).devices, "overrides": []}
    about["sequences"] = Mesh.parse(mesh).shares
    return {**about, "tokens_per_second": rate, "call": call, "failed": failed, **changes}


def test_efficiency_is_against_one_gpu_of_the_same_model_length_settings_and_call():
    rows = [
        _row("1", 100.0),
        _row("1", 1000.0, seq_len=1024),
        _row("1", 500.0, model="gpt_1.3b"),
        _row("1", 90.0, overrides=["trainer.compile=false"]),
        _row("1", 110.0, call=2),
        _row("ddp:2", 190.0),
        _row("context:2:ring", 198.0, call=2),
        _row("2x2", 300.0, call=3),
        _row("ddp:2", 0.0, failed="out of memory"),
        _row("ddp:2", 9.0, seq_len=2048),
    ]
    benchmark_scaling.add_efficiency(rows)
    told = [(row.get("efficiency"), row.get("speed_up"), row.get("efficiency_of")) for row in rows[5:]]
    assert told[0] == (pytest.approx(0.95), pytest.approx(1.9), 1)
    assert told[1] == (pytest.approx(0.9), pytest.approx(1.8), 2)
    assert told[2] == (pytest.approx(300 / 440), pytest.approx(300 / 110), 2)  # of the last call that has it
    assert told[3:] == [(None, None, None)] * 2


def test_rows_of_an_earlier_call_are_kept(dry_run, tmp_path, monkeypatch):
    earlier = tmp_path / "earlier.json"
    rows = [_row("1", 50.0, failed="lost"), _row("ddp:2", 0.0, failed="not run: out of time")]
    earlier.write_text(json.dumps({"rows": rows, "calls": ["the first"]}))
    monkeypatch.setattr(benchmark_scaling, "run_all", lambda jobs, *_: None)
    code, result = dry_run(benchmark_scaling.main, "--meshes", "1", "--also", str(earlier))
    assert code == 0  # what failed in another call is that one's
    assert [row["failed"] for row in result["rows"]] == ["lost"]  # what was not run may be in this one
    assert result["calls"][0] == "the first" and len(result["calls"]) == 2


def test_sending_is_exposed_where_nothing_is_computed_beside():
    nccl = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    kernels = [
        Kernel("gemm", 0, 4000),
        Kernel(nccl, 3000, 6000),
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5000, 7000),
        Kernel("flash", 6500, 9000),
        Kernel("Memcpy PtoP (Device -> Device)", 9500, 10000),
    ]
    found = communication(kernels)
    assert found["step_ms"] == pytest.approx(10.0)
    assert found["communication_ms"] == pytest.approx(4.5)  # 3..7, counted once, and 9.5..10
    assert found["exposed_ms"] == pytest.approx(3.0)  # 4..6.5 and 9.5..10
    assert found["kernels"][nccl] == pytest.approx(3.0)
    assert communication([])["communication_ms"] == 0


class _Two(Processes):
    """A process that is told that the other one took twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def most(self, *numbers: float) -> list[float]:
        return [2 * number for number in numbers]

    def meet(self) -> None:
        pass


@pytest.mark.parametrize(
    ("processes", "long_step", "made", "profiled"),
    [(ALONE, 20.0, 4, None), (_Two(), 20.0, 5, "a further step"), (_Two(), 0.0, 4, "the last timed step")],
)
def test_steps_are_few_and_one_of_several_gpus_is_profiled(monkeypatch, processes, long_step, made, profiled):
    monkeypatch.setattr(scaling, "LONG_STEP", long_step)
    steps, count, done = Steps(torch.device("cpu"), processes, Amount(2, 2, 9, 0.0)), 0, False
    while not done:
        time.sleep(0.001)
        torch.ones(8).sum()  # something to profile
        count += 1
        done = steps.done(torch.tensor(float(count)))
    figures = steps.figures(tokens=1000)
    assert count == made
    assert (figures["loss"], figures["loss_of_step"], figures["losses"]) == (4.0, 4, [1.0, 2.0, 3.0, 4.0])
    assert figures["step_ms"]["repeats"] == 2
    assert figures["tokens_per_second"] == pytest.approx(2e6 / sum(figures["steps_ms"]))
    assert figures.get("profile", {}).get("profiled") == profiled


def test_meshes_say_what_they_divide():
    told = {
        text: Mesh.parse(text) for text in ("1", "ddp:2", "fsdp:4", "context:8:ulysses", "2x4", "context:2:ring:ddp")
    }
    assert [(m.devices, m.shares, m.context, m.strategy, m.method) for m in told.values()] == [
        (1, 1, 1, "ddp", "ring"),
        (2, 2, 1, "ddp", "ring"),
        (4, 4, 1, "fsdp", "ring"),
        (8, 1, 8, "fsdp", "ulysses"),
        (8, 2, 4, "fsdp", "ring"),
        (2, 1, 2, "ddp", "ring"),
    ]
    assert told["context:8:ulysses"].scaling == "strong: one sequence on 8 GPUs"
    assert told["2x4"].scaling == "weak: 2 sequences on 8 GPUs"
    assert [mesh.text for mesh in usual(2)] == ["1", "ddp:2", "fsdp:2", "context:2:ring", "context:2:ulysses"]
    assert not heads_fit(told["context:8:ulysses"], 12) and heads_fit(told["context:8:ulysses"], 16)


@pytest.mark.parametrize("text", ["2", "ddp:1", "context:1:ring", "ring:2", "2x1", "context:2:star"])
def test_what_is_no_mesh_says_what_there_is(text, capsys):
    with pytest.raises(SystemExit):
        benchmark_scaling.parse(["--meshes", f"1,{text}"])
    assert "context:N:METHOD" in capsys.readouterr().err


def test_the_configuration_has_a_sequence_a_share_and_the_same_micro_batch():
    for text, sequences in (("1", 1), ("fsdp:2", 2), ("context:2:ulysses", 1), ("2x2", 2)):
        config = scaling.scaled_config("gpt_1.3b", 65536, Mesh.parse(text), [], False, False)
        assert (config.sequences_per_step, config.sequences_per_micro_batch) == (sequences, 1)
        assert (config.model.num_layers, config.memory.checkpointing) == (24, "selective")


def test_the_sequences_of_a_step_are_divided_and_none_is_trained_on_twice():
    config = scaling.scaled_config("gpt2", 64, Mesh.parse("fsdp:4"), [], True, True)
    shares = [iter(scaling.Share(config, 320, (own, 4))) for own in range(4)]
    for whole in itertools.islice(batches(config, 320), 2):
        parts = [batch for share in shares for batch in next(share)]
        assert [batch.num_targets for batch in parts] == [64] * 4
        assert torch.equal(torch.cat([batch.tokens for batch in parts]), whole.tokens)
        assert torch.equal(torch.cat([batch.targets for batch in parts]), whole.targets)
