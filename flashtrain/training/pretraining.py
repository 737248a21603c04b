"""Pretraining on images without their labels: hidden pixels are predicted, and only they have a loss."""

from __future__ import annotations

import functools
from typing import ClassVar

from torch import Tensor

from flashtrain.attention import attention
from flashtrain.config import Config
from flashtrain.config.schema import ClassifierConfig, PretrainConfig
from flashtrain.data.hiding import Hiding
from flashtrain.data.images import ImageBatch
from flashtrain.models.loss import cross_entropy_sum
from flashtrain.models.masked_pixels import MaskedPixels
from flashtrain.training.image_task import ImageTask


class PretrainingTask(ImageTask):
    """The loss of an image is the mean over its hidden pixels: the cross entropy of their grey levels, or |difference|.

    Cross entropy is in nats, over `levels` bins of equal width; the difference is of grey levels between 0 and 1.
    """

    FIGURES: ClassVar[tuple[str, ...]] = ("loss",)
    model: MaskedPixels

    def __init__(self, config: Config, classifier: ClassifierConfig, pretrain: PretrainConfig) -> None:
        attend = functools.partial(attention, backend=config.attention.backend)
        super().__init__(config, MaskedPixels(config.model, classifier, pretrain, attend, seq_len=config.seq_len))
        self.pretrain = pretrain
        # Only hidden pixels meet the head.
        self.head_size = round(self.model.pixel_head.out_features * pretrain.share)

    def loss_sum(self, batch: ImageBatch) -> Tensor:
        assert batch.hidden is not None
        hidden = self.run_model(batch.images, batch.hidden)
        levels = batch.images.flatten(1).gather(1, batch.hidden)
        if self.pretrain.loss == "cross_entropy":
            bins = levels.long() * self.pretrain.levels // 256
            total, _ = cross_entropy_sum(
                hidden, self.model.pixel_head.weight, bins, chunk_tokens=self.config.memory.loss_chunk_tokens
            )
        else:
            guessed = self.model.pixel_head(hidden)[..., 0].float()
            total = (guessed - levels / 255).abs().sum()
        return total / batch.hidden.shape[1]


def hiding_of(pretrain: PretrainConfig | None, side: int) -> Hiding | None:
    """What is hidden of images of `side` x `side` pixels; None without pretraining.

    Raises:
        ValueError: squares that do not divide such an image.
    """
    if pretrain is None:
        return None
    hiding = Hiding(pretrain.share, pretrain.square if pretrain.unit == "square" else 1)
    hiding.check(side)
    return hiding


def describe_pretraining(pretrain: PretrainConfig) -> str:
    """For the log: what is hidden, and the loss."""
    what = "pixels" if pretrain.unit == "pixel" else f"squares of {pretrain.square} x {pretrain.square} pixels"
    bins = f"cross entropy over {pretrain.levels} grey levels"
    return f"{pretrain.share:.0%} of {what} hidden and predicted, {bins if pretrain.loss == 'cross_entropy' else 'L1'}"
