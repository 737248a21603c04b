"""What devices that train together send to each other, and how long that takes.

Bytes that a device sends in an optimiser step, where s devices divide the model (ddp: 1, fsdp: all, or trainer.shard)
and g such groups have it, with P parameters of r bytes, m micro-batches, and for a sequence that c devices share T
tokens a device, L layers, query width A, key width K and w bytes a number:

    weights  3 m (s - 1) / s r P            they come for the forward and for the backward pass, gradients go
    sums     2 (g - 1) / g r P / s          of gradients between those that have the same of the model, once a step
    ring     L m T (c - 1) (4 w + 8) K      keys and values go round in both passes, their float32 gradients in one
    ulysses  4 L m T (c - 1) / c w (A + K)  queries, keys, values and outputs are exchanged, and their gradients
"""

from __future__ import annotations

from flashtrain.training.forecast.case import Case, count_parameters
from flashtrain.training.forecast.gpus import Gpu

_LINK_SHARE = 0.75  # of the data sheet's bandwidth, a guess
# What a rank of a ring takes longer for a layer's attention than its share of the whole: once, for each step of the
# ring, and there for each token of the sequence and number of a query's width. Fitted to ranks of 2, 4 and 8 at 64k and
# 256k tokens on one H200 (benchmarks/context_parallel.json).
_RING_SECONDS = 1.05e-3
_RING_STEP_SECONDS = 5e-5
_RING_STEP_BYTES = 5.7  # over the memory's bandwidth
_BACKWARD = 2 / 3  # of the blocks' time: gradients of ddp can only go meanwhile


def gradient_bytes(case: Case) -> float:
    """What a device sends of weights and gradients in a step."""
    return group_bytes(case) + sum_bytes(case)


def group_bytes(case: Case) -> float:
    """What a device sends of a divided model's weights and gradients in a step, to those that divide it with it."""
    return 3.0 * case.micro_batches * (case.shards - 1) / case.shards * _model_bytes(case)


def sum_bytes(case: Case) -> float:
    """What a device sends of gradients in a step, to those that have the same of the model."""
    return 2.0 * (case.replicas - 1) / case.replicas * _model_bytes(case) / case.shards


def _model_bytes(case: Case) -> float:
    return float(case.weight_bytes * sum(count_parameters(case).values()))


def sequence_bytes(case: Case) -> float:
    """What a device sends of sequences that it shares, in a step."""
    parts, sizes, w = case.context, case.sizes, case.number_bytes
    tokens = case.config.model.num_layers * case.micro_batches * case.micro_tokens
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    if case.config.trainer.context_method == "ulysses":
        return 4.0 * tokens * (parts - 1) / parts * w * (query + key)
    return tokens * (parts - 1) * (4.0 * w + 8) * key


def ring_seconds(case: Case, gpu: Gpu) -> float:
    """Seconds that cutting a step's sequences for a ring, and joining its parts, adds to attention; nothing is sent."""
    parts, sizes = case.context, case.sizes
    if parts == 1 or case.config.trainer.context_method != "ring":
        return 0.0
    numbers = parts * case.micro_tokens * sizes.num_heads * sizes.head_dim
    step = _RING_STEP_SECONDS + _RING_STEP_BYTES * numbers / (gpu.gb_per_s * 1e9)
    return case.config.model.num_layers * case.micro_batches * (_RING_SECONDS + parts * step)


def exposed_seconds(case: Case, gpu: Gpu, attention: float, rest: float) -> float:
    """Seconds of a step in which a device only waits for others.

    Args:
        attention: seconds of attention, behind which a ring hides.
        rest: of the blocks' other work.
    """
    rate = _LINK_SHARE * gpu.link_gb_per_s * 1e9
    weights, sequences = gradient_bytes(case) / rate, sequence_bytes(case) / rate
    if case.config.trainer.context_method == "ring":
        sequences = max(0.0, sequences - attention)
    hiding = attention + rest if case.shards > 1 else _BACKWARD * (attention + rest)
    return sequences + max(0.0, weights - hiding)
