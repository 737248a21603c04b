"""The text of a run: tokenizer, prepared corpus, and the batches of each step."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch.utils.data import DataLoader

from flashtrain.config import Config
from flashtrain.data.batch import Batch
from flashtrain.data.ngram import byte_trigram_loss
from flashtrain.data.order import WHOLE, Share
from flashtrain.data.packing import pack
from flashtrain.data.prepare import prepare
from flashtrain.data.recall_batches import RecallBatch, recall_batches
from flashtrain.data.short_first import ShortFirst
from flashtrain.data.stream import StepBatches, validation_batches
from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.data.with_recall import WithRecall
from flashtrain.training.checkpoints import Identity
from flashtrain.training.stream import step_loader

logger = logging.getLogger(__name__)


class TextData:
    """What a run reads, from its configuration; `share`: of the sequences of each step."""

    def __init__(self, config: Config, share: Share = WHOLE) -> None:
        self.config, self.share = config, share
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.corpus = prepare(config.data, self.tokenizer)
        self.train = pack(self.corpus.train, config.seq_len, config.data.packing, config.data.document_borders)
        # A held-out part shorter than one sequence is still read, as one shorter sequence.
        held_out, trained = self.corpus.val.num_tokens, self.corpus.train.num_tokens
        if held_out < 2:
            raise ValueError(
                f"data.val_fraction={config.data.val_fraction}: {held_out} of {trained + held_out} tokens held out, "
                "and validation needs at least 2; write a larger fraction"
            )
        self.val_seq_len = min(config.seq_len, held_out - 1)
        self.val = pack(self.corpus.val, self.val_seq_len, config.data.packing, config.data.document_borders)

    @property
    def identity(self) -> Identity:
        return Identity(
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=self.tokenizer.name,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            corpus_fingerprint=self.corpus.train.fingerprint,
        )

    def train_loader(self, first_step: int) -> DataLoader[list[Batch]]:
        """Yields the micro-batches of step `first_step`, then of the next, without end."""
        steps = StepBatches(
            self.train,
            self.config.sequences_per_step,
            self.config.sequences_per_micro_batch,
            seed=self.config.seed,
            rank=self.share[0],
            world_size=self.share[1],
        )
        schedule = self.config.schedule
        grown = ShortFirst(steps, self.config.seq_len, schedule.first_length, schedule.length_steps)
        batches, share = grown.batches, self.config.data.recall_share
        if share:
            batches = WithRecall(batches, self.tokenizer, share, self.config.seed, self.share[0]).batches
        return step_loader(batches, first_step, self.config.data.num_workers)

    def validation(self, last: bool) -> Iterator[Batch]:
        """The held-out batches, always the same ones.

        The last validation of a byte model reads all held-out text, as the trigram table beside it does.
        """
        limit = None if last and self.has_yardstick else max(1, self.config.trainer.val_tokens // self.val_seq_len)
        return validation_batches(self.val, self.config.sequences_per_micro_batch, limit=limit)

    def recall(self) -> Iterator[RecallBatch]:
        """Recall tasks as long as the training sequences, always the same ones."""
        config = self.config
        return recall_batches(
            self.tokenizer, config.seq_len, config.sequences_per_micro_batch, config.data.document_borders
        )

    @property
    def has_yardstick(self) -> bool:
        """Whether a table of byte trigrams of the same data can be had to compare with."""
        return self.tokenizer.name == "bytes"

    def yardstick(self) -> float:
        """Held-out loss of the byte trigram table, in nats a token."""
        return byte_trigram_loss(self.corpus.train, self.corpus.val)
