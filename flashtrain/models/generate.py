"""Text from a model, token by token: each new token alone against the keys and values of those before it.

Nucleus sampling (top_p) is Holtzman et al. 2020.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.cache import Cache
from flashtrain.models.gpt import GPT

# (queries, keys) -> the attention plan of one sequence, causal, the queries being the last tokens.
PlanFor = Callable[[int, int], Any]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: among so many most likely tokens; None among all.
        top_p: among the most likely tokens that together have this probability, after temperature and top_k; 1 all.

    Raises:
        ValueError: a value that means nothing.
    """

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"temperature={self.temperature} must be 0 or more and top_k={self.top_k} at least 1, or None for all "
                "tokens"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie above 0 and not above 1, which takes all tokens")


def generate(model: GPT, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """The prompt and the new token ids; arguments as in `stream`."""
    return [*map(int, prompt_ids), *stream(model, prompt_ids, max_new_tokens, **options)]


@torch.no_grad()
def stream(
    model: GPT,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    generator: torch.Generator,
    plan_for: PlanFor,
    cached: bool = True,
    block: int = 1,
    prefill_tokens: int | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Continue a prompt; the same generator state gives the same tokens, with and without a cache.

    Every step has another length, so that nothing compiled is used. Dropout is off meanwhile.
    The model's context is its last model.seq_len tokens. Once there are more, the context moves on by a token each
    time, every token in it has another position, and all of it is read again, as without a cache.

    Args:
        model: the model.
        prompt_ids: at least one token id.
        max_new_tokens: how many to add.
        sampling: how tokens are drawn; None takes the defaults.
        generator: on any device; it advances by one draw per token.
        plan_for: the attention plan of so many queries and keys (causal, batch of one).
        cached: keep keys and values; otherwise each token reads the whole context again.
        block: queries in a block of the plans' layouts, 1 where there are none. Prompts are read in pieces of whole
            blocks, and without a cache contexts are filled up to whole blocks, which nothing before them sees, so that
            one plan serves many steps.
        prefill_tokens: tokens of the prompt that are read at once, rounded up to whole blocks; None for all.
        stop: end after this token.

    Yields:
        The new token ids.

    Raises:
        ValueError: empty prompt, or no tokens to read at once.
    """
    ids = [int(token) for token in prompt_ids]
    if not ids:
        raise ValueError("prompt_ids is empty: give at least one token, such as the end-of-text token")
    if prefill_tokens is not None and prefill_tokens < 1:
        raise ValueError(f"prefill_tokens={prefill_tokens}: must be at least 1, or None for the whole prompt")
    sampling = sampling or Sampling()
    reader: _Reader = _Again(model, plan_for, block)
    if cached:
        reader = _Cached(model, plan_for, block, len(ids) + max_new_tokens, prefill_tokens, reader)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            # Compiled blocks would be compiled again for each length, until there are too many.
            with torch.compiler.set_stance("force_eager"):
                logits = model.logits(reader(ids)).float()
            ids.append(sample(logits, sampling, generator))
            yield ids[-1]
            if ids[-1] == stop:
                return
    finally:
        model.train(was_training)


def sample(logits: Tensor, how: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocab], float32."""
    if how.temperature == 0:
        return int(logits.argmax())
    likeliest, tokens = logits.topk(min(how.top_k or len(logits), len(logits)))
    probs = torch.softmax(likeliest / how.temperature, dim=-1)
    if how.top_p < 1:
        before = probs.cumsum(-1) - probs  # 0 for the first, which stays whatever top_p is
        probs = probs.masked_fill(before >= how.top_p, 0.0)
    return int(tokens[torch.multinomial(probs.to(generator.device), 1, generator=generator)[0]])


_Reader = Callable[[Sequence[int]], Tensor]  # all ids so far -> the hidden state of the last one, [hidden_size]


class _Again:
    """Reads the whole context for each token."""

    def __init__(self, model: GPT, plan_for: PlanFor, block: int) -> None:
        self.model, self.plan_for, self.block = model, plan_for, block

    def __call__(self, ids: Sequence[int]) -> Tensor:
        context = ids[-self.model.seq_len :]
        length = min(-(-len(context) // self.block) * self.block, self.model.seq_len)
        filled = _tensor([*context, *[0] * (length - len(context))], self.model)
        return self.model(filled, self.plan_for(length, length))[0, len(context) - 1]


class _Cached:
    """Reads only what is not in the cache yet, as long as all tokens fit the context."""

    def __init__(
        self, model: GPT, plan_for: PlanFor, block: int, length: int, prefill_tokens: int | None, again: _Reader
    ) -> None:
        self.model, self.plan_for, self.again = model, plan_for, again
        self.cache = Cache(len(model.blocks), min(length, model.seq_len))
        self.piece = -(-(prefill_tokens or length) // block) * block

    def __call__(self, ids: Sequence[int]) -> Tensor:
        if len(ids) > self.model.seq_len:
            return self.again(ids)
        hidden = None
        while self.cache.length < len(ids):
            first = self.cache.length
            new = ids[first : first + self.piece]
            hidden = self.model.read(_tensor(new, self.model), self.cache, self.plan_for(len(new), first + len(new)))
        assert hidden is not None, "called once for each new token"
        return hidden[0, -1]


def _tensor(ids: Sequence[int], model: GPT) -> Tensor:
    return torch.tensor([list(ids)], device=model.head_weight.device)
