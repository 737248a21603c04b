"""Plain sampling, the whole context again for each token: enough for a few lines of text at validation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    generator: torch.Generator,
    plan_for: Callable[[int], Any],
    round_to: int = 1,
) -> list[int]:
    """Continue a prompt; the same generator state gives the same tokens.

    Every step has another length, so give it the model itself rather than a compiled one. Dropout is off meanwhile.

    Args:
        model: the model; its context is the last model.seq_len tokens.
        prompt_ids: at least one token id.
        max_new_tokens: how many to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample among so many most likely tokens; None among all.
        generator: on any device; it advances by one draw per token.
        plan_for: the attention plan for a sequence of the given length (causal, batch of one).
        round_to: fill the context up to a multiple of so many tokens, which nothing before them sees, so that one plan
            serves many steps.

    Returns:
        The prompt and the new token ids.

    Raises:
        ValueError: empty prompt, negative temperature, or top_k below 1.
    """
    ids = [int(token) for token in prompt_ids]
    if not ids:
        raise ValueError("prompt_ids is empty: give at least one token, such as the end-of-text token")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature={temperature} must be 0 or more and top_k={top_k} at least 1, or None for all tokens"
        )
    device = model.head_weight.device
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = ids[-model.seq_len :]
            length = min(-(-len(context) // round_to) * round_to, model.seq_len)
            filled = torch.tensor([context + [0] * (length - len(context))], device=device)
            hidden = model(filled, plan_for(length))
            logits = model.logits(hidden[0, len(context) - 1]).float()
            ids.append(_sample(logits, temperature, top_k, generator))
    finally:
        model.train(was_training)
    return ids


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id from logits [vocab], float32."""
    if temperature == 0:
        return int(logits.argmax())
    likeliest, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    probs = torch.softmax(likeliest / temperature, dim=-1).to(generator.device)
    return int(tokens[torch.multinomial(probs, 1, generator=generator)[0]])
