"""How several processes start, and how a run ends when one of them does not go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashtrain import sweep
from flashtrain.training import preemption
from flashtrain.training.run import run

from ..conftest import ROOT, metrics, summary
from ..wandb_file import read_offline_run

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ONE_RUNS_OUT = """
import itertools, os, runpy, sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

steps = itertools.count(1)

def run_out(*about):
    if os.environ["RANK"] == "1" and next(steps) == 23:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

register_optimizer_step_pre_hook(run_out)
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""
ONE_IS_KILLED = """
import itertools, os, signal

from torch.distributed.checkpoint import FileSystemWriter

times, write = itertools.count(1), FileSystemWriter.write_data

def die(self, plan, planner):
    if next(times) == 2:
        (self.path / "__1_0.distcp").write_bytes(b"begun")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, plan, planner)

if os.environ.get("RANK") == "1":
    FileSystemWriter.write_data = die
__file__ = os.path.abspath("train.py")  # runs here, under this script's name, so that its processes are this script too
exec(compile(open(__file__).read(), __file__, "exec"))
"""
PYTHON_DIES_AT_ITS_END = """
import os, runpy, sys

class Leftover:
    def __del__(self, abort=os.abort):
        abort()

sys.leftover = Leftover()  # as a thread of a group that lets go of a tensor too late
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""
LONG = ("trainer.max_steps=100k", "trainer.log_every_n_steps=5", "trainer.checkpoint_every_n_steps=10")


def finished(process: subprocess.Popen, timeout: float = 90) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def wait_for(process: subprocess.Popen, folder: Path, text: str, timeout: float = 60) -> None:
    """Until a run's log says that."""
    end = time.monotonic() + timeout
    while not ((folder / "train.log").exists() and text in (folder / "train.log").read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"{folder} does not say {text!r}"
        time.sleep(0.1)


def second_rank(parent: int) -> int:
    """The process of rank 1 that a command has started."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"LOCAL_RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("no rank 1")


def descendants_of(pid: int) -> list[int]:
    """All that a process has started, and what these have."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [found for child in children for found in descendants_of(child)]


def running(pid: int) -> bool:
    """Whether there is such a process, and it is not a dead one that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def whole_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint, which can be read."""
    from flashtrain.training.checkpoints import newest

    found = newest(folder / "checkpoints")
    assert found is not None
    return found[1]["flashtrain"]["step"]


def test_a_sweep_of_jobs_with_two_processes_gives_each_one_folder_and_one_tracked_run(command, tmp_path):
    job = ("seed=1,2", "logger=wandb", "trainer.max_steps=3", "run_id=seeds")
    code, output = finished(command("-m", *job, HOME=str(tmp_path)))
    assert code == 0, output
    folder = tmp_path / "runs" / "seeds"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "conf"]
    runs = [folder / "0", folder / "1"]
    assert [summary(run)["status"] for run in runs] == ["finished", "finished"]
    tracked = [read_offline_run(run) for run in runs]  # exactly one each
    assert len({record.run_id for record in tracked}) == 2
    assert [record.config["seed"] for record in tracked] == [1, 2]
    assert [len(metrics(run)) for run in runs] == [3, 3]


def test_a_plan_for_several_processes_is_printed_once(make_config, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run(make_config("trainer.devices=2", "plan.only=true"), []) == 0
    assert capsys.readouterr().out.count("forecast for") == 1


def test_an_error_of_all_processes_is_told_once(command, tmp_path):
    code, output = finished(command("run_id=wrong", "model.vocab_size=5"))
    assert code == 1
    assert "model.vocab_size=5: tokenizer" in output
    assert "rank 1: " not in output
    assert "rank 1: " not in (tmp_path / "runs" / "wrong" / "train.log").read_text()


def test_torchrun_starts_one_run_and_a_process_that_runs_out_of_memory_is_named(command, tmp_path):
    script = tmp_path / "one_runs_out.py"
    script.write_text(ONE_RUNS_OUT)
    code, output = finished(command(*LONG, "run_id=full", by=(*TORCHRUN, str(script)), PYTHONPATH=str(ROOT)))
    assert code == 1
    assert "rank 1: out of memory in step 23" in output
    folder = tmp_path / "runs" / "full"
    assert [path.name for path in folder.parent.iterdir()] == ["full"]
    assert "devices: 2" in (folder / "config.yaml").read_text()
    assert "rank 1: out of memory in step 23" in (folder / "train.log").read_text()
    assert summary(folder)["status"] == "failed"
    assert whole_checkpoint(folder) == 20


def test_how_python_ends_does_not_change_what_a_finished_run_says(command, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(PYTHON_DIES_AT_ITS_END)
    job = ("trainer.max_steps=2", "run_id=done")
    code, output = finished(command(*job, by=(*TORCHRUN, str(script)), PYTHONPATH=str(ROOT)))
    assert code == 0, output
    assert summary(tmp_path / "runs" / "done")["status"] == "finished"


def test_a_run_that_exists_is_refused_once_and_at_once(command, tmp_path):
    (tmp_path / "runs" / "there").mkdir(parents=True)
    code, output = finished(command("run_id=there"))
    assert code == 1
    assert output.count("there exists; continue it with resume=there") == 1


def test_a_process_that_is_killed_while_it_writes_is_named_and_the_last_checkpoint_is_whole(command, tmp_path):
    script = tmp_path / "one_is_killed.py"
    script.write_text(ONE_IS_KILLED)
    parts = ("trainer=fsdp", "trainer.checkpoint_format=sharded", "run_id=killed")
    code, output = finished(command(*LONG, *parts, script=str(script), PYTHONPATH=str(ROOT)))
    folder = tmp_path / "runs" / "killed"
    assert code == 1
    assert "rank 1 of 2" in output and "killed by SIGKILL" in output
    assert summary(folder)["status"] == "failed"
    assert whole_checkpoint(folder) == 10
    assert not (folder / "checkpoints" / "step-00000020.ckpt").exists()


def test_a_process_that_hangs_is_named_and_ended(command, tmp_path):
    process, folder = command(*LONG, "run_id=hung", "trainer.timeout=3s"), tmp_path / "runs" / "hung"
    wait_for(process, folder, "step 25/")
    hung = second_rank(process.pid)
    os.kill(hung, signal.SIGSTOP)
    begun = time.monotonic()
    wait_for(process, folder, "rank 1 of 2 died or hung", timeout=20)
    code, output = finished(process, timeout=60)
    assert code == 1 and not running(hung)
    assert "rank 0 of 2" in output and "killed by SIGKILL" not in output  # who noticed, not whom we killed
    assert time.monotonic() - begun < 23  # so that with the usual 40 seconds in place of 3 it is all over in a minute
    assert "rank 1 of 2 died or hung" in output
    assert whole_checkpoint(folder) >= 20


def test_sigterm_to_one_process_saves_and_stops_all(command, tmp_path):
    process, folder = command(*LONG, "run_id=stopped", "trainer=fsdp"), tmp_path / "runs" / "stopped"
    wait_for(process, folder, "step 15/")
    os.kill(second_rank(process.pid), signal.SIGTERM)
    code, output = finished(process, timeout=60)
    assert code == 143, output
    about = summary(folder)
    assert about["status"] == "stopped"
    assert whole_checkpoint(folder) == about["steps"]
    code, output = finished(command_to_go_on(process, "stopped", about["steps"] + 2))
    assert code == 0, output
    assert summary(folder)["steps"] == about["steps"] + 2


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1")], ids=["run", "sweep"])
def test_when_the_starting_process_is_killed_the_others_end_and_the_last_checkpoint_is_whole(command, tmp_path, sweep):
    process = command(*LONG, *sweep, "run_id=orphans")
    folder = tmp_path / "runs" / "orphans" / ("0" if sweep else "")
    wait_for(process, folder, "step 15/")
    descendants = descendants_of(process.pid)
    assert len(descendants) >= 2
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 40
    while alive := [pid for pid in descendants if running(pid)]:
        assert time.monotonic() < end, f"{alive} go on"
        time.sleep(0.2)
    assert whole_checkpoint(folder) >= 10


def test_a_signal_that_comes_twice_at_once_counts_once_and_a_later_one_ends_the_process(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    stop = preemption.Preemption()
    with stop.installed():
        # As Slurm does before a time limit and then at the end of a job: to all processes, some of which pass it on.
        for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested and stop.exit_code == 143
        time.sleep(1.5)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [143]


def test_a_job_that_a_launcher_starts_once_more_goes_on_with_its_run(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    class Run:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 0

    hydra = SimpleNamespace(
        sweep=SimpleNamespace(dir=str(tmp_path / "seeds")),
        job=SimpleNamespace(num=1),
        overrides=SimpleNamespace(task=["seed=2", "run_id=seeds"]),
    )
    monkeypatch.setattr(sweep.HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(sweep.subprocess, "Popen", Run)
    (tmp_path / "seeds").mkdir()
    sweep.run_job(ROOT / "train.py")
    assert commands[-1][-3:] == ["seed=2", "run_id=seeds/1", "logger.group=seeds"]
    (tmp_path / "seeds" / "1" / "config.yaml").write_text("")
    sweep.run_job(ROOT / "train.py")
    assert commands[-1][-2:] == [f"runs_dir='{tmp_path}'", "resume=seeds/1"]


def test_a_launcher_that_is_not_installed_is_named_before_the_sweep_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher", None)
    with pytest.raises(SystemExit, match=r"hydra/launcher=slurm: .* pip install hydra-submitit-launcher"):
        sweep.prepare(["train.py", "-m", "hydra/launcher=slurm", f"runs_dir={tmp_path}", "run_id=seeds"])
    assert not (tmp_path / "seeds").exists()


def command_to_go_on(process: subprocess.Popen, run_id: str, steps: int) -> subprocess.Popen:
    """The same run resumed, up to that step."""
    runs = next(text for text in process.args if str(text).startswith("runs_dir="))  # type: ignore[union-attr]
    return subprocess.Popen(
        [*process.args[:2], runs, f"resume={run_id}", f"trainer.max_steps={steps}"],  # type: ignore[index]
        cwd=Path(__file__).resolve().parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
