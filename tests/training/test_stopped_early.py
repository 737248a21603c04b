"""A run that is stopped before its first step, or while it hangs in one call, leaves what any stopped run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashtrain.training import run as run_module
from flashtrain.training.distributed.processes import Processes
from flashtrain.training.run import run

from .conftest import ROOT, changed, figures, go_on, metrics, summary

# In the order in which a run comes to them: its data and model, its trackers, Lightning's own beginning.
MOMENTS = {
    "the folder": "open_folder",
    "the data": "work_of",
    "the banner": "doubts",
    "the trackers": "build_trackers",
    "the trainer": "make_trainer",
}


def stopping(call: Callable[..., Any], *numbers: int) -> Callable[..., Any]:
    def stopped(*arguments: Any, **more: Any) -> Any:
        result = call(*arguments, **more)
        for number in numbers:
            os.kill(os.getpid(), number)
        return result

    return stopped


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        *((moment, signal.SIGTERM, 143) for moment in MOMENTS),
        ("the data", signal.SIGINT, 130),
        ("the trainer", signal.SIGINT, 130),
        ("the trainer", signal.SIGUSR2, 143),
    ],
)
def test_a_stop_before_the_first_step_leaves_a_summary_and_begins_anew(
    make_config, tmp_path, monkeypatch, moment, number, code
):
    torch.set_num_threads(1)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, MOMENTS[moment], stopping(getattr(run_module, MOMENTS[moment]), number, number))
        assert run(make_config("run_id=early", "trainer.max_steps=6"), []) == code
    assert signal.getsignal(number) == before
    folder = tmp_path / "runs" / "early"
    about = summary(folder)
    assert (about["run_id"], about["status"], about["steps"], about["tokens"]) == ("early", "stopped", 0, 0)
    assert "seq_len" in about and "git_commit" in about
    assert "go on with: python train.py resume=early" in (folder / "train.log").read_text()
    assert go_on(tmp_path, "early") == 0
    assert summary(folder)["status"] == "finished"
    assert run(make_config("run_id=straight", "trainer.max_steps=6"), []) == 0
    assert figures(folder) == figures(tmp_path / "runs" / "straight")


@pytest.mark.parametrize("moment", ["the folder", "the data", "the trackers", "the trainer"])
def test_a_resumed_run_stopped_before_its_next_step_keeps_its_figures(make_config, tmp_path, monkeypatch, moment):
    assert run(make_config("run_id=early", "trainer.max_steps=4"), []) == 0
    folder = tmp_path / "runs" / "early"
    earlier = summary(folder)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, MOMENTS[moment], stopping(getattr(run_module, MOMENTS[moment]), signal.SIGTERM))
        assert go_on(tmp_path, "early") == 143
    about = summary(folder)
    assert about["status"] == "stopped"
    for name in ("steps", "tokens", "train_loss", "val_loss"):
        assert about[name] == earlier[name]
    assert len(metrics(folder)) == 4


def test_data_that_takes_long_to_prepare_is_not_waited_for(make_config, tmp_path, monkeypatch):
    def preparing(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr(run_module, "work_of", preparing)
    begun = time.monotonic()
    assert run(make_config("run_id=early"), []) == 143
    assert time.monotonic() - begun < 10
    assert summary(tmp_path / "runs" / "early")["status"] == "stopped"


def test_a_process_whose_others_heeded_the_signal_sooner_is_stopped_and_not_failed(make_config, tmp_path, monkeypatch):
    class OthersGone(Processes):
        def same(self, value):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(run_module, "join", lambda _: OthersGone())
    assert run(make_config("run_id=early"), []) == 143
    assert summary(tmp_path / "runs" / "early")["status"] == "stopped"


def test_sigterm_as_soon_as_there_is_a_folder_saves_what_a_stopped_run_leaves(overrides, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "train.py", *changed(overrides, "run_id=early")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    folder, end = tmp_path / "runs" / "early", time.monotonic() + 60
    while not (folder / "config.yaml").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert summary(folder)["status"] == "stopped"


IN_ONE_CALL = """
import torch
from flashtrain.training.preemption import Preemption
with Preemption().installed():
    numbers = torch.ones(4096, 4096, dtype=torch.int64)
    print("calling", flush=True)
    numbers @ numbers
print("returned", flush=True)
"""


def test_a_second_ctrl_c_ends_the_process_in_the_middle_of_one_long_call():
    process = subprocess.Popen([sys.executable, "-c", IN_ONE_CALL], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "calling\n"
    for _ in range(2):  # twice at once, as in a job that passes it on, ends nothing
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert (process.returncode, output) == (130, "")
    assert time.monotonic() - begun < 2


def test_the_signals_of_a_fork_are_none_of_its_parents(monkeypatch):
    from flashtrain.training import preemption

    ended: list[int] = []
    monkeypatch.setattr(preemption, "_ONE_SIGNAL", 0.0)
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    stop = preemption.Preemption()
    with stop.installed():
        for _ in range(2):
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
        time.sleep(0.2)
    assert not stop.requested and ended == []
