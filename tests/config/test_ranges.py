"""A number that a key cannot take is refused within a second, and not by a model or an optimiser a minute later."""

import pytest

from flashtrain.config import ConfigError, build

from .test_build import composed


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.head_dim=0", "model.head_dim=0: must be above 0"),
        ("model.head_dim=-2", "model.head_dim=-2: must be above 0"),
        ("model.mlp_size=-4", "model.mlp_size=-4: must be above 0"),
        ("model.rope_theta=0", "model.rope_theta=0.0: must be above 0"),
        ("attention.window=0", "attention.window=0: must be above 0"),
        ("trainer.batch_tokens=0", "trainer.batch_tokens=0: must be above 0"),
        ("trainer.micro_batch_tokens=0", "trainer.micro_batch_tokens=0: must be above 0"),
        ("trainer.peak_tflops=0", "trainer.peak_tflops=0.0: must be above 0"),
        ("model.init_std=-1", "model.init_std=-1.0: must be at least 0"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0: must be at least 0"),
        ("data.num_workers=-1", "data.num_workers=-1: must be at least 0"),
        ("data.val_fraction=1", "data.val_fraction=1.0: must be at least 0 and below 1"),
        ("model.dropout=1", "model.dropout=1.0: must be at least 0 and below 1"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1.0]: must be at least 0 and below 1"),
        ("data.recall_share=2", "data.recall_share=2.0: must lie between 0 and 1"),
        ("optimizer.lr=nan", "optimizer.lr=nan: expected a finite number"),
        ("optimizer.clip_norm=inf", "optimizer.clip_norm=inf: expected a finite number"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(override, told):
    with pytest.raises(ConfigError) as error:
        build(composed(override))
    assert told in str(error.value)


def test_sections_that_are_not_there_and_nulls_are_in_range():
    config = build(composed("model.head_dim=null", "attention.window=null", "optimizer.clip_norm=null"))
    assert config.images is None
