"""What the tasks on images have in common: their masks, and a forward pass that counts what it attends to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashtrain.attention import Full
from flashtrain.config import Config
from flashtrain.models.classifier import Classifier
from flashtrain.models.recompute import Recompute
from flashtrain.training.task import MicroBatch, Task
from flashtrain.training.visibility import LayerMasks, Plans, visible_pairs


class ImageTask(Task):
    """An encoder of images and its optimiser step; subclasses say what is learned from them."""

    COMPILED_IF_RECORDED: ClassVar[bool] = True
    model: Classifier

    def __init__(self, config: Config, model: Classifier) -> None:
        super().__init__(config, model)
        self.masks = LayerMasks(config, Full(), positional=False)

    def what_differs(self) -> None:
        """Nothing: images have one size and one mask."""

    def compile_model(self) -> None:
        """Compile the blocks, once for all of them: what is around them is little, and a run has several sizes."""
        if Recompute.of(self.model.checkpoint_blocks) != Recompute():
            return super().compile_model()
        torch.compiler.reset()  # what was compiled for an earlier stage would count against the limit of versions
        for block in self.model.blocks:
            block.compile(fullgraph=True, dynamic=False)
        return None

    def validate(self, batches: Iterable[MicroBatch]) -> dict[str, float] | None:
        # To compile once more, for batches without gradients and a smaller last one, takes longer than it saves.
        with torch.compiler.set_stance("force_eager"):
            return super().validate(batches)

    def plan(self, images: Tensor) -> Plans:
        """Every pixel sees every pixel, but for the block layouts of the layers."""
        return self.masks.lower(len(images), images[0].numel(), self.device)

    def run_model(self, images: Tensor, *more: Tensor) -> Any:
        """What the model makes of images [batch, side, side], and of what else it takes."""
        plans = self.plan(images)
        self.visible_pairs += visible_pairs(plans) * len(images)
        return self._forward[0](images, plans, *more)
