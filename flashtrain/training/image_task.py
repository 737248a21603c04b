"""What the tasks on images have in common: their masks, and a forward pass that counts what it attends to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtrain.attention import Full
from flashtrain.config import Config
from flashtrain.models.classifier import Classifier
from flashtrain.training.task import Task
from flashtrain.training.visibility import LayerMasks, Plans, visible_pairs


class ImageTask(Task):
    """An encoder of images and its optimiser step; subclasses say what is learned from them."""

    model: Classifier

    def __init__(self, config: Config, model: Classifier) -> None:
        super().__init__(config, model)
        self.masks = LayerMasks(config, Full(), positional=False)

    def plan(self, images: Tensor) -> Plans:
        """Every pixel sees every pixel, but for the block layouts of the layers."""
        return self.masks.lower(len(images), images[0].numel(), self.device)

    def run_model(self, images: Tensor, *more: Tensor) -> Any:
        """What the model makes of images [batch, side, side], and of what else it takes."""
        plans = self.plan(images)
        self.visible_pairs += visible_pairs(plans) * len(images)
        return self._forward[0](images, plans, *more)
