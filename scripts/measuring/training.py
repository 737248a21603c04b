"""Training steps of one model, timed: flashtrain's own through its Lightning task and trainer, as train.py runs them,
and other models in a plain loop with the same optimiser, clipping and precision."""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from flashtrain.config import Config, build
from flashtrain.data.batch import Batch
from flashtrain.models.flops import model_flops
from flashtrain.models.recompute import Recompute
from flashtrain.training.distributed.processes import ALONE
from flashtrain.training.hardware import choose_precision, peak_flops
from flashtrain.training.language import LanguageTask, mask_of
from flashtrain.training.memory import forecast_of
from flashtrain.training.meter import Meter
from flashtrain.training.optimizers import build_optimizer
from flashtrain.training.recording import choose_launching
from flashtrain.training.run import make_trainer
from flashtrain.training.seeds import fold_seed
from flashtrain.training.visibility import LayerMasks, visible_pairs
from measuring import ROOT
from measuring.environment import StateReading
from measuring.report import Unavailable
from measuring.timing import Mark, Stopwatch, spread

GPT2_VOCAB = 50257
# nanoGPT pads the vocabulary to this, and is measured as it comes.
NANOGPT_VOCAB = 50304
TINY = ("model.num_layers=2", "model.num_heads=2", "model.hidden_size=32")


class Steps(Protocol):
    """What is told after each optimiser step has been put into the device's queue."""

    def done(self) -> bool:
        """True when enough steps have been made."""
        ...


class TimedSteps:
    """Two steps to warm up, one to see how long a step takes, one to fill the queue, then as many as fit (3 to `most`).

    Nothing waits for the device while steps are timed.
    """

    def __init__(self, device: torch.device, seconds: float, most: int) -> None:
        self.watch, self.seconds, self.most = Stopwatch(device), seconds, most
        self.begun = self._alone = time.perf_counter()
        self.marks: list[Mark] = []
        self.count, self.target, self.first_step_seconds = 0, most, 0.0
        self.state: StateReading | None = None

    def done(self) -> bool:
        self.count += 1
        if self.count <= 2:
            self.watch.wait()
            self._alone = time.perf_counter()
            if self.count == 1:
                self.first_step_seconds = self._alone - self.begun
            elif self.watch.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.watch.device)
        elif self.count == 3:
            self.watch.wait()
            step = time.perf_counter() - self._alone
            self.target = min(self.most, max(3, int(self.seconds / step)))
        else:
            self.marks.append(self.watch.mark())
            if len(self.marks) == 2:
                self.state = StateReading(self.watch.device)
        return len(self.marks) > self.target

    def figures(self, tokens: int, flops: float, peak: float | None) -> dict[str, Any]:
        """tokens and flops are those of a step; peak is the device's in FLOP/s."""
        self.watch.wait()
        steps = [self.watch.ms(a, b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        mean = self.watch.ms(self.marks[0], self.marks[-1]) / len(steps) / 1000
        found = {
            "tokens_per_second": tokens / mean,
            "mfu": None if peak is None else flops / mean / peak,
            "step_ms": spread(steps),
            "seconds_to_first_step": self.first_step_seconds,
            "state": self.state.values() if self.state else {},
        }
        if self.watch.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.watch.device) / 2**30
            found["reserved_gib"] = torch.cuda.max_memory_reserved(self.watch.device) / 2**30
        return found


def make_config(seq_len: int, batch: int, overrides: list[str], dry_run: bool) -> Config:
    """GPT-2 small on `batch` sequences of `seq_len` tokens a step, in one micro-batch, compiled."""
    own = ["model=gpt2", f"seq_len={seq_len}", "logger=csv", "trainer.max_steps=1000000"]
    own += [f"trainer.batch_tokens={seq_len * batch}", f"trainer.micro_batch_tokens={seq_len * batch}"]
    own += ["trainer.compile=false", *TINY] if dry_run else ["trainer.compile=true"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(OmegaConf.to_container(compose("config", [*own, *overrides]), resolve=True))  # type: ignore[arg-type]


def train_ours(
    config: Config,
    device: torch.device,
    steps: Steps,
    vocab: int,
    how: Recompute | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> float:
    """Train until `steps` has enough; the last loss. The task, the trainer and the meter are those of train.py.

    how: what is computed again, with launched steps; None is what the forecast chooses, which refuses a run that it
        does not see fit, and steps as they are launched by default.
    callbacks: called before `steps` is.
    """
    precision = choose_precision(config.trainer, device)
    torch.manual_seed(fold_seed(config.seed))
    task = LanguageTask(config, vocab)
    if how is None:
        task.model.checkpoint_blocks = forecast_of(config, vocab, precision, device).case.how
        choose_launching(task, config, device)
    else:
        task.model.checkpoint_blocks = how
        if config.trainer.compile:
            task.compile_model()
    meter = Meter(config, vocab, precision, device, on_row=lambda row: None)
    trainer = make_trainer(config, device, precision, [meter, *callbacks, Watch(lambda _: steps.done(), meter)], ALONE)
    trainer.fit(task, DataLoader(_Endless(config, vocab), batch_size=None, collate_fn=as_it_is))
    return float(task.loss)


class Watch(pl.Callback):
    """Ends the training when `done` says so of the task, which it is asked after each step."""

    def __init__(self, done: Callable[[LanguageTask], bool], meter: Meter) -> None:
        self.done, self.meter = done, meter

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, LanguageTask)
        self.meter.step_done(trainer.global_step, module)
        trainer.should_stop = self.done(module)


class _Endless(IterableDataset[list[Batch]]):
    def __init__(self, config: Config, vocab: int) -> None:
        self.config, self.vocab = config, vocab

    def __iter__(self) -> Iterator[list[Batch]]:
        return ([batch] for batch in batches(self.config, self.vocab))


def as_it_is(item: Any) -> Any:
    """For a loader whose items are whole steps."""
    return item


def batches(config: Config, vocab: int) -> Iterator[Batch]:
    """Random tokens in host memory, one step after the other, the same ones for every model."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        drawn = torch.randint(vocab, (config.sequences_per_step, config.seq_len + 1), generator=generator)
        tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        yield Batch(tokens, targets, positions=None, documents=None, num_targets=targets.numel())


def train_peer(
    model: nn.Module, loss_of: Callable[..., Tensor], config: Config, device: torch.device, steps: Steps, vocab: int
) -> float:
    """The same steps in a plain loop; `loss_of(tokens, targets)` is the model's mean loss."""
    model.to(device).train()
    optimizer = build_optimizer(model, config.optimizer)
    for batch in batches(config, vocab):
        if device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(batch.tokens, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if steps.done():
            break
    return float(loss.detach())


def train_nanogpt(folder: Path, config: Config, device: torch.device, steps: Steps, vocab: int) -> float:
    """nanoGPT's model from the folder that holds its model.py, compiled as its training script does.

    Raises:
        Unavailable: there is no model.py.
    """
    path = folder / "model.py"
    if not path.is_file():
        raise Unavailable("--peer nanogpt=PATH: the folder holds no model.py")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sizes = config.model
    gpt = module.GPT(
        module.GPTConfig(
            block_size=config.seq_len,
            vocab_size=NANOGPT_VOCAB if vocab == GPT2_VOCAB else vocab,
            n_layer=sizes.num_layers,
            n_head=sizes.num_heads,
            n_embd=sizes.hidden_size,
            dropout=0.0,
            bias=True,
        )
    )
    forward: Any = torch.compile(gpt) if config.trainer.compile else gpt
    return train_peer(gpt, lambda tokens, targets: forward(tokens, targets)[1], config, device, steps, vocab)


def train_huggingface(config: Config, device: torch.device, steps: Steps, vocab: int) -> float:
    """Hugging Face's GPT-2 on PyTorch's SDPA, not compiled, as its trainer runs it by default.

    Raises:
        Unavailable: transformers is not installed.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise Unavailable("transformers is not installed") from None
    sizes = config.model
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab,
            n_positions=config.seq_len,
            n_layer=sizes.num_layers,
            n_head=sizes.num_heads,
            n_embd=sizes.hidden_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=vocab - 1,
            eos_token_id=vocab - 1,
            attn_implementation="sdpa",
        )
    )
    # It shifts the targets by one itself.
    return train_peer(model, lambda t, _: model(input_ids=t, labels=t).loss, config, device, steps, vocab)


def trainer_of(model: str, peers: dict[str, Path | None]) -> Callable[..., float]:
    """The function that trains `model`, by name; arguments config, device, steps, vocab.

    Raises:
        Unavailable: a name that is neither ours nor a peer's.
    """
    if model == "ours":
        return train_ours
    if model == "huggingface":
        return train_huggingface
    folder = peers.get(model)
    if model == "nanogpt" and folder is not None:
        return functools.partial(train_nanogpt, folder)
    raise Unavailable(f"no model {model!r}: there are ours, --peer nanogpt=PATH and --peer huggingface")


def step_flops(config: Config, vocab: int) -> float:
    """Model FLOPs of an optimiser step with the masks of the layers, by `flashtrain.models.flops`."""
    masks = LayerMasks(config, mask_of(config), positional=True)
    pairs = float(visible_pairs(masks.lower(1, config.seq_len, torch.device("cpu"))))
    return config.sequences_per_step * model_flops(config.model, vocab, config.seq_len, pairs).training


def peak(config: Config, device: torch.device) -> float | None:
    return peak_flops(device, choose_precision(config.trainer, device), config.trainer.peak_tflops)
