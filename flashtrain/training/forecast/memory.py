"""Memory of a training step, by part and at the moments when most of it is held.

What a block keeps is counted from what autograd saves for each of its operations; the tests hold the count against
autograd itself. With hidden size C, query width A = num_heads * head_dim, key width K = num_kv_heads * head_dim, MLP
width M, r bytes a number of the residual stream and w bytes a number that matrices multiply, a block keeps for a token

    input      r C
    attention  w C (its norm) + w (A + 2 K) (q, k, v) + w A (out) + 4 num_heads (lse) + r C (the stream behind it)
               + w (2 A + K) where q and k are turned or normalised: copies of q and k, and of out in another order
    MLP        w C (its norm) + w M (2 w M gated) (up) + w M (activation)

and 8 for the statistics of each norm. In GPT-2 in bfloat16 that is 36 C.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.training.forecast.case import Case, count_parameters

_VOCAB_MULTIPLE = 64  # as in models/loss.py
_LIBRARIES = 64 * 2**20  # work space of matrix libraries, and small tensors


@dataclass(frozen=True)
class Layer:
    """Bytes of one block for one token.

    Attributes:
        block_input, attention, mlp: what autograd saves of each part where all is kept.
        outputs: out and lse, a part of `attention`.
        turned: q and k once more where they are turned or normalised, a part of `attention`.
        mlp_work: more than that while the MLP's gradients are computed.
        attention_work: more than `attention` while those of attention are.
    """

    block_input: float
    attention: float
    mlp: float
    outputs: float
    turned: float
    mlp_work: float
    attention_work: float

    @property
    def kept(self) -> float:
        return self.block_input + self.attention + self.mlp


@dataclass(frozen=True)
class Memory:
    """Bytes of each part at the moment of `peak`, and `moments`: the total at each moment looked at."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    work: float
    moments: dict[str, float]

    @property
    def peak(self) -> float:
        return max(self.moments.values())

    @property
    def parts(self) -> dict[str, float]:
        names = ("parameters", "gradients", "optimizer", "activations", "loss", "work")
        return {name: getattr(self, name) for name in names}


def layer_bytes(case: Case) -> Layer:
    """What a block keeps and needs for a token."""
    sizes, hidden, w = case.sizes, case.config.model.hidden_size, case.number_bytes
    r = case.weight_bytes
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    up = sizes.mlp_size * (2 if sizes.gated else 1)
    outputs = 0 if case.backend == "standard" else w * query + 4 * sizes.num_heads
    attention: float = w * hidden + w * (query + 2 * key) + outputs + r * hidden + 8
    mlp: float = w * hidden + w * up + w * sizes.mlp_size + 8
    turned = w * (query + key) if case.rotary or case.config.model.qk_norm else 0.0
    attention += turned + (w * query if turned else 0)  # and out in another order
    if case.config.model.dropout:
        attention, mlp = attention + hidden, mlp + hidden  # masks of a byte
    if not case.compiled:
        attention, mlp = attention + _eager_attention(case, query, key), mlp + _eager_mlp(case)
    squares = 0.0
    if case.backend == "standard":
        # Weights before and after they are cast; where nothing is fused also in float32, and the mask.
        squares = case.config.seq_len * sizes.num_heads * (2.0 * w if case.compiled else 2.0 * w + 4)
        squares += 0 if case.compiled else case.config.seq_len
        attention += squares
    mlp_work = 2 * w * sizes.mlp_size if sizes.gated else r * hidden + w * sizes.mlp_size
    gradients = r * hidden + w * query + w * (query + 2 * key)
    if case.backend == "hopper":
        gradients += 4 * query  # dq is summed in float32
    return Layer(r * hidden, attention, mlp, outputs, turned, mlp_work, gradients + squares)


def _eager_attention(case: Case, query: int, key: int) -> float:
    """More that the attention part keeps where no compiler fuses its norms."""
    model, extra = case.config.model, 0.0
    widened = case.number_bytes < 4 and case.weight_bytes == 4  # under autocast q and k are normalised in float32
    if model.qk_norm:
        extra += 4 * (query + key) * (widened + (not case.fused_norm)) + 4 * (
            case.sizes.num_heads + case.sizes.num_kv_heads
        )
    if model.norm == "rmsnorm" and not case.fused_norm:
        extra += case.weight_bytes * model.hidden_size
    return extra


def _eager_mlp(case: Case) -> float:
    extra = case.number_bytes * case.sizes.mlp_size if case.sizes.gated else 0.0  # silu(gate)
    if case.config.model.norm == "rmsnorm" and not case.fused_norm:
        extra += case.weight_bytes * case.config.model.hidden_size
    return extra


def kept_bytes(case: Case) -> float:
    """Device memory that the blocks keep of one micro-batch for its backward pass."""
    layer, tokens, layers = layer_bytes(case), case.micro_tokens, case.config.model.num_layers
    if case.how.blocks == "none":
        mlp = 0.0 if 0 < case.how.mlp_chunk_tokens < tokens else layer.mlp
        return tokens * layers * (layer.block_input + layer.attention + mlp)
    inputs = min(layers, 3) if case.how.offload else layers  # offloaded: two on their way, and the last one
    total = inputs * layer.block_input
    if case.how.blocks == "selective" and case.backend != "standard":
        total += layers * layer.outputs
    return tokens * total


def work_bytes(case: Case) -> float:
    """What the backward pass of one block needs beside what is kept."""
    layer, how, tokens = layer_bytes(case), case.how, case.micro_tokens
    chunked = 0 < how.mlp_chunk_tokens < tokens
    if how.blocks == "none":
        mlp = how.mlp_chunk_tokens / tokens * (layer.mlp + layer.mlp_work) if chunked else layer.mlp_work
        return tokens * max(mlp + (2 * layer.block_input if chunked else 0.0), layer.attention_work)
    selective = how.blocks == "selective" and case.backend != "standard"
    attention = layer.attention - (layer.outputs if selective else 0.0)
    work = layer.mlp_work
    if case.compiled:  # a block's own graph holds fewer of the gradients at once
        work = case.number_bytes * case.sizes.mlp_size * (2 if selective and case.sizes.gated else 1)
    share, pieces = (how.mlp_chunk_tokens / tokens, 2 * layer.block_input) if chunked else (1.0, 0.0)
    mlp = share * (layer.mlp + work) + pieces
    if selective and case.compiled and not chunked:  # and computes what attention needs only after the MLP's part
        return tokens * max(layer.block_input + layer.turned + mlp, attention + layer.attention_work)
    return tokens * (attention + max(mlp, layer.attention_work))


def loss_bytes(case: Case) -> float:
    """What the loss needs beside hidden states: a chunk's logits, the head in the products' format, its gradient."""
    if case.config.task != "language":
        return 0.0
    rows = -(-case.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    chunk = min(case.config.memory.loss_chunk_tokens, case.micro_tokens)
    fused = case.gpu is not None and case.config.memory.loss != "chunked"
    logits = chunk * rows * (case.number_bytes + (0 if fused else 4))
    hidden = case.config.model.hidden_size
    return logits + rows * hidden * (case.number_bytes + 4)


def step_memory(case: Case) -> Memory:
    """The parts at the moment of the peak: at the loss, in the backward pass of the last or the first block, or in the
    optimiser."""
    counts, w, r, tokens = count_parameters(case), case.number_bytes, case.weight_bytes, case.micro_tokens
    hidden, total = case.config.model.hidden_size, sum(counts.values())
    moments_of = 1 if case.config.optimizer.name == "muon" else 2
    rest, shards = total - counts["matrices"], case.shards
    number = 2 if case.config.optimizer.state == "bfloat16" else r
    optimizer = number * (moments_of * counts["matrices"] + 2 * rest) / shards
    parameters = (r * total + (r * total if case.config.optimizer.ema_decay is not None else 0)) / shards
    parameters += gathered_bytes(case)
    # Autocast's, of matrices that gradients are taken through; a block that is computed again casts its own.
    copies = w * counts["matrices"] if w < r else 0.0
    if case.how.blocks != "none":
        copies /= case.config.model.num_layers
    gradients = r * total / shards
    before = gradients if case.micro_batches > 1 else 0.0
    head = r * case.vocab_size * hidden if case.config.task == "language" else 0.0
    stream = tokens * r * hidden
    turns = 4.0 * case.sizes.head_dim * case.config.seq_len if case.rotary else 0.0
    ids = 24.0 * tokens + turns
    kept, work, loss = kept_bytes(case), work_bytes(case), loss_bytes(case)
    base = parameters + optimizer + copies + _LIBRARIES + ids
    activations = kept + stream  # with the input of the final norm
    states = stream + 2 * tokens * w * hidden  # hidden states, their cast, and their gradient
    rows = {
        "loss": (before, activations, loss + states, 0.0),
        "last block": (max(before, head), activations, 0.0, work + stream),
        "first block": (gradients + head, kept / case.config.model.num_layers, 0.0, work + stream),
        "optimizer": (gradients, 0.0, 0.0, 0.0),
    }
    moments = {name: base + sum(row) for name, row in rows.items()}
    of_peak = rows[max(moments, key=lambda name: moments[name])]
    return Memory(
        parameters + copies, of_peak[0], optimizer, of_peak[1] + ids, of_peak[2], of_peak[3] + _LIBRARIES, moments
    )


def gathered_bytes(case: Case) -> float:
    """Of a divided model, the weights and gradients whole at once: of two blocks, a block's gradients, the rest."""
    if case.shards == 1:
        return 0.0
    counts = count_parameters(case)
    blocks = (counts["matrices"] + counts["vectors"]) / case.config.model.num_layers
    outside = counts["embedding"] + counts["positions"] + counts["head"]
    return case.weight_bytes * (3 * blocks + 2.0 * outside)


def host_bytes(case: Case) -> float:
    """Pinned host memory that offloaded inputs take; PyTorch rounds each up to a power of two."""
    if not case.how.offload:
        return 0.0
    each = int(layer_bytes(case).block_input * case.micro_tokens)
    return (case.config.model.num_layers - 1) * float(1 << (each - 1).bit_length())
