"""The YAML under conf/ is the schema's other half: every file composes, and what cannot work is refused."""

import itertools
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import ConfigError, build, to_dict
from flashtrain.config.build import leaf_types

CONF = Path(__file__).resolve().parents[2] / "conf"


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


CHOICES = [
    f"{folder.name}={file.stem}"
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "hydra"  # its launchers need packages of their own
    for file in sorted(folder.glob("*"))
]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_under_conf_composes_and_is_typed(choice):
    group = choice.split("=")[0]
    # Sections of classification are nothing without each other.
    others = ["experiment=pathfinder32"] if group in ("classifier", "images", "curriculum", "pretrain") else []
    if group == "sequences":
        others = ["experiment=lra_listops"]
    if choice == "experiment=lra_pathfinder":
        others = ["images.path=x"]
    elif choice.startswith(("sequences=", "experiment=lra_")):
        others += ["sequences.path=x"]
    if choice in ("images=release", "images=npz"):
        others += ["images.path=x", "classifier.dense_classes=0"]
    config = build(composed(*others, choice, "data.path=x", "data.name=org/set"))
    assert type(config.seq_len) is int
    assert build(to_dict(config)) == config  # what config.yaml stores comes back the same


def test_every_key_of_the_schema_is_explained_in_the_yaml():
    explained = set()
    for file in CONF.rglob("*.yaml"):
        lines = file.read_text().splitlines()
        for above, line in itertools.pairwise(lines):
            if above.lstrip().startswith("#") and ":" in line and not line.lstrip().startswith("#"):
                explained.add(line.split(":")[0].strip())
    wanted = {key.rsplit(".", 1)[-1] for key in leaf_types()}
    assert wanted - explained == set()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.num_heads=5", "must be a multiple of model.num_heads=5"),
        ("model.num_kv_heads=3", "must divide model.num_heads"),
        ("run_id=../up", "run_id='../up'"),
        ("data=text", "data.path=null"),
        ("data=hub", "data.name=null"),
        ("seq_len=0", "seq_len=0: must be above 0"),
        ("model.dropout=1.5", "at least 0 and below 1"),
        ("trainer.context=2", "trainer.context=2"),
        ("task=classification", "images=null: task=classification needs it"),
        ("images=pathfinder", "images: a section for task=classification"),
        (("experiment=pathfinder32", "trainer.val_recall=true"), "trainer.val_recall=true: is for task=language"),
        (("seq_len=3", "trainer.val_recall=true"), "trainer.val_recall=true: seq_len=3 has no room"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_by_name(override, told):
    with pytest.raises(ConfigError) as error:
        build(composed(*([override] if isinstance(override, str) else override)))
    assert told in str(error.value)


def test_a_typo_in_a_users_own_yaml_is_found():
    raw = composed()
    raw["trainer"]["max_stpes"] = 3
    with pytest.raises(ConfigError, match=r"did you mean 'trainer\.max_steps'"):
        build(raw)


def test_a_missing_value_is_named():
    raw = composed()
    raw["data"]["source"] = "???"
    del raw["seed"]
    with pytest.raises(ConfigError) as error:
        build(raw)
    assert "missing key 'data.source'" in str(error.value)
    assert "missing key 'seed'" in str(error.value)


def test_sizes_are_whole_numbers_everywhere():
    config = build(composed("seq_len=16k", "trainer.max_steps=1k", "model.batch_tokens=0.5M", "attention.window=4k"))
    assert (config.seq_len, config.trainer.max_steps, config.trainer.batch_tokens) == (16384, 1024, 524288)
    assert config.attention.window == 4096
    assert yaml.safe_load(yaml.safe_dump(to_dict(config)))["seq_len"] == 16384


def test_a_step_has_at_least_one_sequence_and_whole_micro_batches():
    config = build(composed("seq_len=64k"))
    assert (config.sequences_per_step, config.sequences_per_micro_batch) == (1, 1)
    config = build(composed("seq_len=512", "trainer.batch_tokens=3k", "trainer.micro_batch_tokens=2k"))
    assert (config.sequences_per_step, config.sequences_per_micro_batch) == (6, 3)
