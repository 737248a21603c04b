"""Who has started this process: torchrun or srun, together with others, or another process of flashtrain."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from flashtrain.config.build import ConfigError

_PARENT_VARIABLE = "FLASHTRAIN_STARTED_BY"


def started_processes(environment: Mapping[str, str]) -> int | None:
    """How many processes torchrun or srun started together with this one; None if neither did."""
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return int(environment["WORLD_SIZE"])
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        number = int(environment["SLURM_STEP_NUM_TASKS"])
        return number if number > 1 else None
    return None


def started_again(environment: Mapping[str, str]) -> bool:
    """Whether Slurm has put this job back into its queue, and started it once more."""
    return int(environment.get("SLURM_RESTART_COUNT", "0")) > 0


def is_first_started(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of those, or alone."""
    if started_processes(environment) is None:
        return True
    return int(environment["RANK"] if "RANK" in environment else environment["SLURM_PROCID"]) == 0


def check_started(started: int | None, arguments: Sequence[str]) -> None:
    """Hold a command line against the number of processes that were started.

    Raises:
        ConfigError: it wants another number of devices, or a sweep, whose jobs start their own processes.
    """
    if started is None:
        return
    problems = []
    if started > 1 and {"-m", "--multirun"} & set(arguments):
        problems.append("-m: each job of a sweep starts its own processes; leave torchrun or srun out")
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "trainer.devices" and value != str(started):
            problems.append(
                f"{argument}: torchrun or srun has started {started} processes; write the same, or leave it out"
            )
    if problems:
        raise ConfigError(problems)


def name_parent() -> dict[str, str]:
    """For the environment of a process that shall end with this one."""
    return {_PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Send this process SIGTERM once the one that named itself its parent is gone, even if that was killed."""
    parent = os.environ.pop(_PARENT_VARIABLE, None)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def end_at_once(code: int) -> NoReturn:
    """End this process, one of several, without taking Python apart: what it had to write is written.

    Groups of processes outlive their run, since plans and models name them, and with them their threads: one that still
    lets go of a tensor while Python ends aborts it, and the code with it. After a failure not even what runs at exit
    may run, since PyTorch would wait there for processes that may be gone, half an hour where one hangs.
    """
    if code != 1:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
