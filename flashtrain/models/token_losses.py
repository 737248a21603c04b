"""What a model makes of each token, for evaluation: no gradient, and the logits of a long sequence never at once."""

import torch
from torch import Tensor

from flashtrain.models.loss import IGNORE


@torch.no_grad()
def token_losses(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, chunk_tokens: int = 4096
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each target, and whether it is the most likely token.

    Args:
        hidden: [batch, seq, hidden_size].
        head_weight: [vocab, hidden_size].
        targets: int64 [batch, seq], token ids or IGNORE.
        chunk_tokens: targets whose logits stand in memory at once.

    Returns:
        Losses in nats, float32 [batch, seq], and bool [batch, seq]; 0 and false where the target is IGNORE.
    """
    counted = targets != IGNORE
    wanted, states = targets[counted], hidden[counted]
    losses = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
    right = torch.zeros_like(counted)
    found = [
        _of_chunk(s, head_weight, t)
        for s, t in zip(states.split(chunk_tokens), wanted.split(chunk_tokens), strict=True)
    ]
    if found:
        losses[counted] = torch.cat([loss for loss, _ in found])
        right[counted] = torch.cat([likeliest for _, likeliest in found])
    return losses, right


def _of_chunk(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, head_weight).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
