"""The processes of a run: who this one is, what all of them agree on, and which of them is missing.

What steers the run (counts of targets, signals, whether there is another batch) is agreed on by the hosts through a
gloo group of its own, so that no GPU is waited for. Whoever waits too long there tells who did not come.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from flashtrain.config import Config
from flashtrain.config.started import started_processes
from flashtrain.training.distributed.board import Board, held_by_first
from flashtrain.training.distributed.slurm import of_slurm

# What ends a run, with a checkpoint, and its exit code then. Submitit lets Slurm send SIGUSR2 before a time limit or a
# preemption; SIGTERM may follow.
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR2: 143}

_Value = TypeVar("_Value")
_PATIENCE = 1800.0  # seconds for what may take long: compiling, writing a checkpoint, preparing data
_ROLL_CALL = 3.0  # seconds in which all who still answer do so
_LAST_WORDS = 10.0
# What gloo and NCCL say when another process is gone or does not come.
_SIGNS = ("connection closed", "connection reset", "connection refused", "timed out", "broken pipe", "remote process")


class ProcessLost(RuntimeError):
    """A process of the run died or did not come; the message names it."""


class Processes:
    """This process among those of the run; the methods are called by all of them, in the same order.

    Args:
        rank: number of this process, from 0; process 0 writes what is written once.
        size: how many there are.
        local_rank: its number on this machine.
        context: neighbours, by rank, that share each sequence.
        timeout: seconds that others are waited for; see `trainer.timeout`.
        store: what all of them can reach. None where there is one process alone.

    Attributes:
        patient: others are waited for much longer than `timeout`, since they may be compiling.
        hosts: the group in which the hosts of all processes agree; None where there is one process alone.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        context: int = 1,
        timeout: float = _PATIENCE,
        store: dist.Store | None = None,
    ) -> None:
        self.rank, self.size, self.local_rank, self.context, self.timeout = rank, size, local_rank, context, timeout
        self.patient = False
        self._board = None if store is None else Board(store)
        self.hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE)) if size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what a run leaves behind."""
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """Which share of a step's sequences is this process's, and how many shares there are."""
        return self.rank // self.context, self.size // self.context

    @property
    def part(self) -> int:
        """Which part of each of its sequences is this process's, from 0."""
        return self.rank % self.context

    def total(self, number: float) -> float:
        """The sum of a number over all processes."""
        return self._reduce([number], dist.ReduceOp.SUM, self.patient)[0]

    def most(self, *numbers: float) -> list[float]:
        """The greatest of each number over all processes."""
        return self._reduce(list(numbers), dist.ReduceOp.MAX, self.patient)

    def same(self, value: _Value) -> _Value:
        """The first process's value, behind something that may take it long."""
        if self.size == 1:
            return value
        self.meet()
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.hosts)
        found: _Value = values[0]
        return found

    def meet(self) -> None:
        """Wait until all are here, behind something that may take one of them long."""
        self._reduce([0.0], dist.ReduceOp.MAX, patient=True)

    def take_turns(self, items: Iterable[_Value]) -> Iterator[tuple[_Value, bool]]:
        """Every item once over all shares, in rounds of one a share, and whether it counts here.

        All processes get equally many items, since those that divide a model must run it equally often: in the last
        round whoever has none left repeats one that counts elsewhere.
        """
        share, shares = self.share
        given: list[_Value] = []
        for item in items:
            given.append(item)
            if len(given) == shares:
                yield given[share], True
                given = []
        if given:
            yield given[min(share, len(given) - 1)], share < len(given)

    def tell_who_is_missing(self, what: str) -> str:
        """The ranks that do not answer within seconds, once someone has noticed that something is wrong."""
        assert self._board is not None
        self._board.write(f"flashtrain/here/{self.rank}", "1")
        time.sleep(_ROLL_CALL)
        missing = [r for r in range(self.size) if not self._board.has(f"flashtrain/here/{r}")]
        if self._board.gone and not held_by_first():
            return f"rank {self.rank}: {what}, and the machine where all processes met is gone too"
        if self._board.gone:
            missing = [0]
        if not missing:
            return f"rank {self.rank}: {what}"
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{who} of {self.size} died or hung: {what}"

    def loss_behind(self, error: Exception) -> str | None:
        """Which processes were lost, where that is what `error` comes from; None where it comes from this one."""
        if isinstance(error, ProcessLost):
            return str(error)
        if self.size > 1 and lost_a_process(error):
            return self.tell_who_is_missing(str(error).splitlines()[0])
        return None

    def first_tells(self, message: str) -> bool:
        """Whether the first process ends with the same message, so that this one need not repeat it."""
        if self._board is None:
            return False
        if self.is_first:
            self._board.write("flashtrain/told", message)
            return False
        return self._board.awaited("flashtrain/told", _ROLL_CALL) == message

    def leave(self, together: bool) -> None:
        """The end: of all at the same time, or of those whose run failed.

        Whoever watches the processes ends the others with the first one that fails; so the first process, which may
        fail with all others, gets the time to write down what happened.
        """
        if self._board is None:
            return
        if together:
            self.meet()
            dist.destroy_process_group()
        elif self.is_first:
            self._board.write("flashtrain/written", "1")
            if held_by_first():
                time.sleep(2 * _ROLL_CALL)  # the others cannot ask who is missing once this process is gone
        else:
            self._board.awaited("flashtrain/written", _LAST_WORDS)

    def _reduce(self, numbers: list[float], operation: Any, patient: bool) -> list[float]:
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)
        seconds = _PATIENCE if patient else self.timeout
        began = time.monotonic()
        try:
            work = dist.all_reduce(tensor, operation, group=self.hosts, async_op=True)
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            waited = time.monotonic() - began
            what = f"the others waited {waited:.0f} s (trainer.timeout={self.timeout:g}s)"
            if waited < seconds:
                what = f"the connection to it is gone ({str(error).splitlines()[0]})"
            raise ProcessLost(self.tell_who_is_missing(what)) from error
        return tensor.tolist()


ALONE = Processes()


def join(config: Config) -> Processes:
    """Meet the other processes of the run, if torchrun, srun or `launch` started some.

    Raises:
        ValueError: there are fewer GPUs here than processes.
    """
    if (started_processes(os.environ) or 1) == 1:
        return ALONE
    if "RANK" not in os.environ:
        os.environ.update(of_slurm(os.environ))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = each_has_a_gpu(config, int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=300)))
    # With gloo the hosts themselves wait for gradients; with NCCL they go on to where they meet.
    seconds = _PATIENCE if on_gpu else config.trainer.timeout
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", local_rank) if on_gpu else None,
    )  # fmt: skip
    return Processes(rank, size, local_rank, config.trainer.context, config.trainer.timeout, store)


def each_has_a_gpu(config: Config, here: int) -> bool:
    """Whether the `here` processes of this machine train on GPUs, one each; otherwise they do on the CPU.

    Raises:
        ValueError: there are fewer GPUs than processes.
    """
    if config.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return False
    gpus = torch.cuda.device_count()
    if here > gpus:
        raise ValueError(
            f"trainer.devices={config.trainer.devices}: {here} processes on this machine, which see {gpus} GPUs; start "
            f"{gpus} here (trainer.devices={gpus}, torchrun --nproc-per-node={gpus}), and under srun let each see all "
            "GPUs of its machine (--gpus-per-node, not --gpus-per-task)"
        )
    return True


def record_failure(error: BaseException) -> None:
    """Leave the error where torchrun and `launch` look for what failed first, and name the rank."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def lost_a_process(error: BaseException) -> bool:
    """Whether an error is what one sees of another process' death."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(text in said for text in _SIGNS)
