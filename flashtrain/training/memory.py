"""The memory of a run: what it computes again, its forecast, and what is said when it runs out all the same."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import replace

import torch

from flashtrain.attention import Full, choose_backend
from flashtrain.config import Config
from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.loss import why_not_liger
from flashtrain.models.recompute import Recompute
from flashtrain.training.classification import check_stages
from flashtrain.training.curriculum import Progress, coming
from flashtrain.training.distributed.processes import Processes
from flashtrain.training.forecast import GPUS, SAFE, Case, Forecast, Gpu, choose, describe, gpu_called
from flashtrain.training.forecast.case import backend_on, count_parameters
from flashtrain.training.forecast.report import stage_lines
from flashtrain.training.hardware import choose_device, choose_precision, device_memory_bytes
from flashtrain.training.language import mask_of
from flashtrain.training.progress import complain
from flashtrain.training.recording import COMPILE_FROM
from flashtrain.training.visibility import LayerMasks, visible_pairs

# Share of a machine's memory that is planned with on the CPU: it has other things to hold as well.
_CPU_SHARE = 0.4


def forecast(
    config: Config, vocab_size: int, precision: str, device: torch.device, pairs: float,
    processes: Processes | None = None,
) -> Forecast:  # fmt: skip
    """What a run costs on `device`, with the memory settings that it leaves open chosen.

    Args:
        config: the run's, or its stage's.
        vocab_size: rows of the head.
        precision: Lightning's name of the number format.
        device: where the model will be.
        pairs: visible query-key pairs a sequence and head, the mean over layers.
        processes: of the run, which all call this: they compute again the same, by the one that has the least memory.
            Where they did not, some would wait for what others never send.

    Raises:
        ValueError: the run does not fit the GPU, with the forecast and the ways out; or its loss cannot run there.
    """
    if config.memory.loss == "liger" and config.task == "language" and (reason := why_not_liger(device)):
        raise ValueError(f"memory.loss=liger: {reason}; write memory.loss=chunked or auto")
    memory = float(device_memory_bytes(device))
    # Of the machine, which the processes on it share.
    host = float(device_memory_bytes(torch.device("cpu"))) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = gpu_called(torch.cuda.get_device_name(device), memory) if device.type == "cuda" else None
    if processes is not None:
        memory, host = (-number for number in processes.most(-memory, -host))
    head = torch.empty(
        1, 1, 1, Dimensions.of(config.model).head_dim, device=device,
        dtype=torch.float32 if precision == "32-true" else torch.bfloat16,
    )  # fmt: skip
    backend = choose_backend(config.attention.backend, head)
    case = _case(config, vocab_size, precision, device.type == "cuda", backend, pairs, gpu)
    planned = (SAFE if device.type == "cuda" else _CPU_SHARE) * memory
    how = choose(case, planned, host)
    found = Forecast.of(replace(case, how=how if processes is None else processes.same(how)), memory, host)
    if device.type == "cuda":
        refuse_what_does_not_fit(found)
    return found


def refuse_what_does_not_fit(found: Forecast) -> None:
    """Stop a run before it trains.

    Raises:
        ValueError: it does not fit; the message is the forecast with the cheapest ways out.
    """
    if not found.fits:
        raise ValueError("\n".join(["this run does not fit:", *found.lines()]))


def refuse_later_stages(
    config: Config, progress: Progress, vocab_size: int, precision: str, device: torch.device
) -> None:
    """Stop a run before it trains where a stage after the present one does not fit; `config` is the run's.

    Raises:
        ValueError: as `forecast` does, naming the stage.
    """
    for number, stage in enumerate(coming(config, progress)[1:], progress.stage + 2):
        try:
            forecast_of(stage, vocab_size, precision, device)
        except ValueError as error:
            raise ValueError(f"stage {number} of the curriculum: {error}") from None


def plan(config: Config) -> Forecast:
    """The forecast for `plan.gpu`, or for this machine, or for an H200 where it has no GPU; nothing is started.

    Args:
        config: the run's, or its stage's.

    Raises:
        ValueError: a tokenizer that cannot be loaded, a layout that cannot be made, or kernels that the GPU has not.
    """
    if config.task == "language":
        vocab_size = config.model.vocab_size or load_tokenizer(config.tokenizer).vocab_size
    else:
        assert config.classifier is not None
        vocab_size = config.classifier.num_classes
    gpu = GPUS[config.plan.gpu] if config.plan.gpu is not None else _this_gpu() or GPUS["h200"]
    on_gpu = torch.device("cuda")
    precision = choose_precision(config.trainer, on_gpu)
    backend = backend_on(gpu, config, precision)
    case = _case(config, vocab_size, precision, True, backend, _pairs(config), gpu)
    return Forecast.of(replace(case, how=choose(case, SAFE * gpu.memory_bytes, float("inf"))), gpu.memory_bytes)


def show_plan(config: Config) -> int:
    """Print the forecast; nothing is trained. 0 if the run fits, else 1.

    Of several stages it is that of the first one that does not fit, or of the last, and a line for each.
    """
    try:
        if config.images is not None:
            check_stages(config, config)
        stages = [plan(stage) for stage in coming(config, Progress())]
    except (ValueError, OSError) as error:
        complain(str(error))
        return 1
    shown = next((found for found in stages if not found.fits), stages[-1])
    print("\n".join([*shown.lines(), *(stage_lines(stages) if len(stages) > 1 else ())]))
    return 0 if shown.fits else 1


def forecast_of(config: Config, vocab_size: int, precision: str, device: torch.device) -> Forecast:
    """The same without a task at hand: its masks are made here."""
    return forecast(config, vocab_size, precision, device, _pairs(config))


# What libraries say that do not raise PyTorch's error: pinned host memory and Triton (CUDA's), cuBLAS, the CPU.
_OUT = re.compile(r"[Tt]ried to allocate|out of memory|ALLOC_FAILED|can't allocate memory")


def ran_out(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and _OUT.search(str(error)) is not None)


def out_of_memory(error: BaseException, found: Forecast | None, at: str, resume: str | None) -> list[str]:
    """What to say when memory runs out in mid-run: what was asked for, by what, and the way out.

    Args:
        error: PyTorch's, or what else `ran_out` knows.
        found: the forecast that the run started with.
        at: where the run was.
        resume: the run's id, where it has a checkpoint to go on from.
    """
    said = str(error).splitlines() or [type(error).__name__]
    asked = next((line for line in said if _OUT.search(line)), said[0])
    lines = [f"out of memory {at}: {asked.strip()}", f"asked for by {_who(error)}"]
    if found is not None:
        lines.extend(found.short())
        tight = replace(found, device_bytes=min(found.device_bytes, found.memory.peak * 0.95))
        lines.extend(tight.advice(resuming=resume is not None))
    changed = " and one of these changes" if lines[-1].startswith("    ") else ""
    how = "there is no checkpoint yet: start again" if resume is None else "the last checkpoint is whole: go on"
    return [*lines, f"{how} with {f'resume={resume}' if resume else 'the same command'}{changed}"]


def memory_line(how: Recompute, config: Config) -> str:
    """What the run's banner says of its memory."""
    kept = {
        "none": "all activations kept",
        "selective": "each block computed again in the backward pass, attention excepted",
        "full": "each block computed again in the backward pass",
    }[how.blocks]
    offload = ", its input in host memory meanwhile" if how.offload else ""
    pieces = f", MLPs in pieces of {how.mlp_chunk_tokens:,} tokens" if how.mlp_chunk_tokens else ""
    logits = f"logits of {config.memory.loss_chunk_tokens:,} tokens at once"
    return f"memory: {kept}{offload}{pieces}, {logits} ({describe(how)})"


def _case(
    config: Config, vocab_size: int, precision: str, on_gpu: bool, backend: str, pairs: float, gpu: Gpu | None
) -> Case:
    wanted = config.trainer.compile
    case = Case(config, vocab_size, precision, wanted is True, backend, pairs, Recompute(), gpu, fused_norm=on_gpu)
    if wanted == "auto":
        large = sum(count_parameters(case).values()) >= COMPILE_FROM
        case = replace(case, compiled=on_gpu and (large or _records_images(config)))
    return case


def _records_images(config: Config) -> bool:
    """Whether a step of a small model on images will be one compiled CUDA graph: `recording.choose_launching` decides,
    when the model is there."""
    on_images = config.task == "classification" and config.sequences is None
    one_piece = config.sequences_per_micro_batch == config.sequences_per_step and config.trainer.devices == 1
    kept = config.memory.checkpointing in ("auto", "none")
    return on_images and one_piece and kept and config.trainer.cuda_graph is not False


def _pairs(config: Config) -> float:
    """Visible pairs of the run's masks, without the borders of documents."""
    language = config.task == "language"
    masks = LayerMasks(config, mask_of(config) if language else Full(), positional=language)
    return float(visible_pairs(masks.lower(1, config.seq_len, torch.device("cpu"))))


def _this_gpu() -> Gpu | None:
    device = choose_device("auto")
    if device.type != "cuda":
        return None
    return gpu_called(torch.cuda.get_device_name(device), float(device_memory_bytes(device)))


def _who(error: BaseException) -> str:
    """The innermost line of flashtrain that the error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/flashtrain/" in frame.filename]
    if not frames:
        return "PyTorch, outside flashtrain's own code"
    frame = frames[-1]
    return f"{frame.name} (flashtrain/{frame.filename.split('/flashtrain/')[-1]}, line {frame.lineno}): {frame.line}"
