"""GPT: a decoder-only transformer, from GPT-2 to today's parts, each chosen by the config.

Sources: GPT-2 (Radford et al. 2019) for the layout and the initialisation; RMSNorm (Zhang and Sennrich 2019);
SwiGLU (Shazeer 2020); rotary positions (Su et al. 2021); grouped-query heads (Ainslie et al. 2023); QK-norm (Dehghani
et al. 2023).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.config.schema import ModelConfig
from flashtrain.models.cache import Cache, FixedLayer, LayerCache
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.longer import rotary_amplitude, scaled_frequencies, ways_to_extend
from flashtrain.models.positions import Rotation, rotate, rotation
from flashtrain.models.recompute import Recompute, in_chunks, plan_of_each, run_blocks

# (q [batch, num_heads, seq, head_dim], k and v [batch, num_kv_heads, seq, head_dim], plan) -> [batch, num_heads, seq,
# head_dim], all of one dtype. What may attend to what is the plan's affair; the model only hands it on.
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]

# One layer's keys and values, which take in new ones.
Layer = LayerCache | FixedLayer

# How far the spread of the logits may lift the first loss, in units of ln(vocab)^2 nats (see `embedding_std`).
INITIAL_LIFT = 0.0014


def make_norm(config: ModelConfig) -> nn.Module:
    """The config's normalisation over hidden_size."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    """Multi-head self-attention with grouped key/value heads around a given attention function."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        sizes = Dimensions.of(config)
        self.head_dim = sizes.head_dim
        self.heads = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
        self.attend = attend
        self.qkv = nn.Linear(config.hidden_size, sizes.qkv_size, bias=config.bias)
        self.q_norm = nn.RMSNorm(sizes.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(sizes.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.output = nn.Linear(sizes.num_heads * sizes.head_dim, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, plan: Any, turn: Rotation | None, cache: Layer | None = None) -> Tensor:
        """x and the result are [batch, seq, hidden_size]; a cache takes in the new keys and values."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            # In the weights' dtype: under autocast that is float32, where the statistics belong.
            q = self.q_norm(q.type_as(self.q_norm.weight))
            k = self.k_norm(k.type_as(self.k_norm.weight))
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        q, k = q.type_as(v), k.type_as(v)
        if cache is not None:
            k, v = cache.extended(k, v)
        out = self.attend(q, k, v, plan)
        return self.output(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """GELU (tanh approximation, as in GPT-2) or SwiGLU, whose `up` holds the gate first and then the values."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        sizes = Dimensions.of(config)
        self.gated = sizes.gated
        self.up = nn.Linear(config.hidden_size, sizes.mlp_size * (2 if sizes.gated else 1), bias=config.bias)
        self.down = nn.Linear(sizes.mlp_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are [batch, seq, hidden_size]."""
        x = self.up(x)
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x, approximate="tanh")
        return self.down(x)


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, attend)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, plan: Any, turn: Rotation | None, mlp_chunk_tokens: int = 0, cache: Layer | None = None
    ) -> Tensor:
        """x and the result are [batch, seq, hidden_size]; the MLP takes `mlp_chunk_tokens` at once, 0 for all."""
        x = x + self.dropout(self.attention(self.attention_norm(x), plan, turn, cache))
        return in_chunks(self._add_mlp, x, mlp_chunk_tokens)

    def _add_mlp(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, std_of: Callable[[nn.Module], float]) -> None:
    """GPT-2's: N(0, std_of(module)), no biases, 1 / sqrt(2 num_layers) on what adds to the residual."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std_of(module))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std_of(module))
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
    for block in model.modules():
        if isinstance(block, Block):
            for residual in (block.attention.output, block.mlp.down):
                residual.weight.mul_(1 / math.sqrt(2 * config.num_layers))


class GPT(nn.Module):
    """Token ids in, hidden states out; the loss (or `logits`) applies the head.

    Args:
        config: the sizes and parts.
        vocab_size: number of token ids, not padded.
        seq_len: length of the learned position table; rotary models take any length.
        attend: the attention function, see `Attend`.

    Attributes:
        checkpoint_blocks: what each block computes again in the backward pass instead of keeping it; True is full.
        longest: tokens of the longest sequence that is read without a learned table; a loaded model's is what its
            positions reach, that of others has no end.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int, attend: Attend):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.longest = math.inf
        self.head_dim = Dimensions.of(config).head_dim
        self.checkpoint_blocks: Recompute | bool = False
        self.token_embedding = nn.Embedding(vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(seq_len, config.hidden_size) if learned else None
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.final_norm = make_norm(config)
        # A tied head is the embedding itself, not a second name for it: nothing that loads, casts or shards the
        # parameters can part the two.
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, vocab_size, bias=False)
        self.reset_parameters()

    def embedding_std(self) -> float:
        """Standard deviation of embeddings and head: init_std, capped so that the first loss is ln(vocab) within 2 %.

        The final norm gives every hidden state a squared length of hidden_size, so that a logit has variance
        hidden_size * std^2, and normally distributed logits lift the mean loss by half of that. With std = 0.02 the
        lift is 1.4 % of ln(50257) in GPT-2 small, which stays as it is, yet 3 % in GPT-2 xl. The cap allows 1.5 % of
        ln(50257) and 0.8 % of ln(257): a tied head also favours the token just read, which weighs more among few.
        """
        lift = INITIAL_LIFT * math.log(self.vocab_size) ** 2
        return min(self.config.init_std, math.sqrt(2 * lift / self.config.hidden_size))

    def reset_parameters(self) -> None:
        """Initialise as GPT-2 does, with embeddings and head at `embedding_std`."""
        small, std = (self.token_embedding, self.position_embedding, self.head), self.config.init_std
        initialise(self, self.config, lambda module: self.embedding_std() if module in small else std)

    def forward(self, tokens: Tensor, plan: Any = None, positions: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: int64 [batch, seq].
            plan: handed to `attend` as it is; a list or tuple holds one plan per layer.
            positions: int64 [batch, seq], each below seq_len where positions are learned; None counts 0..seq-1.

        Returns:
            [batch, seq, hidden_size].

        Raises:
            ValueError: the sequence is longer than the learned position table or `longest`, or the number of plans is
                wrong.
        """
        x, turn = self._embed(tokens, positions)
        return self.final_norm(run_blocks(self.blocks, x, plan, turn, recompute=self.checkpoint_blocks))

    @torch.no_grad()
    def read(self, tokens: Tensor, cache: Cache, plan: Any = None) -> Tensor:
        """Hidden states of tokens that come behind those in `cache`, which takes them in: inference without repetition.

        Args:
            tokens: int64 [batch, new], as many rows as the cache has.
            cache: holds the keys and values of `cache.length` tokens before, and `new` more afterwards.
            plan: as in `forward`, for `new` queries and cache.length + new keys, aligned at the end.

        Returns:
            [batch, new, hidden_size].

        Raises:
            ValueError: more tokens than the cache has room for, or than learned positions reach.
        """
        first, new = cache.length, tokens.shape[1]
        cache.make_room(new)
        x, turn = self._embed(tokens, torch.arange(first, first + new, device=tokens.device), first + new)
        x = self._read(x, turn, cache.layers, plan)
        cache.length += new
        return x

    @torch.no_grad()
    def read_at(
        self, token: Tensor, position: Tensor, layers: Sequence[FixedLayer], plan: Any, frequencies: Tensor | None
    ) -> Tensor:
        """`read` of one token whose position only the device knows, by the same kernels at every position.

        Args:
            token: int64 [1, 1].
            position: int64 [1], below seq_len where positions are learned, which is not checked.
            layers: of a cache, each at `position`.
            plan: as in `forward`, for one query and the layers' whole memory.
            frequencies: `frequencies` of this model.

        Returns:
            [1, 1, hidden_size].
        """
        x, turn = self._embed(token, position, frequencies=frequencies)
        return self._read(x, turn, layers, plan)

    def _read(self, x: Tensor, turn: Rotation | None, layers: Sequence[Layer], plan: Any) -> Tensor:
        for block, layer_plan, layer in zip(self.blocks, plan_of_each(self.blocks, plan), layers, strict=True):
            x = block(x, layer_plan, turn, cache=layer)
        return self.final_norm(x)

    def attend_by(self, attend: Attend) -> None:
        """Let all layers attend by another function."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend = attend

    def frequencies(self, device: torch.device) -> Tensor | None:
        """Radians per position of each rotated pair, float64 [head_dim / 2]; None without rotary positions."""
        if self.config.positions != "rope":
            return None
        return scaled_frequencies(self.head_dim, self.config.rope_theta, self.config.rope_scaling, device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., vocab]. Training uses `cross_entropy_sum`, which never holds them all."""
        return F.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden_size]; the token embedding itself where the two are tied."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameter_counts(self) -> dict[str, int]:
        """Parameters as reports give them: in all, without the position table, and those of the token embedding."""
        table = 0 if self.position_embedding is None else self.position_embedding.weight.numel()
        return {
            "total": self.num_parameters,
            "without_position_table": self.num_parameters - table,
            "embedding": self.token_embedding.weight.numel(),
        }

    def _embed(
        self, tokens: Tensor, positions: Tensor | None, length: int | None = None, frequencies: Tensor | None = None
    ) -> tuple[Tensor, Rotation | None]:
        """The first block's input, and the rotary angles; positions lie below `length`, which is seq if None."""
        x, turn = self.token_embedding(tokens), None
        length = tokens.shape[1] if length is None else length
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        # On a GPU a look-up beyond a table would be an asynchronous device-side assert.
        learned = self.position_embedding is not None
        known = self.seq_len if learned else self.longest
        if length > known:
            what = "learned position table of" if learned else "positions, which reach"
            raise ValueError(
                f"a sequence of {length} tokens does not fit the {what} {known:.0f}: "
                f"{ways_to_extend(self.config, self.seq_len, length)}"
            )
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        frequencies = self.frequencies(tokens.device) if frequencies is None else frequencies
        if frequencies is not None:
            turn = rotation(positions, frequencies, rotary_amplitude(self.config.rope_scaling))
        return self.embedding_dropout(x), turn
