"""A classifier of pairs of texts: one encoder for both, and a small network over what it makes of them.

Source: the retrieval task of Long Range Arena (Tay et al. 2020), with the head of Xiong et al. (Nystromformer, 2021).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.config.schema import ClassifierConfig, ModelConfig
from flashtrain.models.classifier import HEAD_SIZE, Classifier
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.gpt import Attend


class PairClassifier(Classifier):
    """The classifier of token ids, whose head sees x, y, x * y and x - y of the two pooled states x and y."""

    def __init__(
        self, config: ModelConfig, classifier: ClassifierConfig, attend: Attend, vocab_size: int, *, seq_len: int
    ) -> None:
        super().__init__(config, classifier, attend, vocab_size, seq_len=seq_len)
        hidden, inner = config.hidden_size, Dimensions.of(config).mlp_size
        self.compare = nn.Linear(4 * hidden, inner)
        self.head = nn.Linear(inner, classifier.num_classes)
        for linear, std in ((self.compare, config.init_std), (self.head, HEAD_SIZE / math.sqrt(inner))):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, inputs: Tensor, plan: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, None]:
        """Logits [batch, num_classes] of pairs; inputs [2 * batch, seq] are all first texts, then all second ones."""
        x, y = self._pool(*self.encode(inputs, plan, lengths)).chunk(2)
        return self.head(F.relu(self.compare(torch.cat([x, y, x * y, x - y], dim=-1)))), None
