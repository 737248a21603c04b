"""Any layout can be drawn from the command line, with its true cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import show_layout
import torch

from flashtrain.attention import Causal, layouts, lower

CALLS = {
    "butterfly": ["max_stride=4"],
    "local_global": ["window=2", "--causal"],
    "bigbird": ["random=2", "seed=1", "heads=2", "--heads", "2", "--head", "1"],
    "strided": ["stride=3", "--window", "100"],
    "fixed": ["stride=3"],
    "dilated": ["window=1", "dilation=3"],
    "window_sinks": ["window=2", "--seq-len", "1000,2k"],
    "random_blocks": ["density=0.2", "no_empty_rows=False"],
    "tiles_2d": ["height=32", "width=32", "tile=8,8", "order=tile"],
    "from_mask": ["visible={folder}/mask.npy"],
}


def test_every_layout_that_has_a_name_is_covered() -> None:
    assert set(CALLS) == set(show_layout.NAMES)


@pytest.mark.parametrize("name", CALLS)
def test_every_layout_becomes_a_picture(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "mask.npy", np.tril(np.ones((16, 16), bool)))
    own = [argument.format(folder=tmp_path) for argument in CALLS[name]]
    length = [] if "--seq-len" in own or name == "tiles_2d" else ["--seq-len", "1k"]
    out = tmp_path / "new" / "layout.png"
    assert show_layout.main([name, *own, *length, "--block", "64", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 5000
    assert "visible pairs" in capsys.readouterr().out


def test_the_cost_is_that_of_the_visible_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "layout.png")
    call = ["window_sinks", "window=0", "sinks=0", "--seq-len", "640", "--block", "64", "--causal", "--out", out]
    assert show_layout.main([*call, "--heads", "3", "--head-dim", "32"]) == 0
    pairs = 10 * 64 * 65 // 2
    told = capsys.readouterr().out
    assert f"visible pairs a head: {pairs:,}, {100 * pairs / (640 * 641 // 2):.3g} %" in told
    assert f"FLOPs of all heads: {4 * 3 * 32 * pairs:.3g} forward, {10 * 3 * 32 * pairs:.3g} backward" in told
    assert f"lists: {2 * 4 * (3 * 10 + 1 + 10)} bytes" in told
    assert "1 / 1 / 1 (least, median, most)" in told


def test_the_picture_shows_full_and_partial_blocks_where_they_are() -> None:
    layout = layouts.per_head([layouts.butterfly(640, 64), layouts.local_global(640, 64, window=1)])
    plan = lower(Causal() & layout, 1, 640, 640, "cpu")
    full, partial = (torch.from_numpy(part) for part in show_layout.image(plan, 1))
    visible = plan.dense()[0, 1].reshape(10, 64, 10, 64).float().mean((1, 3))
    assert torch.equal(full > 0, visible == 1) and torch.equal(partial > 0, (visible > 0) & (visible < 1))
    assert full.max() == partial.max() == 1
    wide = lower(layouts.local_global(64 * 1024, 64, window=0, global_blocks=0), 1, 65536, 65536, "cpu")
    shares = show_layout.image(wide, 0)
    assert shares.shape == (2, 512, 512) and shares[0, 5, 5] == 0.5 and shares[0].sum() == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local_global", "wndow=3"], "'wndow=3': local_global takes window=..., global_blocks=..."),
        (["local_global", "window"], "local_global takes"),
        (["local_global", "window=-1"], "window=-1"),
        (["local_global", "--block", "32"], "block=32"),
        (["random_blocks"], "density"),
        (["bigbird", "heads=3"], "--heads=12: the layout has 3 heads"),
        (["fixed", "--head", "1"], "--head=1"),
        (["from_mask", "visible=nothing.npy"], "nothing.npy"),
        (["spiral"], "invalid choice: 'spiral'"),
        (["fixed", "--window", "0"], "--window=0: give a number >= 1"),
        (["fixed", "--heads", "0"], "--heads=0"),
        (["fixed", "--seq-len", "0"], "nothing to draw"),
        (["fixed", "--seq-len", "1k,0"], "nothing to draw"),
        (["fixed", "--seq-len", "16q"], "'16q': expected a size such as 16384, 16k"),
        (["tiles_2d", "height=8", "width=8", "tile=8"], "tiles_2d height=8 width=8 tile=8: "),
        (["tiles_2d", "height=8", "width=8", "--seq-len", "1k"], "--seq-len=1024: the length of tiles_2d is height"),
        (["random_blocks", "density=abc"], "random_blocks density=abc: "),
        (["fixed", "--seq-len", "256", "--out", "layout.nothing"], "--out=layout.nothing: Format 'nothing'"),
        (["fixed", "--seq-len", "256", "--out", "/dev/null/layout.png"], "--out=/dev/null/layout.png: "),
    ],
)
def test_what_cannot_be_drawn_is_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        show_layout.main([*arguments, *([] if "--out" in arguments else ["--out", str(tmp_path / "x.png")])])
    assert message in capsys.readouterr().err
