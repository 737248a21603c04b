"""What the tests of generation share: a call of it, plans, and models that say more than one thing."""

import torch

from flashtrain.attention import Causal, lower
from flashtrain.config.schema import RopeScalingConfig
from flashtrain.models.generate import Sampling, generate

PARTS = {
    "learned": {},
    "none": {"positions": "none"},
    "rope and grouped heads": {"modern": True},
    "rope stretched by yarn": {
        "modern": True,
        "rope_scaling": RopeScalingConfig(rule="yarn", factor=4.0, original_seq_len=32),
    },
}


def plan(queries, keys, device="cpu"):
    return lower(Causal(), 1, queries, keys, device)


def run(
    model, prompt, count, seed=0, plan_for=plan, cached=True, block=1, prefill_tokens=None, stop=None, graphed=False,
    compiled=False, **sampling,
):  # fmt: skip
    return generate(
        model, prompt, count, sampling=Sampling(**sampling), generator=torch.Generator().manual_seed(seed),
        plan_for=plan_for, cached=cached, block=block, prefill_tokens=prefill_tokens, stop=stop, graphed=graphed,
        compiled=compiled,
    )  # fmt: skip


def sharp(model):
    """Logits that differ enough to say more than one thing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model
