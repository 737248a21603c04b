"""What a forecast is about: a run's sizes, number format, kernels and way to save memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtrain.attention.backends import HOPPER_MIN_HEAD_DIM, MAX_HEAD_DIM, MIN_HEAD_DIM
from flashtrain.config import Config
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.recompute import Recompute
from flashtrain.training.forecast.gpus import Gpu


@dataclass(frozen=True)
class Case:
    """One run, as far as memory and time go.

    Attributes:
        config: the run's, or its stage's.
        vocab_size: rows of the head.
        precision: Lightning's name of the number format.
        compiled: torch.compile is used.
        backend: kernels of attention: hopper, portable, sdpa or standard.
        pairs: visible query-key pairs a sequence and head, the mean over layers.
        how: what is computed again.
        gpu: where it runs; None is the CPU, or a GPU that the forecast does not know.
        fused_norm: RMSNorm is one operator that keeps its input alone, as on GPUs.
    """

    config: Config
    vocab_size: int
    precision: str
    compiled: bool
    backend: str
    pairs: float
    how: Recompute
    gpu: Gpu | None
    fused_norm: bool = True

    @property
    def sizes(self) -> Dimensions:
        return Dimensions.of(self.config.model)

    @property
    def micro_tokens(self) -> int:
        """Tokens that go through the model at once on a device."""
        return self.config.sequences_per_micro_batch * self.config.seq_len // self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimiser step on a device."""
        return self.config.sequences_per_step // self.config.data_shares // self.config.sequences_per_micro_batch

    @property
    def devices(self) -> int:
        """That train together."""
        return self.config.trainer.devices

    @property
    def context(self) -> int:
        """Devices that share each sequence."""
        return self.config.trainer.context

    @property
    def shards(self) -> int:
        """Devices that the model is divided among."""
        trainer = self.config.trainer
        return (trainer.shard or self.devices) if self.devices > 1 and trainer.strategy == "fsdp" else 1

    @property
    def replicas(self) -> int:
        """Devices, or groups of those that divide it, that have the model."""
        return self.devices // self.shards

    @property
    def rotary(self) -> bool:
        """Queries and keys are turned by their positions, and kept turned."""
        classifier = self.config.classifier
        return (self.config.model if classifier is None else classifier).positions in ("rope", "rope2d")

    @property
    def weight_bytes(self) -> int:
        """Of a parameter, a gradient and a moment."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def number_bytes(self) -> int:
        """Of what matrices multiply."""
        return 4 if self.precision == "32-true" else 2

    def at_length(self, seq_len: int) -> Case:
        """The same with one sequence of that length at once: the least that one has to fit."""
        batch = seq_len * self.config.data_shares
        trainer = replace(self.config.trainer, batch_tokens=batch, micro_batch_tokens=seq_len)
        config = replace(self.config, seq_len=seq_len, trainer=trainer)
        return replace(self, config=config, pairs=self.pairs * (seq_len / self.config.seq_len) ** 2)


def backend_on(gpu: Gpu, config: Config, precision: str) -> str:
    """Kernels of attention on a GPU that need not be here.

    Raises:
        ValueError: `attention.backend` names some that it cannot run.
    """
    wanted, head_dim = config.attention.backend, Dimensions.of(config.model).head_dim
    fast = precision != "32-true" and head_dim >= HOPPER_MIN_HEAD_DIM and head_dim % 8 == 0
    if wanted == "hopper" and not (gpu.has_hopper_kernels and fast):
        raise ValueError(
            f"attention.backend=hopper: {gpu.name} does not run it with head_dim {head_dim} in {precision}; write "
            "attention.backend=auto"
        )
    if wanted != "auto":
        return wanted
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return "sdpa"
    return "hopper" if gpu.has_hopper_kernels and fast else "portable"


def count_parameters(case: Case) -> dict[str, int]:
    """Parameters of a GPT: blocks (those of matrices apart), embeddings, head and norms."""
    model, sizes = case.config.model, case.sizes
    hidden, heads = model.hidden_size, sizes.num_heads * sizes.head_dim
    up = sizes.mlp_size * (2 if sizes.gated else 1)
    matrices = hidden * (sizes.qkv_size + heads + up + sizes.mlp_size)
    vectors = (sizes.qkv_size + up + 2 * hidden) if model.bias else 0
    norm = hidden * (2 if model.norm == "layernorm" and model.bias else 1)
    vectors += 2 * norm + (2 * sizes.head_dim if model.qk_norm else 0)
    language = case.config.task == "language"
    return {
        "matrices": model.num_layers * matrices,
        "vectors": model.num_layers * vectors + norm,
        "embedding": case.vocab_size * hidden if language else 0,
        "positions": case.config.seq_len * hidden if model.positions == "learned" and language else 0,
        "head": 0 if model.tie_embeddings and language else case.vocab_size * hidden,
    }
