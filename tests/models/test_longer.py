"""Contexts longer than a model was trained at: rotary angles are transformers', and learned tables grow by rows."""

import math

import pytest
import torch

from flashtrain.config.schema import RopeScalingConfig
from flashtrain.models.longer import grown, rotary_amplitude, scaled_frequencies

rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
from transformers import LlamaConfig  # noqa: E402

CPU = torch.device("cpu")
TRAINED = 2048


def theirs(rule, head_dim, theta, seq_len=None, **keys):
    """Frequencies and amplitude of a Llama of transformers."""
    parameters = {"rope_type": rule, "rope_theta": theta, **keys}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=TRAINED,
        rope_parameters=parameters,
    )  # fmt: skip
    return rope_utils.ROPE_INIT_FUNCTIONS[rule](config, CPU, seq_len=seq_len)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("factor", [2.0, 16.0])
@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn", "llama3"])
def test_stretched_angles_are_those_of_transformers(rule, factor, theta, head_dim):
    if rule == "linear":
        expected, amplitude = theirs("linear", head_dim, theta, factor=factor)
    elif rule == "ntk":  # theirs grows with the length read; at factor times the length trained it is ours
        expected, amplitude = theirs("dynamic", head_dim, theta, seq_len=int(factor * TRAINED), factor=1.0)
    elif rule == "yarn":
        keys = {"factor": factor, "original_max_position_embeddings": TRAINED}
        expected, amplitude = theirs("yarn", head_dim, theta, **keys)
    else:
        keys = {"factor": factor, "original_max_position_embeddings": TRAINED}
        expected, amplitude = theirs("llama3", head_dim, theta, low_freq_factor=1.0, high_freq_factor=4.0, **keys)
    scaling = RopeScalingConfig(rule=rule, factor=factor, original_seq_len=TRAINED)
    ours = scaled_frequencies(head_dim, theta, scaling, CPU)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.float(), expected.float(), rtol=3e-6, atol=0)
    assert rotary_amplitude(scaling) == pytest.approx(amplitude, rel=1e-12)
    plain = scaled_frequencies(head_dim, theta, RopeScalingConfig(), CPU)
    assert not torch.allclose(ours, plain)
    # The slowest pair reads the longer context as it read the shorter one.
    assert ours[-1] == pytest.approx(float(plain[-1]) / factor, rel=1e-9)


def test_yarn_follows_its_own_borders(make_gpt):
    keys = {"factor": 8.0, "original_max_position_embeddings": TRAINED, "beta_fast": 16.0, "beta_slow": 2.0}
    expected, _ = theirs("yarn", 64, 10_000.0, **keys)
    scaling = RopeScalingConfig("yarn", 8.0, TRAINED, beta_fast=16.0, beta_slow=2.0)
    torch.testing.assert_close(scaled_frequencies(64, 10_000.0, scaling, CPU).float(), expected, rtol=3e-6, atol=0)


def test_llama3_follows_its_own_borders():
    keys = {"factor": 8.0, "original_max_position_embeddings": TRAINED, "low_freq_factor": 2.0, "high_freq_factor": 9.0}
    expected, _ = theirs("llama3", 64, 10_000.0, **keys)
    scaling = RopeScalingConfig("llama3", 8.0, TRAINED, low_freq_factor=2.0, high_freq_factor=9.0)
    torch.testing.assert_close(scaled_frequencies(64, 10_000.0, scaling, CPU).float(), expected, rtol=3e-6, atol=0)


def test_yarn_sharpens_attention_in_the_model(make_gpt):
    seen = []

    def attend(q, k, v, plan):
        seen.append((q, k))
        return q

    for rule in ("none", "yarn"):
        scaling = RopeScalingConfig(rule=rule, factor=4.0, original_seq_len=16)
        make_gpt(modern=True, num_kv_heads=None, attend=attend, rope_scaling=scaling)(
            torch.ones(1, 1, dtype=torch.long)
        )
    (plain_q, plain_k), (q, k) = seen[0], seen[2]
    torch.testing.assert_close((q * k).sum(), (plain_q * plain_k).sum() * (0.1 * math.log(4) + 1) ** 2)


def test_a_table_is_repeated_or_stretched():
    table = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, -1.0]])
    assert torch.equal(grown(table, 7, "duplicate"), table[[0, 1, 2, 0, 1, 2, 0]])
    stretched = grown(table, 5, "interpolate")
    torch.testing.assert_close(stretched[::2], table)
    torch.testing.assert_close(stretched[1::2], (table[:-1] + table[1:]) / 2)
    assert grown(table.bfloat16(), 5, "interpolate").dtype == torch.bfloat16
