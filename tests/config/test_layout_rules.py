"""Block layouts by configuration: what cannot be is told by key, value and fix, before anything heavy is imported."""

from __future__ import annotations

import inspect

import pytest

from flashtrain.config import ConfigError, build, to_dict
from flashtrain.config.command_line import check_overrides
from flashtrain.config.layout_rules import FIXED_STRIDE, PARAMETERS

from .test_build import composed
from .test_command_line import CONF, problems_of


def sparse(*overrides: str):
    return build(composed("attention=block_sparse", *overrides))


def test_the_parameters_of_the_configuration_are_those_of_the_functions():
    from flashtrain.attention import layouts

    for name, parameters in PARAMETERS.items():
        if name in ("dense", "from_mask"):
            continue
        keywords = inspect.signature(getattr(layouts, name)).parameters
        own = {key for key, value in keywords.items() if value.kind is inspect.Parameter.KEYWORD_ONLY}
        # Of no_empty_rows only the default is of use in a model; tiles and their order are the classifier's.
        own -= {"device", "no_empty_rows", "tile", "order"}
        assert own == {"heads" if parameter == "per_head" else parameter for parameter in parameters}, name
    assert inspect.signature(layouts.fixed).parameters["stride"].default == FIXED_STRIDE


def test_layouts_are_typed_and_come_back_from_the_stored_configuration():
    config = sparse(
        "seq_len=16k", "attention.layout.name=bigbird", "attention.layout.random=2", "attention.layout.per_head=true",
        "attention.layout.block=128x64", "attention.alternate_with=[{name: dense}]", "attention.dense_every=4",
    )  # fmt: skip
    assert [layout.name for layout in config.attention.layouts] == ["bigbird", "dense"]
    assert (config.attention.layout.random, config.attention.layout.block) == (2, "128x64")
    assert build(to_dict(config)) == config


def test_a_configuration_stored_before_there_were_layouts_is_one_of_dense_layers():
    stored = to_dict(build(composed()))
    for key in ("layout", "alternate_with", "dense_every"):
        stored["attention"].pop(key)
    assert build(stored).attention.layouts == ()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["name=butterfly", "window=4"], "layout.window=4: butterfly has no such parameter, it takes max_stride"),
        (["name=dense", "stride=4"], "attention.layout.stride=4: dense has no such parameter, it takes none"),
        (["window=-1"], "attention.layout.window=-1: must be at least 0"),
        (["name=dilated", "dilation=0"], "attention.layout.dilation=0: must be at least 1"),
        (["name=butterfly", "max_stride=6"], "attention.layout.max_stride=6: must be a power of two, such as 4 or 8"),
        (["name=fixed", "summary=9"], "attention.layout.summary=9: must be at most attention.layout.stride=8"),
        (["name=random_blocks"], "attention.layout.density=null: random_blocks needs"),
        (["name=random_blocks", "density=1.5"], "attention.layout.density=1.5: must be above 0 and at most 1"),
        (["name=from_mask"], "attention.layout.path=null: from_mask reads a .npy file"),
        (["name=tiles_2d"], "attention.layout.name=tiles_2d: is for images"),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_refused_by_key_value_and_fix(overrides, told):
    with pytest.raises(ConfigError) as error:
        sparse(*(f"attention.layout.{override}" for override in overrides))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("attention.dense_every=1", "attention.dense_every=1: must be at least 2"),
        ("attention.dense_every=5", "attention.dense_every=5: model.num_layers=4 has no such layer; write at most 4"),
        ("attention.alternate_with=[{name: fixed, summary: 9}]", "alternate_with[0].summary=9: must be at most"),
        ("attention.alternate_with=[{name: dense},{name: dense},{name: dense},{name: dense}]", "more than model.num_l"),
    ],
)  # fmt: skip
def test_a_choice_of_layers_that_cannot_be_is_refused(override, told):
    with pytest.raises(ConfigError) as error:
        sparse(override)
    assert told in str(error.value)


def test_tiles_of_images_are_refused_where_tokens_are_no_pixels():
    """4k is the square of 64: the layout could be made, of a text."""
    tiles = ("attention.layout.name=tiles_2d", "sequences.path=folder")
    with pytest.raises(ConfigError, match=r"name=tiles_2d: is for images; with sequences\.source=text take local_gl"):
        sparse("experiment=lra_text", "seq_len=4k", *tiles)
    assert sparse("experiment=lra_image", *tiles).attention.layouts[0].name == "tiles_2d"


def test_a_block_as_long_as_the_sequence_is_refused():
    with pytest.raises(ConfigError, match=r"attention\.layout\.block=128: seq_len=128 is no longer than one block"):
        sparse("seq_len=128")
    with pytest.raises(ConfigError, match=r"alternate_with\[0\]\.block=128x64: seq_len=128"):
        sparse("seq_len=128", "attention.layout.block=64", "attention.alternate_with=[{name: fixed, block: 128x64}]")
    assert sparse("seq_len=129").attention.layouts[0].block == 128
    assert sparse("seq_len=32", "attention.layout.name=dense").seq_len == 32


def test_all_problems_of_layouts_come_in_one_message():
    message = problems_of(
        "attention=block_sparse", "attention.layout.name=fixed", "attention.layout.window=2",
        "attention.layout.summary=-1", "attention.dense_every=9", "seqlen=16k",
    )  # fmt: skip
    assert "4 problems" in message
    for part in ("layout.window=2", "summary=-1", "dense_every=9", "did you mean 'seq_len'"):
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["attention=block_sparse", "attention.layout.name=buterfly"], "did you mean butterfly?"),
        (["attention=blok_sparse"], "did you mean attention=block_sparse?"),
        (["attention=block_sparse", "attention.layout.block=32"], "expected one of 64, 128, 128x64"),
        (["attention=block_sparse", "attention.layout.windw=4"], "did you mean 'attention.layout.window'?"),
        (["attention=block_sparse", "attention.layout=butterfly"], "give one of them, such as attention.layout.name="),
        (["attention=block_sparse", "attention.alternate_with=[{name: dens}]"], "did you mean dense?"),
        (["attention=block_sparse", "attention.alternate_with=[{name: fixed, strid: 2}]"], "did you mean 'stride'?"),
        (
            ["attention=block_sparse", "attention.alternate_with=[{name: dense}, butterfly]"],
            "attention.alternate_with=[{'name': 'dense'}, 'butterfly']: 'butterfly' is no section: write {name: ...}",
        ),
        (["attention.layout.window=4"], "no section attention.layout; choose one (attention=block_sparse)"),
        (["attention=sdpa", "attention.dense_every=2"], "no key attention.dense_every; choose one (attention=block_s"),
        (["-m", "attention.layout.window=2,4"], "this run has no section attention.layout"),
        (["-m", "attention=flash,block_sparse", "attention.dense_every=2"], "the run with attention=flash has no key"),
    ],
)
def test_a_mistake_on_the_command_line_names_what_to_write(arguments, hint):
    assert hint in problems_of(*arguments)


def test_right_command_lines_pass():
    check_overrides(["-m", "seq_len=4k,16k", "attention=flash,block_sparse"], CONF)
    check_overrides(
        ["-m", "attention=block_sparse", "attention.layout.name=local_global,dilated", "attention.layout.window=2,8",
         "attention.alternate_with=[{name: butterfly, max_stride: 8}, {name: dense}]", "attention.dense_every=4"],
        CONF,
    )  # fmt: skip
