"""Language modelling: next-token prediction on text, with a sample and a yardstick."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow, attention
from flashtrain.config import Config, format_size
from flashtrain.data.batch import IGNORE, Batch
from flashtrain.data.recall import shortest_passkey
from flashtrain.data.recall_batches import RecallBatch
from flashtrain.interchange.loading import check_same_vocabulary
from flashtrain.models.generate import generate
from flashtrain.models.gpt import GPT
from flashtrain.models.loss import cross_entropy_sum
from flashtrain.models.token_losses import token_losses
from flashtrain.training.by_position import LossByPosition
from flashtrain.training.distributed.context import SharedSequences
from flashtrain.training.distributed.processes import ALONE, Processes
from flashtrain.training.recall_hits import RecallHits
from flashtrain.training.seeds import fold_seed
from flashtrain.training.task import Task
from flashtrain.training.text import TextData
from flashtrain.training.visibility import LayerMasks, Plans, visible_pairs

logger = logging.getLogger("flashtrain")


class LanguageTask(Task):
    """A GPT and its loss over the vocabulary."""

    model: GPT

    def __init__(self, config: Config, vocab_size: int, processes: Processes = ALONE) -> None:
        trainer, backend = config.trainer, config.attention.backend
        # Where several processes share each sequence, what this one has of it.
        self.shared = SharedSequences(processes, trainer.context_method, backend) if processes.context > 1 else None
        attend = functools.partial(attention, backend=backend) if self.shared is None else self.shared.attend
        super().__init__(config, GPT(config.model, vocab_size, config.seq_len, attend))
        self.head_size = vocab_size
        self.masks = LayerMasks(config, mask_of(config), positional=True)
        # Collects the losses of a validation by position, where the run wants them.
        self.by_position: LossByPosition | None = None
        # Collects what it finds again of the recall tasks.
        self.recall: RecallHits | None = None

    def to_device(self, batch: Any, into: Any = None) -> Any:
        return super().to_device(batch if self.shared is None else self.shared.own(batch), into)

    def what_differs(self) -> str | None:
        if self.config.data.document_borders:
            return "masks differ from step to step with data.document_borders=true; write false"
        if self.config.schedule.length_steps:
            return f"sequences grow in schedule.length_steps={self.config.schedule.length_steps} steps; write 0"
        return None

    def targets_of(self, batch: Batch) -> Tensor:
        return (batch.targets != IGNORE).sum()

    def loss_sum(self, batch: Batch) -> Tensor:
        hidden = self._hidden(batch)
        total, _ = cross_entropy_sum(
            hidden, self.model.head_weight, batch.targets,
            chunk_tokens=self.config.memory.loss_chunk_tokens, kernel=self.config.memory.loss,
        )  # fmt: skip
        return total

    def measure(self, batch: Batch) -> Tensor:
        if isinstance(batch, RecallBatch):
            assert self.recall is not None, "whoever reads recall tasks collects their hits"
            _, right = self._token_losses(batch)
            self.recall.add(right, batch.targets, batch.tasks)
            return torch.zeros(1, device=self.device)
        if self.by_position is None:
            return self.loss_sum(batch)[None]
        losses, _ = self._token_losses(batch)
        self.by_position.add(losses, batch.targets, batch.positions)
        return losses.double().sum()[None]

    def _token_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        chunk = self.config.memory.loss_chunk_tokens
        return token_losses(self._hidden(batch), self.model.head_weight, batch.targets, chunk_tokens=chunk)

    def _hidden(self, batch: Batch) -> Tensor:
        plans = self.plan(batch)
        self.visible_pairs += visible_pairs(plans) * len(batch.tokens)
        return self._forward[0](batch.tokens, plans, batch.positions)

    def plan(self, batch: Batch) -> Plans:
        """What each token of the batch may attend to, lowered once for all layers or for those of one layout."""
        rows, seq_len = batch.tokens.shape
        documents = None if batch.documents is None else Documents(batch.documents)
        if self.shared is None:
            return self.masks.lower(rows, seq_len, self.device, documents)
        return self.masks.lower(rows, seq_len * self.shared.parts, self.device, documents, self.shared.lower)

    def plan_for(self, queries: int, keys: int) -> Plans:
        """The plan of one sequence's last `queries` tokens, for sampling."""
        if queries == keys:
            return self.masks.lower(1, keys, self.device)
        return self.masks.lower_last(queries, keys, self.device)


class LanguageWork:
    """What a language-model run has of its own: text, model, samples, and the trigram table at its end."""

    def __init__(self, config: Config, processes: Processes = ALONE) -> None:
        self.config, self.processes = config, processes
        self.text = TextData(config, processes.share)
        self.identity = self.text.identity
        self.task: LanguageTask

    def build_task(self) -> LanguageTask:
        if self.config.model.init_from is not None:
            check_same_vocabulary(self.text.tokenizer, Path(self.config.model.init_from))
        ids, rows = self.text.tokenizer.vocab_size, self.config.model.vocab_size
        if rows is not None and rows < ids:
            raise ValueError(
                f"model.vocab_size={rows}: tokenizer {self.text.tokenizer.name!r} has {ids} ids; write {ids} or more, "
                "or take the tokenizer that the model was trained with"
            )
        self.task = LanguageTask(self.config, rows or ids, self.processes)
        return self.task

    def train_loader(self, first_step: int) -> DataLoader[list[Batch]]:
        return self.text.train_loader(first_step)

    def validate(self, last: bool) -> dict[str, float] | None:
        collectors, batches = list[LossByPosition | RecallHits](), [self.text.validation(last)]
        if self.config.trainer.val_by_position:
            self.task.by_position = LossByPosition(self.config.seq_len, self.task.device)
            collectors.append(self.task.by_position)
        if self.config.trainer.val_recall:
            self.task.recall = RecallHits(self.task.device)
            collectors.append(self.task.recall)
            batches.append(self.text.recall())
        figures = self.task.validate(itertools.chain(*batches))
        if figures is not None:
            figures["val_perplexity"] = perplexity(figures["val_loss"])
            for collector in collectors:
                self.task.replicas.total(collector.sums)
                figures |= collector.figures()
        return figures

    def facts(self) -> dict[str, Any]:
        return {
            "parameters": self.task.model.parameter_counts(),
            "tokenizer": self.text.tokenizer.name,
            "corpus": self.text.corpus.description,
        }

    def banner(self) -> list[str]:
        config, counts, corpus = self.config, self.task.model.parameter_counts(), self.text.corpus
        parameters = f"{counts['total'] / 1e6:.1f}M parameters"
        if counts["without_position_table"] != counts["total"]:
            parameters += f" ({counts['without_position_table'] / 1e6:.1f}M without the position table)"
        lines = [
            f"model {config.model.name}: {parameters}, seq_len {config.seq_len} ({format_size(config.seq_len)})",
            f"data {corpus.description['name']}: {corpus.train.num_tokens:,} tokens to train on, "
            f"{corpus.val.num_tokens:,} held out, tokenizer {self.text.tokenizer.name}",
        ]
        needed = shortest_passkey(self.text.tokenizer)
        if config.trainer.val_recall and config.seq_len < needed:
            lines.append(f"val_recall_passkey stays empty: seq_len={config.seq_len}, and a passkey takes {needed}")
        return lines

    def after_validation(self, step: int, show: Callable[[int, str, str], None]) -> None:
        """A sample of the model's text."""
        length = self.config.trainer.sample_tokens
        if length == 0:
            return
        tokenizer = self.text.tokenizer
        generator = torch.Generator().manual_seed(fold_seed(self.config.seed, step))
        with self.task.averaged(), self.task.trainer.precision_plugin.val_step_context():
            ids = generate(
                self.task.model, [tokenizer.eod], length, generator=generator, plan_for=self.task.plan_for,
                block=self.task.masks.block,
            )  # fmt: skip
        show(step, "sample", tokenizer.decode([token for token in ids[1:] if token < tokenizer.vocab_size]))

    def at_end(self, figures: dict[str, float]) -> dict[str, Any]:
        """Say what a table of byte trigrams makes of the same held-out text: the least that a model must beat."""
        if not self.text.has_yardstick or "val_loss" not in figures:
            return {}
        trigrams = self.text.yardstick()
        logger.info(
            "held-out loss %.4f nats a byte; a byte trigram table of the same data has %.4f",
            figures["val_loss"],
            trigrams,
        )
        return {"trigram_val_loss": trigrams}


def mask_of(config: Config) -> Mask:
    """The mask of all layers, without block layouts and the documents of a batch."""
    window = config.attention.window
    return Causal() if window is None else Causal() & SlidingWindow(window - 1, 0)


def perplexity(loss: float) -> float:
    """exp(loss), capped where a float would overflow."""
    return math.exp(min(loss, 700.0))
