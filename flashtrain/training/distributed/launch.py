"""Starting a run's processes on this machine: `python train.py trainer.devices=8` without torchrun.

Each is a fresh process of the same command line, so that nothing carries over between the jobs of a sweep. PyTorch's
elastic package starts and watches them; this process holds the store in which they find each other, passes signals
on, and says which of them failed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import cast

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flashtrain.config import Config
from flashtrain.config.started import name_parent
from flashtrain.training.distributed.processes import EXIT_CODES, each_has_a_gpu
from flashtrain.training.progress import complain
from flashtrain.training.run_folder import RUN_ID_VARIABLE, new_run_id

_GRACE = 10.0  # seconds in which the others end when one has failed; what hangs does not, and is killed


def launch(config: Config, command: list[str]) -> int:
    """Run `command` in `trainer.devices` processes until all have ended.

    Returns:
        Their exit code: 0, 143 after SIGTERM, 130 after Ctrl-C, 1 where one of them failed, which then is named.
    """
    size = config.trainer.devices
    try:
        each_has_a_gpu(config, size)
    except ValueError as error:
        complain(str(error))
        return 1
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_id = config.resume or config.run_id or os.environ.get(RUN_ID_VARIABLE) or new_run_id(config)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // size)),
        RUN_ID_VARIABLE: run_id,
        **name_parent(),
    }
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # told below, in one line
    processes = start_processes(
        "flashtrain",
        command[0],
        {rank: tuple(command[1:]) for rank in range(size)},
        {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)},
        DefaultLogsSpecs(),
    )
    _pass_signals_on(processes)
    ended, hung = threading.Event(), set[int]()
    watched = cast(SubprocessContext, processes)
    threading.Thread(target=_kill_what_hangs, args=(watched, ended, hung), daemon=True).start()
    result = processes.wait(0)
    while result is None:
        time.sleep(0.1)
        result = processes.wait(0)
    ended.set()
    if not result.failures:
        return 0
    failures = list(result.failures.values())
    first = _first([failure for failure in failures if failure.pid not in hung] or failures)
    code = {-number: code for number, code in EXIT_CODES.items()}.get(first.exitcode, first.exitcode)
    if code in EXIT_CODES.values():
        return code
    line = f"rank {first.local_rank} of {size} (process {first.pid}) ended the run: {_why(first)}"
    complain(line)
    log = Path(config.runs_dir) / run_id / "train.log"
    if log.exists():
        with log.open("a") as file:
            file.write(line + "\n")
    return 1


def _pass_signals_on(processes: PContext) -> None:
    """Let the processes end the run in their own way. They are no longer in the terminal's group: Ctrl-C comes here."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for pid in processes.pids().values():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    for number in EXIT_CODES:
        signal.signal(number, pass_on)


def _kill_what_hangs(processes: SubprocessContext, ended: threading.Event, hung: set[int]) -> None:
    """End what is still there some time after one has failed, and note it in `hung`: it is not what ended the run.
    PyTorch kills too, but half a minute after the failure."""
    handlers = processes.subprocess_handlers.values()
    while not any(handler.proc.returncode not in (None, 0, *EXIT_CODES.values()) for handler in handlers):
        if ended.wait(0.2):
            return
    if ended.wait(_GRACE):
        return
    for handler in handlers:
        if handler.proc.returncode is None:
            hung.add(handler.proc.pid)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                handler.close(signal.SIGKILL)  # with all that it has started


def _first(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """What ended the run: a process that was killed, or said what went wrong; the others only missed it."""

    def order(failure: ProcessFailure) -> tuple[bool, bool, int]:
        killed = failure.exitcode < 0 and -failure.exitcode not in EXIT_CODES
        told = bool(failure.error_file_data.get("message"))
        return not killed, not told, failure.timestamp

    return min(failures, key=order)


def _why(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"killed by {failure.signal_name()}"
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return str(message["message"]).splitlines()[0]  # the process has told all of it
    return f"exit code {failure.exitcode}"
