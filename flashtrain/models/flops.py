"""Model FLOPs of a GPT: what the mathematics asks for, whatever is recomputed. Light: no torch."""

from dataclasses import dataclass

from flashtrain.config.schema import ModelConfig
from flashtrain.models.dimensions import Dimensions


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one sequence, forward; a multiply-add counts as two."""

    matmul: float  # projections, MLPs and the vocabulary head
    attention: float  # q k^T and the weighted sum of v, for the visible pairs only

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass of one sequence."""
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """FLOPs of forward and backward: a backward pass has two products for each one of the forward pass."""
        return 3 * self.forward


def matmul_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Weights that every token is multiplied with: all matrices and the head, tied or not.

    Embedding look-ups are no products; biases and norms (under 0.1 %) are left out.
    """
    sizes = Dimensions.of(config)
    attention = config.hidden_size * (sizes.qkv_size + sizes.num_heads * sizes.head_dim)
    mlp = config.hidden_size * sizes.mlp_size * (3 if sizes.gated else 2)
    return config.num_layers * (attention + mlp) + vocab_size * config.hidden_size


def model_flops(config: ModelConfig, vocab_size: int, seq_len: int, attended_pairs: float) -> ModelFlops:
    """Model FLOPs of one sequence.

        matmul    = 2 * matmul_parameters * seq_len
        attention = 4 * num_heads * head_dim * attended_pairs * num_layers
        training  = 3 * (matmul + attention)

    This is the count of PaLM (Chowdhery et al. 2022, appendix B), with the pairs of the mask in use for the full
    square. Softmax, norms, activations and recomputation do not count.

    Args:
        config: the model's sizes.
        vocab_size: rows of the head.
        seq_len: tokens in the sequence.
        attended_pairs: query-key pairs that the mask leaves visible, per head and layer (the mean over layers where
            they differ); causal attention has seq_len * (seq_len + 1) / 2.
    """
    sizes = Dimensions.of(config)
    return ModelFlops(
        matmul=2.0 * matmul_parameters(config, vocab_size) * seq_len,
        attention=4.0 * sizes.num_heads * sizes.head_dim * attended_pairs * config.num_layers,
    )
