"""Processes that train together on this machine, started for one row of a benchmark and ended whatever they do.

They find each other as those of `python train.py trainer.devices=8` do: each is a fresh process of the same command,
and the benchmark's own process holds the store. Several groups may run at a time, each on GPUs of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from measuring import ROOT

NOT_RUN = "not run"  # how the failure of a row begins that was not tried
FEWEST_SECONDS = 1.0  # with fewer left no job begins
_GRACE = 6.0  # seconds for the others to end once one process has failed
_TOLD = "RESULT "  # what `measuring.process.tell_row` writes before a row


def wait_for_go() -> None:
    """In a process that was started ahead: wait until it may begin, and from then on end with whoever started it."""
    if os.read(0, 1) != b"g":
        os._exit(1)

    def watch() -> None:
        os.read(0, 1)  # nothing comes any more: this returns when the other end is closed
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Job:
    """A row to be measured.

    Attributes:
        command: of each of its processes.
        size: how many processes there are, of a GPU each.
        tells: the processes call `wait_for_go` once everything is imported, so that they may be started ahead, and tell
            a row. Others are programs that leave files.
    """

    command: Sequence[str]
    size: int
    tells: bool = True


class Group:
    """The processes of a job; `end` must be called, whatever becomes of them.

    Args:
        threads: of PyTorch in each process.
    """

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self._threads = job, threads
        self._folder = tempfile.TemporaryDirectory()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: list[tuple[int, int]] = []  # rank and exit code, in the order in which they ended
        self._failed_at: float | None = None
        self._begun = self._limit = 0.0
        self.gpus: Sequence[int] | None = None

    @property
    def prepared(self) -> bool:
        return bool(self._processes)

    def prepare(self, gpus: Sequence[int] | None) -> None:
        """Start the processes, which see those of the GPUs visible here; all where that is None."""
        self.gpus = gpus
        for rank in range(self.job.size):
            with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as err:
                process = subprocess.Popen(
                    self.job.command, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=ROOT,
                    env=self._environment(rank), start_new_session=True, bufsize=0,
                )  # fmt: skip
            self._processes.append(process)

    def begin(self, limit: float) -> None:
        """Let them go on, for so many seconds at most."""
        self._begun, self._limit = time.monotonic(), limit
        for process in self._processes if self.job.tells else ():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which `result` tells
                process.stdin.write(b"g")

    def result(self) -> dict[str, Any] | None:
        """None while they run; then the first one's row or {"failed": why there is none}, with `seconds` taken."""
        known = {rank for rank, _ in self._ended}
        for rank, process in enumerate(self._processes):
            if rank not in known and process.poll() is not None:
                self._ended.append((rank, process.returncode))
        now = time.monotonic()
        if self._failed_at is None and any(code for _, code in self._ended):
            self._failed_at = now
        over = len(self._ended) == self.job.size
        if not over and now - self._begun > self._limit:
            late = sorted({*range(self.job.size)} - {rank for rank, _ in self._ended})
            which = "" if len(late) == self.job.size else f" (rank {', '.join(map(str, late))} of {self.job.size})"
            found: dict[str, Any] = {"failed": f"took longer than {self._limit:.0f} s{which}"}
        elif over or (self._failed_at is not None and now - self._failed_at > _GRACE):
            found = self._row()
        else:
            return None
        return {**found, "seconds": now - self._begun}

    def end(self) -> None:
        """Kill what is left, with the processes that they started, such as readers of data."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._folder.cleanup()

    def _row(self) -> dict[str, Any]:
        failed = [(rank, code) for rank, code in self._ended if code]
        if not failed:
            return self._told(0) or ({"failed": "ended without a result"} if self.job.tells else {})
        # Whoever was killed or said why comes before those that only missed another one.
        rank, code = min(failed, key=lambda each: (each[1] > 0, self._told(each[0]) is None))
        told = (self._told(rank) or {}).get("failed")
        lines = self._file(rank, "err").read_text(errors="replace").strip().splitlines()
        why = told or f"ended with {code}: {(lines or ['no message'])[-1].strip()[:300]}"
        return {"failed": why if self.job.size == 1 else f"rank {rank} of {self.job.size}: {why}"}

    def _told(self, rank: int) -> dict[str, Any] | None:
        for line in self._file(rank, "out").read_text(errors="replace").splitlines():
            if line.startswith(_TOLD):
                found: dict[str, Any] = json.loads(line.removeprefix(_TOLD))
                return found
        return None

    def _file(self, rank: int, name: str) -> Path:
        return Path(self._folder.name) / f"{name}-{rank}"

    def _environment(self, rank: int) -> dict[str, str]:
        found = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        if self.gpus is not None:
            visible = [name for name in found.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(
                visible[gpu] if gpu < len(visible) else str(gpu) for gpu in self.gpus
            )
        if self.job.size == 1:
            return found
        size = str(self.job.size)
        return found | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


def run_all(
    jobs: Sequence[Job],
    gpus: int,
    side_by_side: bool,
    limit: Callable[[], float],
    done: Callable[[int, dict[str, Any]], None],
) -> None:
    """Run jobs in their order and hand each one's number and row to `done`.

    Args:
        gpus: of this machine; on a CPU as many processes as run at a time.
        side_by_side: jobs of one GPU run at the same time, each on its own. Otherwise one job runs at a time. The next
            one's processes import what they need meanwhile.
        limit: seconds that a job may take if it begins now; it is left out where they are fewer than FEWEST_SECONDS.
    """
    coming, running, free = list(enumerate(jobs)), dict[int, Group](), set(range(gpus))
    threads = max(1, (os.cpu_count() or 1) // max(1, gpus))
    ahead: Group | None = None
    try:
        while coming or running:
            if coming and ahead is None:
                ahead = Group(coming[0][1], threads)
                if ahead.job.tells and not (side_by_side and ahead.job.size == 1):
                    ahead.prepare(None)
            if ahead is not None and _has_room(ahead.job, free, running, side_by_side):
                number, seconds = coming.pop(0)[0], limit()
                if seconds < FEWEST_SECONDS:
                    ahead.end()
                    done(number, {"failed": f"{NOT_RUN}: out of time"})
                else:
                    if not ahead.prepared:
                        ahead.prepare([min(free)] if side_by_side and ahead.job.size == 1 else None)
                    free -= set(ahead.gpus or ())
                    running[number] = ahead
                    ahead.begin(seconds)
                ahead = None
                continue
            for number, group in list(running.items()):
                if (row := group.result()) is not None:
                    group.end()
                    del running[number]
                    free |= set(group.gpus or ())
                    done(number, row)
            time.sleep(0.05)
    finally:
        for group in [*running.values(), *([] if ahead is None else [ahead])]:
            group.end()


def _has_room(job: Job, free: set[int], running: dict[int, Group], side_by_side: bool) -> bool:
    if not running:
        return True
    return side_by_side and bool(free) and job.size == 1 and all(group.job.size == 1 for group in running.values())
