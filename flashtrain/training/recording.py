"""A step recorded as one CUDA graph.

A small model leaves the GPU waiting: launching the thousand kernels of a step takes the host longer than the GPU takes
to run them. A recording launches them all at once, with the same arguments and the same memory. So whatever differs
from step to step must lie on the device: the batch, the number of its targets, the learning rates, the share of the
running mean, and PyTorch's random numbers, whose seed a graph reads when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from flashtrain.models.recompute import Recompute

if TYPE_CHECKING:
    from flashtrain.config import Config
    from flashtrain.training.task import Task

# Parameters from which kernels run for longer than it takes to launch them: trainer.compile=auto compiles from there
# on, and trainer.cuda_graph=auto records below.
COMPILE_FROM = 10_000_000

# Kernels are compiled, plans are made and the optimiser's state is laid out in the first steps.
_WARM_UP_STEPS = 3


class Recorder(Protocol):
    """Records what a call does on the device."""

    def warm_up(self, call: Callable[[], None]) -> None:
        """Make the call, under the conditions of a recording."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Something that does on the device what the call would do; the call itself may do nothing there."""


class RecordedStep:
    """Works on micro-batches of one shape: the first times as they come, then by a recording.

    The first steps are steps as any others, so that nothing has to be undone before the recording.

    Args:
        work: a step's work on the device, for a micro-batch that lies there.
        bring: brings a micro-batch to the device, into the memory of another one if that is given.
    """

    def __init__(self, work: Callable[[Any], None], bring: Callable[..., Any], recorder: Recorder) -> None:
        self.work, self.bring, self.recorder = work, bring, recorder
        self._steps = 0
        self._batch: Any = None  # whose memory the recording reads
        self._repeat: Callable[[], None] | None = None

    def __call__(self, batch: Any) -> None:
        if self._repeat is not None:
            self.bring(batch, self._batch)
            self._repeat()
            return
        if self._steps < _WARM_UP_STEPS:
            self._steps += 1
            self.recorder.warm_up(lambda: self.work(self.bring(batch)))
            return
        self._batch = self.bring(batch)
        self._repeat = self.recorder.record(lambda: self.work(self._batch))
        self._repeat()


class GraphRecorder:
    """Records as a CUDA graph, on a stream of its own, where the warm-up runs too."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def warm_up(self, call: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with _autocast_without_cache(), torch.cuda.stream(self._stream):
            call()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """The launch of a graph of the call.

        Raises:
            ValueError: the call does what no graph can hold, such as waiting for the device.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with _autocast_without_cache(), torch.cuda.graph(graph, stream=self._stream):
                call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"trainer.cuda_graph: this step cannot be recorded ({str(error).splitlines()[0]}); write "
                "trainer.cuda_graph=false"
            ) from error
        replay: Callable[[], None] = graph.replay
        return replay


def _autocast_without_cache() -> torch.autocast:
    """The present autocast, but for its cache of cast weights, which would keep those of the first step."""
    return torch.autocast(
        "cuda",
        dtype=torch.get_autocast_dtype("cuda"),
        enabled=torch.is_autocast_enabled("cuda"),
        cache_enabled=False,
    )


def why_not_recorded(task: Task, config: Config, device: torch.device) -> str | None:
    """Why a step of `task` cannot be recorded, with the way out, or None if it can."""
    if device.type != "cuda":
        return f"a CUDA graph needs a GPU and the run is on {device.type}; train there"
    if config.trainer.devices > 1:
        return "several devices share a step; write trainer.devices=1"
    if (differs := task.what_differs()) is not None:
        return differs
    if config.sequences_per_micro_batch < config.sequences_per_step:
        return (
            f"a step has {config.sequences_per_step // config.sequences_per_micro_batch} micro-batches and the dropout "
            f"of each a seed; write trainer.micro_batch_tokens={config.trainer.batch_tokens} if the memory allows it"
        )
    if Recompute.of(task.model.checkpoint_blocks) != Recompute():
        return "activations are computed again, with a random state that no graph can set; write memory=none"
    return None


def choose_launching(task: Task, config: Config, device: torch.device) -> str:
    """Record the steps of `task` and compile its model as configured; what was chosen, for the log.

    `trainer.cuda_graph=auto` does so for small models: GPT-2 small was no faster for it, and a graph holds memory that
    validation could use. `trainer.compile=auto` does so where it pays within a run of minutes: for large models, and
    for recorded steps on images, which take as long as their kernels do; others may take as long as it takes to launch
    them.

    Raises:
        ValueError: trainer.cuda_graph=true where that cannot be.
    """
    wanted, reason = config.trainer.cuda_graph, why_not_recorded(task, config, device)
    if wanted is True and reason is not None:
        raise ValueError(f"trainer.cuda_graph=true: {reason}, or write trainer.cuda_graph=auto")
    large = sum(p.numel() for p in task.model.parameters()) >= COMPILE_FROM
    recorded = reason is None and (wanted is True or (wanted == "auto" and not large))
    if recorded:
        task.record_steps(GraphRecorder())
    compiled = config.trainer.compile
    if compiled == "auto":
        compiled = device.type == "cuda" and (large or (recorded and task.COMPILED_IF_RECORDED))
    if compiled:
        task.compile_model()
    said = "compiled" if compiled else "not compiled"
    if recorded:
        return f"{said}, a step is one CUDA graph"
    slower = wanted == "auto" and device.type == "cuda" and task.COMPILED_IF_RECORDED
    return f"{said}, no CUDA graph: {reason}" if slower and reason else said
