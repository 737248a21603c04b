"""A choice of a group, given to a run that goes on: what it changes, and what stays as the run has it."""

from __future__ import annotations

import pytest
import yaml
from hydra import compose, initialize_config_dir

from flashtrain.config import ConfigError, to_dict
from flashtrain.config.composed import configured
from flashtrain.training.run_parts import doubts

from .conftest import ROOT


def begin(tmp_path, config):
    """What a run leaves behind that resume reads first."""
    folder = tmp_path / "runs" / "kept"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))


def resume(tmp_path, *choices):
    """The configuration and the changes of a run that goes on."""
    arguments = ["resume=kept", f"runs_dir={tmp_path / 'runs'}", *choices]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return configured(compose("config", arguments), arguments, None)


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        (("trainer=fsdp", "trainer.devices=2"), {"trainer.devices: 1 -> 2", "trainer.strategy: ddp -> fsdp"}),
        (("trainer=default",), set()),
        (
            ("memory=offload",),
            {
                "memory.checkpointing: auto -> full",
                "memory.offload: auto -> True",
                "memory.mlp_chunk_tokens: None -> 16k",
            },
        ),
        (("attention=standard",), {"attention.backend: auto -> standard"}),
        (("memory.loss_chunk_tokens=1k",), set()),
    ],
)
def test_another_choice_of_a_group_changes_what_its_choices_differ_in(make_config, tmp_path, choices, told):
    own = {"trainer.batch_tokens": 768, "memory.loss_chunk_tokens": 1024, "attention.window": 9}
    config = make_config("run_id=kept", *(f"{key}={value}" for key, value in own.items()))
    begin(tmp_path, config)
    resumed_config, changes = resume(tmp_path, *choices)
    assert set(changes) == told
    kept = to_dict(resumed_config)
    assert {key: kept[key.split(".")[0]][key.split(".")[1]] for key in own} == own


def test_what_they_differ_in_is_refused_where_a_resume_cannot_honour_it(make_config, tmp_path):
    begin(tmp_path, make_config("run_id=kept", "attention=block_sparse", "seq_len=512"))
    with pytest.raises(ConfigError, match=r"attention\.layout\.name=None: the run was started with local_global"):
        resume(tmp_path, "attention=flash")


def test_what_is_hardly_meant_is_said_at_the_start(make_config):
    config = make_config("trainer.batch_tokens=300", "plan.gpu=h200", "seq_len=64")
    assert [line.split(" is ")[0] for line in doubts(config, 0)][-2:] == ["trainer.batch_tokens=300", "plan.gpu=h200"]
    assert "a step takes 256 tokens" in "".join(doubts(config, 0))
    assert not any("batch_tokens" in line for line in doubts(make_config("trainer.batch_tokens=256", "seq_len=64"), 0))
