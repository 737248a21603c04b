"""Text from a model, token by token: each new token alone against the keys and values of those before it.

Nucleus sampling (top_p) is Holtzman et al. 2020.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.cache import Cache
from flashtrain.models.decoding import piece_of
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.gpt import GPT
from flashtrain.models.graphed import FEWEST, OneToken, why_not
from flashtrain.models.recompute import plan_of_each

# (queries, keys) -> the attention plan of one sequence, causal, the queries being the last tokens.
PlanFor = Callable[[int, int], Any]

_log = logging.getLogger(__name__)


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
    graphed: bool = False,
    compiled: bool = False,
) -> Iterator[int]:
    """Continue a prompt; the same generator state gives the same tokens, with and without a cache.

    Nothing compiled is used but by `compiled`, since steps have their own lengths. Dropout is off meanwhile.
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
        graphed: read the new tokens by steps of fixed shapes, each of which is one CUDA graph on a GPU; needs the cache
            and weights that stay where they are. Where that cannot be (`graphed.why_not`), or pays for too few tokens,
            the log says so.
        compiled: let torch.compile fuse those steps, which pays for thousands of tokens; needs `graphed`.

    Yields:
        The new token ids.

    Raises:
        ValueError: empty prompt, no tokens to read at once, graphed without a cache, compiled without graphed, or a
            step that no graph can hold.
    """
    ids = [int(token) for token in prompt_ids]
    if not ids:
        raise ValueError("prompt_ids is empty: give at least one token, such as the end-of-text token")
    if prefill_tokens is not None and prefill_tokens < 1:
        raise ValueError(f"prefill_tokens={prefill_tokens}: must be at least 1, or None for the whole prompt")
    if graphed and not cached:
        raise ValueError("graphed=True with cached=False: a graph reads a token behind a cache; take one of them out")
    if compiled and not graphed:
        raise ValueError(
            "compiled=True with graphed=False: only steps of fixed shapes are compiled; give graphed=True too"
        )
    sampling = sampling or Sampling()
    reader: _Reader = _Again(model, plan_for, block)
    if cached:
        capacity = min(len(ids) + max_new_tokens, model.seq_len)
        if graphed and capacity - len(ids) < FEWEST:
            graphed = False
            _log.info("no CUDA graph for fewer than %d tokens", FEWEST)
        reader = _Cached(model, plan_for, block, capacity, prefill_tokens, reader, graphed, compiled)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            # Compiled blocks would be compiled again for each length, until there are too many.
            with torch.compiler.set_stance("force_eager"):
                logits = reader(ids)
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


_Reader = Callable[[Sequence[int]], Tensor]  # all ids so far -> logits after the last one, float32 [vocab]


class _Again:
    """Reads the whole context for each token."""

    def __init__(self, model: GPT, plan_for: PlanFor, block: int) -> None:
        self.model, self.plan_for, self.block = model, plan_for, block

    def __call__(self, ids: Sequence[int]) -> Tensor:
        context = ids[-self.model.seq_len :]
        length = min(-(-len(context) // self.block) * self.block, self.model.seq_len)
        filled = _tensor([*context, *[0] * (length - len(context))], self.model)
        hidden = self.model(filled, self.plan_for(length, length))[0, len(context) - 1]
        return self.model.logits(hidden).float()


class _Cached:
    """Reads only what is not in the cache yet, as long as all tokens fit the context.

    Args:
        capacity: tokens that the cache has to hold.
        again: reads what does not fit.
        graphed: read single tokens by `OneToken`, compiled or not.
    """

    def __init__(
        self,
        model: GPT,
        plan_for: PlanFor,
        block: int,
        capacity: int,
        prefill_tokens: int | None,
        again: _Reader,
        graphed: bool,
        compiled: bool,
    ) -> None:
        self.model, self.plan_for, self.again = model, plan_for, again
        self.graphed, self.compiled = graphed, compiled
        self.piece = piece_of(capacity, Dimensions.of(model.config).num_kv_heads) if graphed else 1
        self.cache = Cache(len(model.blocks), -(-capacity // self.piece) * self.piece)
        self.at_once = -(-(prefill_tokens or capacity) // block) * block
        self._step: OneToken | None = None

    def __call__(self, ids: Sequence[int]) -> Tensor:
        if len(ids) > self.model.seq_len:
            return self.again(ids)
        step = self._one_token(len(ids)) if self.graphed and 0 < self.cache.length == len(ids) - 1 else None
        if step is not None:
            return step(ids[-1])
        hidden = None
        while self.cache.length < len(ids):
            first = self.cache.length
            new = ids[first : first + self.at_once]
            hidden = self.model.read(_tensor(new, self.model), self.cache, self.plan_for(len(new), first + len(new)))
        assert hidden is not None, "called once for each new token"
        return self.model.logits(hidden[0, -1]).float()

    def _one_token(self, length: int) -> OneToken | None:
        """What reads token number `length` and those after it; None, and a line in the log, where that cannot be."""
        if self._step is None:
            plans = plan_of_each(self.model.blocks, self.plan_for(1, length))
            if (reason := why_not(self.model, plans)) is not None:
                self.graphed = False
                _log.warning("tokens are read without a CUDA graph, which is slower: %s", reason)
                return None
            self._step = OneToken(self.model, self.cache, self.piece, plans, self.compiled)
        return self._step


def _tensor(ids: Sequence[int], model: GPT) -> Tensor:
    return torch.tensor([list(ids)], device=model.head_weight.device)
