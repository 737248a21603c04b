"""What srun tells the processes it starts, in the words of torchrun."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 15000, 10000  # below those that Linux gives to outgoing connections


def of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set. MASTER_ADDR and MASTER_PORT stay what the user has set.

    All come from the step, that is, from this srun: SLURM_NODELIST and the others without STEP may be the whole job's,
    of which a step may have some machines only.
    """
    node = int(environment.get("SLURM_NODEID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_node(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
    }


def _first_node(nodes: str) -> str:
    """`gpu07` of `gpu[07-12,20],cpu3`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def _tasks_of_nodes(tasks: str) -> list[int]:
    """Processes of each machine: 2, 2, 1 of `2(x2),1`."""
    counts = []
    for group in tasks.split(","):
        number, _, times = group.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def _port(environment: Mapping[str, str]) -> int:
    """The same for all processes of a step, and another for other steps, which may run at the same time there."""
    step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    return _FIRST_PORT + zlib.crc32(step.encode()) % _PORTS
