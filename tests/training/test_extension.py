"""Runs that begin with the weights of a shorter one: what is chosen happens, and nothing happens unchosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain.config import ConfigError
from flashtrain.models.longer import grown, scaled_frequencies
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.extension import extended
from flashtrain.training.language import LanguageTask
from flashtrain.training.run import run
from flashtrain.training.warm_start import warm_start

from .conftest import figures

LEARNED = ("model.positions=learned", "trainer.max_steps=1")
LONGER = ("model.init_from=short", "run_id=long", "seq_len=64")


@pytest.fixture
def short(make_config):
    """Trains a run of 32 tokens."""

    def train(*changes):
        assert run(make_config("run_id=short", "trainer.max_steps=1", *changes), []) == 0

    return train


def log(tmp_path):
    return (tmp_path / "runs" / "long" / "train.log").read_text()


@pytest.mark.parametrize("how", ["duplicate", "interpolate"])
def test_a_learned_table_grows_as_chosen_and_trains_on(short, make_config, tmp_path, how):
    short(*LEARNED)
    config = make_config(*LEARNED, *LONGER, f"model.position_extension={how}")
    model = LanguageTask(config, 257).model
    warm_start(model, "short", config.runs_dir)
    state = ckpt.newest(tmp_path / "runs" / "short" / "checkpoints")[1]["state_dict"]
    table = state["model.position_embedding.weight"]
    assert torch.equal(model.position_embedding.weight, grown(table, 64, how))
    assert torch.equal(model.token_embedding.weight, state["model.token_embedding.weight"])
    assert run(config, []) == 0


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_nothing_chosen_is_an_error_that_offers_the_ways(short, make_config, tmp_path, positions):
    short(f"model.positions={positions}")
    assert run(make_config(f"model.positions={positions}", *LONGER), []) == 1
    told = log(tmp_path)
    assert "seq_len=64: the model's positions reach 32 tokens" in told
    ways = {
        "learned": ("model.position_extension=duplicate", "interpolate", "model.positions=rope"),
        "rope": (
            "model.rope_scaling.factor=2 model.rope_scaling.original_seq_len=32",
            "model.rope_scaling.rule=linear, ntk, yarn or llama3",
            "model.position_extension=extrapolate",
        ),
    }
    assert all(way in told for way in ways[positions])


@pytest.mark.parametrize(
    "choice",
    [
        ("model.rope_scaling.rule=yarn", "model.rope_scaling.factor=2", "model.rope_scaling.original_seq_len=32"),
        ("model.rope_scaling.rule=ntk", "model.rope_scaling.factor=2"),
        ("model.position_extension=extrapolate",),
        ("model.rope_theta=80000",),
    ],
)
def test_rotary_positions_reach_as_far_as_is_chosen(short, make_config, choice):
    short()
    assert run(make_config("trainer.max_steps=1", *LONGER, *choice), []) == 0


def test_an_extended_run_begins_with_short_pieces_if_asked_to(short, make_config, tmp_path):
    short()
    scaling = ("model.rope_scaling.rule=yarn", "model.rope_scaling.factor=2", "model.rope_scaling.original_seq_len=32")
    growing = ("schedule.length_steps=4", "schedule.first_length=16", "trainer.max_steps=6", "trainer.sample_tokens=0")
    losses = {}
    for name, changes in (("long", growing), ("whole", growing[2:])):
        assert run(make_config(*LONGER, *scaling, *changes, f"run_id={name}"), []) == 0
        losses[name] = [row[1:3] for row in figures(tmp_path / "runs" / name)]
    assert [tokens for tokens, _ in losses["long"]] == [tokens for tokens, _ in losses["whole"]]
    # Two steps of 16 tokens and two of 32 with the stretched angles: other contexts than whole rows have.
    assert all(one != other for (_, one), (_, other) in zip(losses["long"], losses["whole"], strict=True))


def test_a_factor_that_is_too_small_is_refused(short, make_config, tmp_path):
    short()
    few = ("model.rope_scaling.rule=linear", "model.rope_scaling.factor=1.5")
    assert run(make_config(*LONGER, *few), []) == 1
    assert "model.rope_scaling.factor=2" in log(tmp_path)


def test_a_longer_run_of_an_extended_one_needs_no_second_choice(short, make_config):
    short("model.rope_scaling.rule=linear", "model.rope_scaling.factor=2", "model.rope_scaling.original_seq_len=32")
    same = ("model.rope_scaling.rule=linear", "model.rope_scaling.factor=2", "model.rope_scaling.original_seq_len=32")
    assert run(make_config("trainer.max_steps=1", *LONGER, *same), []) == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("model.position_extension=duplicate",), "is for weights of a shorter run; give model.init_from"),
        (("model.position_extension=duplicate", "model.init_from=x"), "is for learned positions"),
        (
            ("model.position_extension=extrapolate", "model.init_from=x", "model.positions=learned"),
            "is for rotary positions",
        ),
        (
            ("model.position_extension=extrapolate", "model.init_from=x", "model.rope_scaling.rule=ntk"),
            "choose one of the two",
        ),
        (("model.rope_scaling.rule=yarn",), "yarn needs the length trained before"),
        (
            (
                "model.rope_scaling.rule=yarn",
                "model.rope_scaling.original_seq_len=32",
                "model.rope_scaling.beta_slow=40",
            ),
            "below model.rope_scaling.beta_fast=32.0",
        ),
    ],
)
def test_choices_that_do_not_fit_each_other_are_named(make_config, changes, told):
    with pytest.raises(ConfigError, match=told):
        make_config(*changes)


def test_a_trained_run_is_extended_at_once_by_name(make_config):
    config = make_config()
    for how in ("linear", "ntk", "yarn", "llama3"):
        longer = extended(config, 128, how)
        assert (longer.seq_len, longer.model.rope_scaling.factor) == (128, 4.0)
        assert longer.model.rope_scaling.original_seq_len == 32
        LanguageTask(longer, 257)
    plain = scaled_frequencies(16, 1e4, config.model.rope_scaling, torch.device("cpu"))
    twice = extended(extended(config, 64, "linear"), 128, "linear").model.rope_scaling
    assert torch.equal(scaled_frequencies(16, 1e4, twice, torch.device("cpu")), plain / 4)  # of the trained length
    assert extended(config, 16, None).model == config.model
    with pytest.raises(ValueError, match=r"seq_len=128.*reach 32 tokens.*--extend \(extrapolate, linear, ntk, yarn"):
        extended(config, 128, None)
    with pytest.raises(ValueError, match=r"extend=duplicate.*take one of extrapolate"):
        extended(config, 128, "duplicate")
    learned = replace(config, model=replace(config.model, positions="learned"))
    with pytest.raises(ValueError, match=r"--extend \(duplicate, interpolate\)"):
        extended(learned, 128, None)
