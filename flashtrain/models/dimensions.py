"""The sizes that a model config implies. Light: no torch, so that a forecast can use them too."""

from dataclasses import dataclass

from flashtrain.config.schema import ModelConfig

MLP_MULTIPLE = 64  # a SwiGLU width of 8/3 x hidden_size is rounded up to this, for the matrix units


@dataclass(frozen=True)
class Dimensions:
    """Head and MLP sizes with every default of the config filled in."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    gated: bool  # SwiGLU: two projections up instead of one

    @classmethod
    def of(cls, config: ModelConfig) -> "Dimensions":
        """The sizes of a checked config: flashtrain.config has refused those that do not fit each other."""
        gated = config.activation == "swiglu"
        default_mlp = (
            -(-8 * config.hidden_size // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE if gated else 4 * config.hidden_size
        )
        num_kv_heads = config.num_kv_heads or config.num_heads
        head_dim = config.head_dim or config.hidden_size // config.num_heads
        return cls(config.num_heads, num_kv_heads, head_dim, config.mlp_size or default_mlp, gated)

    @property
    def qkv_size(self) -> int:
        """Width of the fused projection to queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
