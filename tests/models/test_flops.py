import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashtrain.models.flops import model_flops

FULL = {"attend": lambda q, k, v, plan: (q @ k.mT).softmax(-1) @ v}


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("head_dim", [None, 24])
def test_counted_flops_are_those_that_pytorch_counts(make_gpt, make_config, modern, head_dim):
    changes = {"modern": modern, "head_dim": head_dim, "num_kv_heads": None}
    model = make_gpt(**FULL, **changes)
    tokens = torch.randint(257, (1, 48))
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens)).sum().backward()
    flops = model_flops(make_config(**changes), 257, 48, attended_pairs=48 * 48)
    assert flops.training == counter.get_total_flops()


def test_grouped_heads_save_projection_but_not_attention(make_config):
    full = model_flops(make_config(num_kv_heads=4), 257, 64, 64 * 65 / 2)
    grouped = model_flops(make_config(num_kv_heads=1), 257, 64, 64 * 65 / 2)
    assert grouped.attention == full.attention == 4 * 32 * (64 * 65 / 2) * 2
    assert full.matmul - grouped.matmul == 2 * 64 * (2 * 3 * 8 * 32) * 2


def test_gpt2_small_at_1k_takes_the_flops_of_the_literature(make_config):
    """6 N per token for the matrices of the 124M model plus 6 layers x width x seq_len for causal attention."""
    config = make_config(num_layers=12, num_heads=12, hidden_size=768)
    flops = model_flops(config, 50_257, 1024, 1024 * 1025 / 2)
    matrices = 12 * 12 * 768**2 + 50_257 * 768
    assert flops.training / 1024 == pytest.approx(6 * matrices + 6 * 12 * 768 * 1025)
    assert flops.forward * 3 == flops.training
