"""Time of a training step: what is multiplied over the rates that are reached, what is moved over the bandwidth.

The shares of the peaks were fitted to GPT-2 small on an H200, 32k tokens a step, by its parts (benchmarks/
training_parts.json). They are taken for every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtrain.models.flops import matmul_parameters
from flashtrain.models.recompute import Recompute
from flashtrain.training.forecast.case import Case, count_parameters
from flashtrain.training.forecast.gpus import Gpu, attention_tflops
from flashtrain.training.forecast.memory import layer_bytes
from flashtrain.training.forecast.mesh import exposed_seconds, ring_seconds

_MATMUL_SHARE = 0.72  # of the dense peak
_PASSES = 5.9  # of the bandwidth over the bytes that blocks keep: what norms, activations and sums read and write
_EAGER = 2.2  # more of it where nothing is fused
_LOSS_PASSES = 4.2  # over the logits
_OPTIMIZER_PASSES = 13.0  # over the parameters: weights, gradients and two moments, read and written, and clipping
_LAUNCH_SECONDS = 2.9e-3  # a step: copies, idle
_LAUNCH_EAGER_SECONDS = 1.3e-3  # a block, forward and backward, where launching takes longer than the kernels


@dataclass(frozen=True)
class Time:
    """Seconds of an optimiser step by part; `copies` and `communication` only as far as the rest does not hide them."""

    matmul: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    copies: float
    communication: float = 0.0

    @property
    def step(self) -> float:
        return sum(vars(self).values())


def step_time(case: Case) -> Time | None:
    """None where the machine's rates are not known."""
    gpu = case.gpu
    if gpu is None or case.precision == "32-true":
        return None
    tokens, bandwidth = case.micro_tokens * case.micro_batches, gpu.gb_per_s * 1e9
    model, vocab, how = case.config.model, case.vocab_size, case.how
    forward_matmul, forward_attention, forward_rest = _again(how, case)
    blocks = 2.0 * (matmul_parameters(model, vocab) - vocab * model.hidden_size) * tokens
    head = 2.0 * vocab * model.hidden_size * tokens
    matmul = (blocks * (3 + forward_matmul) + 3 * head) / (_MATMUL_SHARE * gpu.tflops * 1e12)
    attention = _attention_seconds(case, gpu) * (1 + forward_attention / 3.5)
    fused = replace(case, compiled=True, backend="hopper", how=Recompute())
    moved = _PASSES * layer_bytes(fused).kept * tokens * model.num_layers * (1 if case.compiled else _EAGER)
    elementwise = moved * (1 + forward_rest / 3) / bandwidth
    loss = _LOSS_PASSES * tokens * vocab * case.number_bytes / bandwidth if case.config.task == "language" else 0.0
    optimizer = _OPTIMIZER_PASSES * case.weight_bytes * sum(count_parameters(case).values()) / bandwidth / case.shards
    busy = matmul + attention + elementwise
    copies = _LAUNCH_SECONDS
    if not case.compiled:
        copies += max(0.0, _LAUNCH_EAGER_SECONDS * model.num_layers * case.micro_batches - busy)
    if how.offload:
        moved = 2 * layer_bytes(case).block_input * tokens * (model.num_layers - 1)
        copies += max(0.0, moved / (gpu.host_gb_per_s * 1e9) - busy)
    communication = exposed_seconds(case, gpu, attention, matmul + elementwise)
    return Time(matmul, attention, elementwise, loss, optimizer, copies, communication)


def _again(how: Recompute, case: Case) -> tuple[float, float, float]:
    """Forward passes more than one, of the blocks' products, of attention, and of the rest."""
    chunked = 0 < how.mlp_chunk_tokens < case.micro_tokens
    mlp = 2 / 3 if chunked else 0.0  # the MLP's share of the products, once more
    if how.blocks == "none":
        return mlp, 0.0, mlp
    kept = how.blocks == "selective" and case.backend != "standard"
    return 1 + mlp, 0.0 if kept else 1.0, 1 + mlp


def _attention_seconds(case: Case, gpu: Gpu) -> float:
    """Forward and backward: 3.5 times 4 num_heads head_dim pairs."""
    sizes, sequences = case.sizes, case.config.sequences_per_step / case.devices
    flops = 3.5 * 4.0 * sizes.num_heads * sizes.head_dim * case.pairs * case.config.model.num_layers * sequences
    alone = flops / (attention_tflops(gpu, case.backend, sizes.head_dim, case.config.seq_len) * 1e12)
    return alone + ring_seconds(case, gpu)
