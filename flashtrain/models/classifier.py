"""A classifier: the GPT's blocks as an encoder over the pixels of a grey image or over token ids.

One pixel is one token. What may attend to what is the plan's affair, as in the GPT: without a plan attention goes both
ways over the whole sequence.

Source: the encoder of Long Range Arena (Tay et al. 2021); for positions see `flashtrain.models.positions`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.config.schema import ClassifierConfig, ModelConfig
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.gpt import Attend, Block, initialise, make_norm, run_blocks
from flashtrain.models.positions import (
    Rotation,
    Tile,
    grid_frequencies,
    grid_rotation,
    rotary_frequencies,
    rotation,
    sinusoids,
    to_image,
    to_tokens,
)

# About the mean and the standard deviation of Pathfinder's grey levels at 32 pixels; larger images are darker.
GREY_MEAN, GREY_SPREAD = 0.1, 0.25

# The heads' weights start at this over sqrt(hidden_size). The final norm makes features of size 1, of which max pooling
# over thousands of tokens picks 3 or 4: a logit starts within about 0.1 and lifts the first loss by less than 1 %.
HEAD_SIZE = 0.03

# A token is a marker from this share of its image's brightest grey level: level 250 where that is 255, which in
# Pathfinder only the discs reach. Relative, so that an image made darker keeps its markers, and always has one.
MARKER_SHARE = 249.5 / 255


class PixelEmbedding(nn.Module):
    """Grey levels 0..1 to hidden states: a linear map of one number.

    The bias is more than a habit: without it all levels would lie on one line through 0, and the norm before the first
    attention would leave nothing of a level but its sign. Written out rather than as `nn.Linear`, so that autocast
    leaves the residual stream in the weights' dtype, as an embedding of ids does.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Hidden states of size 1: one input has a weight of variance 1."""
        nn.init.normal_(self.weight, std=1.0)
        nn.init.normal_(self.bias, std=0.5)

    def forward(self, grey: Tensor) -> Tensor:
        """grey [batch, seq] -> [batch, seq, hidden_size]."""
        centred = (grey - GREY_MEAN) / GREY_SPREAD
        return centred.to(self.weight.dtype)[..., None] * self.weight + self.bias


class Classifier(nn.Module):
    """Images or token ids in, class logits out, and on request logits of every pixel.

    Positions name pixels, not places in the sequence: learned, sinusoidal and 1-D rotary ones count row by row in
    either token order. So the order of the tokens is a matter of which blocks a sparse plan makes of them, and weights
    go from one order to the other.

    Args:
        config: sizes and parts of the blocks; `config.positions` is not read.
        classifier: what is around the blocks.
        attend: the attention function, see `flashtrain.models.gpt.Attend`.
        vocab_size: number of token ids; None for images.
        seq_len: tokens of the learned position table; for images side^2.

    Attributes:
        checkpoint_blocks: recompute each block in the backward pass instead of keeping its activations.

    Raises:
        ValueError: a combination that cannot work, by key, value and what to write instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        classifier: ClassifierConfig,
        attend: Attend,
        vocab_size: int | None = None,
        *,
        seq_len: int,
    ):
        super().__init__()
        check_sizes(config, classifier, vocab_size, seq_len)
        hidden = config.hidden_size
        self.config, self.classifier, self.seq_len = config, classifier, seq_len
        self.head_dim = Dimensions.of(config).head_dim
        self.tile = classifier.tile if classifier.token_order == "tiles" else None
        self.takes_pixels = vocab_size is None
        self.checkpoint_blocks = False
        self.embedding = PixelEmbedding(hidden) if vocab_size is None else nn.Embedding(vocab_size, hidden)
        learned = classifier.positions == "learned"
        self.position_embedding = nn.Embedding(seq_len, hidden) if learned else None
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.final_norm = make_norm(config)
        self.head = nn.Linear(hidden, classifier.num_classes)
        self.dense_head = nn.Linear(hidden, classifier.dense_classes) if classifier.dense_classes else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as GPT-2 does, with small heads, so that the first loss is ln(num_classes), and nearness if asked.

        Embeddings of ids start at init_std, but at 1 beside sinusoids, which have that size: Vaswani et al. (2017,
        section 3.4) multiply theirs up for the same reason.
        """
        initialise(self, self.config, self._std_of)
        if isinstance(self.embedding, PixelEmbedding):
            self.embedding.reset_parameters()
        for block in self.modules():
            if isinstance(block, Block):
                self._start_near(block)

    def _std_of(self, module: nn.Module) -> float:
        if module is self.head or module is self.dense_head:
            return HEAD_SIZE / math.sqrt(self.config.hidden_size)
        if isinstance(module, nn.Embedding) and self.classifier.positions == "sinusoidal":
            return 1.0
        return self.config.init_std

    def _start_near(self, block: Block) -> None:
        """Let head h look at near pixels from the first step, with one bias c on its queries and keys.

        With c on the first axis of every rotated pair and 0 on the second, query and key differ by their angles alone,
        so that their product is c^2 times the sum over pairs of cos(frequency * distance along the pair's axis):
        largest where they meet, and falling over the first pixels along either axis.
        """
        for head, strength in enumerate(self.classifier.proximity):
            biases = block.attention.qkv.bias.view(3, -1, self.head_dim)  # q, k, v
            biases[:2, head, : self.head_dim // 2] = strength

    def forward(self, inputs: Tensor, plan: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of the classes and, with dense_classes, of each pixel.

        Args:
            inputs: uint8 0..255 or float 0..1 [batch, side, side], or int64 [batch, seq].
            plan: handed to `attend` as it is; a list or tuple holds one plan per layer.
            lengths: int64 [batch], tokens of each row that are not padding, at least 1; None counts all. Padding is
                left out of the pooling here; that nothing attends to it is for the plan to say.

        Returns:
            [batch, num_classes], and [batch, side, side, dense_classes] in image order or None.

        Raises:
            ValueError: inputs of another kind, shape or side than the model takes, or a wrong number of plans.
        """
        hidden, counted = self.encode(inputs, plan, lengths)
        logits = self.head(self._pool(hidden, counted))
        if self.dense_head is None:
            return logits, None
        return logits, to_image(self.dense_head(hidden), inputs.shape[1], self.tile)

    def encode(self, inputs: Tensor, plan: Any, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [batch, seq, hidden_size], token by token, and which [batch, seq] are pooled (None: all)."""
        x, turn, counted = self._embed(inputs, lengths)
        return self.final_norm(run_blocks(self.blocks, x, plan, turn, recompute=self.checkpoint_blocks)), counted

    def embed_pixels(self, grey: Tensor) -> Tensor:
        """Grey levels 0..1 [batch, seq] -> [batch, seq, hidden_size]."""
        return self.embedding(grey)

    def _embed(self, inputs: Tensor, lengths: Tensor | None) -> tuple[Tensor, Rotation | None, Tensor | None]:
        """Hidden states with their positions, the rotation, and which tokens [batch, seq] are pooled (None: all)."""
        self._check_inputs(inputs, lengths)
        counted, width = None, inputs.shape[1]
        if self.takes_pixels:
            whole = torch.promote_types(self.embedding.weight.dtype, torch.float32)
            grey = to_tokens(inputs, self.tile).to(whole)
            grey = grey if inputs.is_floating_point() else grey / 255
            positions = to_tokens(torch.arange(width**2, device=inputs.device).view(1, width, width), self.tile)[0]
            x = self.embed_pixels(grey)
            if self.classifier.pooling == "marker":
                counted = grey >= MARKER_SHARE * grey.amax(dim=1, keepdim=True)
        else:
            positions = torch.arange(width, device=inputs.device)
            x = self.embedding(inputs)
            if lengths is not None:
                counted = positions < lengths[:, None]
        x, turn = self._place(x, positions, width)
        return self.embedding_dropout(x), turn, counted

    def _place(self, x: Tensor, positions: Tensor, width: int) -> tuple[Tensor, Rotation | None]:
        """Add positions [seq] to x [batch, seq, hidden_size], or give the rotation for them. width: pixels in a row."""
        kind = self.classifier.positions
        if self.position_embedding is not None:
            return x + self.position_embedding(positions), None
        if kind == "sinusoidal":
            return x + sinusoids(positions, x.shape[-1]).to(x.dtype), None
        if kind == "rope":
            return x, rotation(positions, rotary_frequencies(self.head_dim, self.config.rope_theta, x.device))
        if kind == "rope2d":
            return x, grid_rotation(positions // width, positions % width, grid_frequencies(self.head_dim, x.device))
        return x, None

    def _pool(self, hidden: Tensor, counted: Tensor | None) -> Tensor:
        """[batch, seq, hidden_size] -> [batch, hidden_size] over the counted tokens, at least one a row."""
        if self.classifier.pooling == "max":
            return (hidden if counted is None else hidden.masked_fill(~counted[..., None], -torch.inf)).amax(dim=1)
        if counted is None:
            return hidden.mean(dim=1)
        return hidden.masked_fill(~counted[..., None], 0).sum(dim=1) / counted.sum(dim=1, keepdim=True)

    def _check_inputs(self, inputs: Tensor, lengths: Tensor | None) -> None:
        shape = list(inputs.shape)
        if not self.takes_pixels:
            if inputs.dtype != torch.int64 or inputs.dim() != 2:
                raise ValueError(f"inputs {inputs.dtype} {shape}: this classifier takes token ids, int64 [batch, seq]")
            if self.position_embedding is not None and shape[1] > self.seq_len:
                raise ValueError(
                    f"{shape[1]} tokens do not fit the learned position table of {self.seq_len}: build the model "
                    f"with seq_len={shape[1]}, or take classifier.positions=rope, which has no table"
                )
            return
        if not (inputs.dtype == torch.uint8 or inputs.is_floating_point()) or inputs.dim() != 3 or shape[1] != shape[2]:
            raise ValueError(
                f"inputs {inputs.dtype} {shape}: this classifier takes images, uint8 or float [batch, side, side]"
            )
        if lengths is not None:
            raise ValueError("lengths: images have no padding; leave it out")
        side = shape[1]
        if self.position_embedding is not None and side**2 != self.seq_len:
            raise ValueError(
                f"an image of side {side} does not fit the learned positions of side {math.isqrt(self.seq_len)}: "
                f"build the model with seq_len={side**2} and grow the table with `gridwise`, or take "
                "classifier.positions=rope2d, which has no table"
            )
        _check_tile(self.tile, side)


def check_sizes(config: ModelConfig, classifier: ClassifierConfig, vocab_size: int | None, seq_len: int) -> None:
    """Raise ValueError for a combination that cannot work; arguments as for `Classifier`."""
    positions, head_dim = classifier.positions, Dimensions.of(config).head_dim
    if vocab_size is not None:
        for key, value, instead in (
            ("pooling", "marker", "mean or max"),
            ("positions", "rope2d", "rope"),
            ("token_order", "tiles", "rows"),
        ):
            if getattr(classifier, key) == value:
                raise ValueError(f"classifier.{key}={value}: is for images; with token ids take {instead}")
        if classifier.dense_classes:
            raise ValueError(f"classifier.dense_classes={classifier.dense_classes}: is for images; with token ids 0")
    else:
        side = math.isqrt(seq_len)
        if side**2 != seq_len:
            raise ValueError(f"seq_len={seq_len}: an image has side^2 pixels; take {side**2} or {(side + 1) ** 2}")
        _check_tile(classifier.tile if classifier.token_order == "tiles" else None, side)
    parts = {"rope": 2, "rope2d": 4}.get(positions, 1)
    if head_dim % parts:
        raise ValueError(
            f"model.head_dim={head_dim}: must be a multiple of {parts} with classifier.positions={positions}; "
            "change it or the positions"
        )
    if positions == "sinusoidal" and config.hidden_size % 2:
        raise ValueError(f"model.hidden_size={config.hidden_size}: must be even with classifier.positions=sinusoidal")
    if classifier.proximity:
        _check_proximity(config, classifier)


def _check_proximity(config: ModelConfig, classifier: ClassifierConfig) -> None:
    given = f"classifier.proximity={list(classifier.proximity)}"
    if classifier.positions != "rope2d":
        raise ValueError(f"{given}: needs classifier.positions=rope2d, not {classifier.positions}; or take []")
    if len(classifier.proximity) > config.num_heads:
        raise ValueError(f"{given}: more entries than model.num_heads={config.num_heads}; give one a head at most")
    if config.num_kv_heads not in (None, config.num_heads):
        raise ValueError(f"{given}: each head needs keys of its own; set model.num_kv_heads=null")
    if not config.bias:
        raise ValueError(f"{given}: is a bias of queries and keys; set model.bias=true, or proximity=[]")
    if config.qk_norm:
        raise ValueError(f"{given}: model.qk_norm=true would undo its size; set model.qk_norm=false, or proximity=[]")


def _check_tile(tile: Tile | None, side: int) -> None:
    if tile is not None and (min(tile) < 1 or side % tile[0] or side % tile[1]):
        raise ValueError(
            f"classifier.tile={list(tile)}: height and width must divide the side of {side} pixels; change them or "
            "take classifier.token_order=rows"
        )
