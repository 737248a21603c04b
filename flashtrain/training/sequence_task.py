"""Classification of token sequences, or of pairs of them: the Long Range Arena's tasks beside those on images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from flashtrain.attention import Documents, Full, attention
from flashtrain.config import Config, format_size
from flashtrain.config.schema import ClassifierConfig
from flashtrain.data.lra import CLASSES, VOCABULARY, open_task
from flashtrain.data.order import WHOLE, Share
from flashtrain.data.sequences import SequenceBatch, SequenceSteps, held_out_sequences
from flashtrain.models.classifier import Classifier
from flashtrain.models.pair_classifier import PairClassifier
from flashtrain.training.checkpoints import Identity
from flashtrain.training.classification import corpus_fingerprint
from flashtrain.training.stream import step_loader
from flashtrain.training.task import Task
from flashtrain.training.visibility import LayerMasks, visible_pairs


class SequenceTask(Task):
    """An encoder of token sequences and the cross entropy of their labels."""

    FIGURES: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    model: Classifier

    def __init__(self, config: Config, classifier: ClassifierConfig, source: str) -> None:
        attend = functools.partial(attention, backend=config.attention.backend)
        kind = PairClassifier if source == "retrieval" else Classifier
        super().__init__(config, kind(config.model, classifier, attend, VOCABULARY[source], seq_len=config.seq_len))
        self.head_size = 0  # the head sees one vector a sequence
        self.masks = LayerMasks(config, Full(), positional=False)

    def logits(self, batch: SequenceBatch) -> Tensor:
        """Of the labels; padding is seen by itself alone."""
        rows, seq_len = batch.tokens.shape
        documents = None if batch.documents is None else Documents(batch.documents)
        plans = self.masks.lower(rows, seq_len, self.device, documents)
        self.visible_pairs = self.visible_pairs + visible_pairs(plans) * rows
        logits: Tensor = self._forward[0](batch.tokens, plans, batch.lengths)[0]
        return logits.float()

    def loss_sum(self, batch: SequenceBatch) -> Tensor:
        return F.cross_entropy(self.logits(batch), batch.labels, reduction="sum")

    def measure(self, batch: SequenceBatch) -> Tensor:
        """Cross entropy of the labels, and how many are right."""
        logits = self.logits(batch)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        return torch.stack([loss, (logits.argmax(-1) == batch.labels).sum().to(loss.dtype)])


class SequenceWork:
    """What a run on token sequences has of its own: the three parts of the data, and the accuracy on the test part.

    Raises:
        ValueError: data that are missing, or a number of classes that is not theirs.
    """

    def __init__(self, config: Config, share: Share = WHOLE) -> None:
        assert config.classifier is not None and config.sequences is not None
        self.share = share
        self.config, self.classifier, self.sequences = config, config.classifier, config.sequences
        source = self.sequences.source
        if self.classifier.num_classes != CLASSES[source]:
            raise ValueError(
                f"classifier.num_classes={self.classifier.num_classes}: sequences.source={source} has "
                f"{CLASSES[source]} classes; write that"
            )
        self.parts = open_task(self.sequences, config.seq_len)
        self.corpus = {
            "source": source,
            "name": _NAMES[source] + (" (generated)" if self.sequences.path is None else ""),
            "fingerprints": {part: found.fingerprint() for part, found in self.parts.items()},
        }
        self.identity = Identity(
            vocab_size=self.classifier.num_classes,
            tokenizer=f"{source} ids",
            tokenizer_fingerprint="",
            corpus_fingerprint=corpus_fingerprint(self.corpus),
        )
        self.test_figures: dict[str, float] = {}
        self.task: SequenceTask

    def build_task(self) -> SequenceTask:
        self.task = SequenceTask(self.config, self.classifier, self.sequences.source)
        return self.task

    def train_loader(self, first_step: int) -> DataLoader[list[SequenceBatch]]:
        """Yields the micro-batches of step `first_step`, then of the next, without end."""
        config = self.config
        steps = SequenceSteps(
            self.parts["train"],
            config.sequences_per_step,
            config.sequences_per_micro_batch,
            config.seq_len,
            config.seed,
            self.share,
        )
        return step_loader(steps.batches, first_step, self.sequences.num_workers)

    def validate(self, last: bool) -> dict[str, float] | None:
        """On the validation part; the last time on the test part too, whose figures only the summary has."""
        figures = self._judge("val")
        if figures is not None and last:
            tested = self._judge("test")
            if tested is None:
                return None
            self.test_figures = {key.replace("val_", "test_"): value for key, value in tested.items()}
        return figures

    def _judge(self, part: str) -> dict[str, float] | None:
        config = self.config
        batches = held_out_sequences(self.parts[part], config.sequences_per_micro_batch, config.seq_len)
        return self.task.validate(batches)

    def facts(self) -> dict[str, Any]:
        return {"parameters": {"total": self._num_parameters}, "protocol": "fixed set", "corpus": self.corpus}

    def banner(self) -> list[str]:
        config, counts = self.config, {part: found.length for part, found in self.parts.items()}
        return [
            f"model {config.model.name}: {self._num_parameters / 1e6:.1f}M parameters, {format_size(config.seq_len)} "
            "tokens",
            f"data {self.corpus['name']}: {counts['train']:,} to train on, {counts['val']:,} to validate, "
            f"{counts['test']:,} to test",
        ]

    def after_validation(self, step: int, show: Callable[[int, str, str], None]) -> None:
        pass

    def at_end(self, figures: dict[str, float]) -> dict[str, Any]:
        """The figures of the test part, and the standard errors of both accuracies."""
        said: dict[str, Any] = dict(self.test_figures)
        for part, found in (("val", figures), ("test", self.test_figures)):
            accuracy = found.get(f"{part}_accuracy")
            if accuracy is not None:
                said[f"{part}_accuracy_error"] = math.sqrt(accuracy * (1 - accuracy) / self.parts[part].length)
        return said

    @property
    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.task.model.parameters())


_NAMES = {"listops": "ListOps", "text": "IMDb", "retrieval": "AAN", "grey_images": "CIFAR-10, grey"}
