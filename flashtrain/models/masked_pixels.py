"""An encoder that learns without labels: some pixels are hidden, and it predicts them from the others.

Source: Amos, Berant and Gupta, "Never Train from Scratch" (2024), who pretrain on the very images of the task.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.config.schema import ClassifierConfig, ModelConfig, PretrainConfig
from flashtrain.models.classifier import HEAD_SIZE, Classifier
from flashtrain.models.gpt import Attend
from flashtrain.models.positions import to_image

_HIDDEN = -1.0  # stands in for the grey level, 0..1, of a hidden pixel


class MaskedPixels(Classifier):
    """The classifier with two parts more: an embedding that hidden pixels share, and a head for their grey levels.

    All else has the classifier's names and shapes, its own heads too, which rest. So its weights go on to a classifier,
    and from one, without those two parts.

    Args:
        pretrain: the loss, which says how many numbers the head has for a pixel.
        others: as for `Classifier`.
    """

    def __init__(
        self,
        config: ModelConfig,
        classifier: ClassifierConfig,
        pretrain: PretrainConfig,
        attend: Attend,
        *,
        seq_len: int,
    ) -> None:
        super().__init__(config, classifier, attend, seq_len=seq_len)
        hidden = config.hidden_size
        outputs = pretrain.levels if pretrain.loss == "cross_entropy" else 1
        self.hidden_pixel = nn.Parameter(torch.empty(hidden))
        self.pixel_head = nn.Linear(hidden, outputs, bias=False)
        nn.init.normal_(self.hidden_pixel, std=1.0)
        nn.init.normal_(self.pixel_head.weight, std=HEAD_SIZE / math.sqrt(hidden))

    def forward(self, inputs: Tensor, plan: Any, places: Tensor) -> Tensor:  # type: ignore[override]
        """Hidden states at the hidden pixels, for `pixel_head`.

        Args:
            inputs: uint8 0..255 or float 0..1 [batch, side, side]. Nothing depends on the levels of hidden pixels.
            plan: handed to `attend` as it is; a list or tuple holds one plan per layer.
            places: int64 [batch, n], the hidden pixels, counted row by row.

        Returns:
            [batch, n, hidden_size].
        """
        whole = torch.promote_types(self.hidden_pixel.dtype, torch.float32)
        grey = inputs.to(whole) if inputs.is_floating_point() else inputs.to(whole) / 255
        grey = grey.flatten(1).scatter(1, places, _HIDDEN).view(inputs.shape)
        hidden = to_image(self.encode(grey, plan)[0], inputs.shape[1], self.tile).flatten(0, 2)
        rows = torch.arange(len(inputs), device=inputs.device)[:, None] * inputs[0].numel() + places
        return hidden.index_select(0, rows.flatten()).view(*places.shape, -1)

    def embed_pixels(self, grey: Tensor) -> Tensor:
        return torch.where((grey == _HIDDEN)[..., None], self.hidden_pixel, super().embed_pixels(grey))
