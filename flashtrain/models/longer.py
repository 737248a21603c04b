"""Reading further than a model was trained: rotary angles that are stretched, and learned tables that are grown.

Sources: position interpolation (Chen et al. 2023); NTK-aware scaling (bloc97 2023, written up in YaRN, section 3.1);
YaRN (Peng et al. 2023, sections 3.2 to 3.4); Llama 3.1 (Dubey et al. 2024); tables repeated (Beltagy et al. 2020,
Longformer, section 5).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.config.schema import ModelConfig, RopeScalingConfig
from flashtrain.models.positions import rotary_frequencies

Growth = Literal["duplicate", "interpolate"]


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair, for a model that reads `scaling.factor` times further.

    none: theta^(-2i / head_dim). linear divides all of them by the factor. ntk raises theta by factor^(d / (d - 2)),
    which leaves the fastest pair and divides the slowest by the factor. yarn and llama3 divide those that turn seldom
    in the length trained at, leave those that turn often, and pass from one to the other linearly: yarn in the number
    of the pair, llama3 in the number of turns.

    Returns:
        float64 [head_dim / 2].
    """
    if scaling.rule == "ntk":
        theta = theta * scaling.factor ** (head_dim / max(1, head_dim - 2))
    frequencies = rotary_frequencies(head_dim, theta, device)
    if scaling.rule == "linear":
        return frequencies / scaling.factor
    if scaling.rule in ("yarn", "llama3"):
        kept = _kept(frequencies, head_dim, theta, scaling)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies


def _kept(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScalingConfig) -> Tensor:
    """How far each pair stays as it is: 1 wholly, 0 stretched by the whole factor."""
    trained = scaling.original_seq_len
    assert trained is not None, "flashtrain.config refuses yarn and llama3 without a length"
    if scaling.rule == "llama3":
        turns = trained * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return ((turns - low) / (high - low)).clamp(0, 1)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    pair = torch.arange(head_dim // 2, dtype=torch.float64, device=frequencies.device)
    return 1 - ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotary_amplitude(scaling: RopeScalingConfig) -> float:
    """What queries and keys are multiplied by when they are turned: yarn sharpens attention so, and only yarn."""
    return 0.1 * math.log(scaling.factor) + 1 if scaling.rule == "yarn" else 1.0


def grown(table: Tensor, positions: int, how: Growth) -> Tensor:
    """A learned position table for more positions.

    duplicate: the table again and again, so that each stretch looks as it did. interpolate: linear between the rows,
    first and last staying what they are.

    Args:
        table: [rows, hidden_size].
        positions: rows of the result, at least those of the table.

    Returns:
        [positions, hidden_size], the table's dtype.
    """
    assert positions >= len(table), "a table is grown"
    if how == "duplicate":
        return table.repeat(-(-positions // len(table)), 1)[:positions]
    stretched = F.interpolate(table.float().T[None], positions, mode="linear", align_corners=True)
    return stretched[0].T.to(table.dtype).contiguous()


def reach(config: ModelConfig, seq_len: int) -> float:
    """Positions that a model of `seq_len` tokens knows, and those that its rotary scaling brings within reach."""
    scaling = config.rope_scaling
    if config.positions == "none":
        return math.inf
    if config.positions == "learned" or scaling.rule == "none":
        return seq_len
    return max(seq_len, scaling.factor * (scaling.original_seq_len or seq_len))


def ways_to_extend(config: ModelConfig, trained: int, wanted: int) -> str:
    """How a model trained at `trained` tokens gets to `wanted`: keys to write, for an error."""
    start = "start from it with model.init_from=<run>"
    if config.positions == "learned":
        return (
            f"{start} seq_len={wanted} model.position_extension=duplicate (the table again and again) or interpolate "
            f"(stretched), and train on; or train with seq_len={wanted} from the beginning, or take "
            "model.positions=rope, which has no table"
        )
    factor = f"{wanted / trained:g}"
    return (
        f"{start} seq_len={wanted} model.rope_scaling.factor={factor} model.rope_scaling.original_seq_len={trained} "
        "and model.rope_scaling.rule=linear, ntk, yarn or llama3; or model.position_extension=extrapolate, which goes "
        "on with the angles as they are"
    )
