"""Runs that srun starts, and Slurm stops and starts again. There is no Slurm here: the variables and signals are those
of Slurm 22.05."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from flashtrain.training.distributed.slurm import of_slurm

from ..conftest import figures, summary
from ..wandb_file import read_offline_run
from .test_starting import LONG, descendants_of, finished, wait_for, whole_checkpoint


def srun(rank: int, **changes: str) -> dict[str, str]:
    """What srun has set for one of two tasks on two of a job's machines, which the second does not begin with.
    SLURM_NTASKS_PER_NODE is there only where --ntasks-per-node was given."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "python",
        "SLURM_JOB_NODELIST": "node[1-2],localhost",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": str(rank),
        "SLURM_NODELIST": "node[1-2],localhost",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,node2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        **changes,
    }


def stop(processes: list[subprocess.Popen]) -> None:
    """As Slurm does when a job is put back into the queue: to every process that the tasks have started, too."""
    everyone = [pid for process in processes for pid in (process.pid, *descendants_of(process.pid))]
    for number in (signal.SIGCONT, signal.SIGTERM):
        for pid in everyone:
            os.kill(pid, number)


@pytest.mark.parametrize(
    ("changes", "address", "here"),
    [
        ({}, "localhost", 1),
        ({"SLURM_STEP_NODELIST": "gpu[07-12,20],cpu3"}, "gpu07", 1),
        ({"SLURM_STEP_NODELIST": "rack[2-3]n[5,7]", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"},
         "rack2n5", 4),
        ({"SLURM_STEP_NODELIST": "gpu1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}, "gpu1", 2),
    ],
)  # fmt: skip
def test_where_processes_meet_is_the_first_machine_of_their_srun(changes, address, here):
    found = of_slurm(srun(1, **changes))
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "0")
    assert (found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == (address, str(here))


def test_two_sruns_of_a_job_at_the_same_time_do_not_meet_and_what_the_user_has_set_holds():
    first, second = of_slurm(srun(0)), of_slurm(srun(0, SLURM_STEP_ID="1"))
    assert first["MASTER_PORT"] == of_slurm(srun(1))["MASTER_PORT"] != second["MASTER_PORT"]
    own = of_slurm(srun(0, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500"))
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_a_job_that_slurm_stops_and_starts_again_is_one_run_like_one_that_was_not_stopped(command, tmp_path):
    job = ("trainer.max_steps=200", "trainer.val_every_n_steps=50", "trainer.log_every_n_steps=5")
    environment = {"HOME": str(tmp_path), "WANDB_MODE": "offline"}

    def start(**changes: str) -> list[subprocess.Popen]:
        return [command(*job, "run_id=wide", "logger=wandb", **environment, **srun(rank, **changes)) for rank in (0, 1)]

    folder = tmp_path / "runs" / "wide"
    processes = start()
    wait_for(processes[0], folder, "step 20/")
    stop(processes)
    ends = [finished(process) for process in processes]
    assert [code for code, _ in ends] == [143, 143], ends
    assert summary(folder)["status"] == "stopped" and summary(folder)["steps"] < 200
    ends = [finished(process) for process in start(SLURM_RESTART_COUNT="1")]
    assert [code for code, _ in ends] == [0, 0], ends
    assert summary(folder)["status"] == "finished"
    assert [path.name for path in folder.parent.iterdir()] == ["wide"]
    code, output = finished(command(*job, "run_id=whole"))
    assert code == 0, output
    assert figures(folder) == figures(tmp_path / "runs" / "whole")
    tracked = read_offline_run(folder, all_parts=True)  # which is one run: SIGTERM has lost no row of it
    assert {row["step"] for row in tracked.history if "step" in row} == set(range(5, 201, 5))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_first_process_that_dies_or_hangs_is_named_though_all_others_met_at_it(command, tmp_path, number):
    job, folder = (*LONG, "trainer.timeout=3s", "run_id=first"), tmp_path / "runs" / "first"
    processes = [command(*job, **srun(rank)) for rank in (0, 1)]
    wait_for(processes[0], folder, "step 25/")
    os.kill(processes[0].pid, number)
    code, output = finished(processes[1], timeout=40)
    processes[0].kill()
    processes[0].communicate()
    assert code == 1
    assert "rank 0 of 2 died or hung" in output
    assert whole_checkpoint(folder) >= 20
