"""Each layout shows the blocks that its paper defines, held against a definition that looks at one pair at a time."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.attention import BlockLayout, Causal, SlidingWindow, layouts
from flashtrain.attention.block_layout import BLOCK_SIZES, _say_blind
from flashtrain.attention.masks import parts


def dense(layout: BlockLayout) -> Tensor:
    """The visible blocks, bool [heads, num_q_blocks, num_k_blocks]."""
    visible = torch.zeros(layout.heads * layout.num_q_blocks, layout.num_k_blocks, dtype=torch.bool)
    for row in range(len(visible)):
        visible[row, layout.blocks[layout.starts[row] : layout.starts[row + 1]].long()] = True
    return visible.reshape(layout.heads, layout.num_q_blocks, layout.num_k_blocks)


def own_blocks(block: int, layout: BlockLayout) -> set[int]:
    """The blocks of keys at the positions of a block of queries, one query at a time."""
    queries = range(block * layout.block_q, min((block + 1) * layout.block_q, layout.seq_q))
    return {(query + layout.seq_k - layout.seq_q) // layout.block_k for query in queries}


def by_definition(layout: BlockLayout, sees: Callable[[int, int], bool]) -> Tensor:
    """Where sees(own block of keys, block of keys) holds for one of a block's own blocks."""
    rows = [
        [any(sees(own, j) for own in own_blocks(i, layout)) for j in range(layout.num_k_blocks)]
        for i in range(layout.num_q_blocks)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(1, layout.num_q_blocks, layout.num_k_blocks)


def _flips_one_digit(own: int, j: int, largest: int) -> bool:
    return own >= 0 and (own == j or (own ^ j) & ((own ^ j) - 1) == 0) and own ^ j <= largest


# Name -> (layout of lengths and blocks, which blocks a block sees).
DEFINED: dict[str, tuple[Callable[..., BlockLayout], Callable[[int, int], bool]]] = {
    "butterfly": (
        lambda *a: layouts.butterfly(*a),
        lambda i, j: _flips_one_digit(i, j, 1000) or j == 0 or i == 0,
    ),
    "butterfly_up_to_2": (
        lambda *a: layouts.butterfly(*a, max_stride=2, global_blocks=0),
        lambda i, j: _flips_one_digit(i, j, 2),
    ),
    "local_global": (
        lambda *a: layouts.local_global(*a, window=1, global_blocks=2),
        lambda i, j: abs(i - j) <= 1 or j < 2 or 0 <= i < 2,
    ),
    "dilated": (
        lambda *a: layouts.dilated(*a, window=2, dilation=3),
        lambda i, j: abs(i - j) in (0, 3, 6),
    ),
    "window_sinks": (
        lambda *a: layouts.window_sinks(*a, window=2, after=1, sinks=2),
        lambda i, j: -1 <= i - j <= 2 or j < 2,
    ),
    "strided": (
        lambda *a: layouts.strided(*a, stride=3),
        lambda i, j: abs(i - j) <= 3 or (i - j) % 3 == 0,
    ),
    "fixed": (
        lambda *a: layouts.fixed(*a, stride=4, summary=2),
        lambda i, j: i // 4 == j // 4 or j % 4 >= 2,
    ),
}
LENGTHS = [(1024, 1024), (1000, 1000), (130, 900), (900, 130), (777, 1300), (1, 1), (64, 0), (0, 64)]


@pytest.mark.parametrize("block", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("name", DEFINED)
def test_a_layout_shows_the_blocks_that_its_paper_defines(name: str, block: tuple[int, int]) -> None:
    make, sees = DEFINED[name]
    for lengths in LENGTHS:
        layout = make(lengths, block)
        assert torch.equal(dense(layout), by_definition(layout, sees)), lengths
        assert (layout.seq_q, layout.seq_k) == lengths and (layout.block_q, layout.block_k) == block


def test_a_window_wider_than_the_sequence_shows_everything_without_making_more() -> None:
    assert dense(layouts.local_global(300, 64, window=10**9)).all()
    assert dense(layouts.strided(300, 64, stride=10**6)).all()


@pytest.mark.parametrize("heads", [1, 3])
def test_bigbird_adds_so_many_random_blocks_outside_the_window_and_the_global_ones(heads: int) -> None:
    layout = layouts.bigbird(64 * 20, 64, window=1, global_blocks=2, random=3, heads=heads, seed=5)
    base = by_definition(layout, lambda i, j: abs(i - j) <= 1 or j < 2 or i < 2)
    visible = dense(layout)
    assert visible.shape == (heads, 20, 20) and (visible & base).eq(base).all()
    assert ((visible & ~base).sum(-1)[:, 2:] == 3).all()
    assert heads == 1 or not torch.equal(visible[0], visible[1])
    again = layouts.bigbird(64 * 20, 64, window=1, global_blocks=2, random=3, heads=heads, seed=5)
    assert torch.equal(dense(again), visible)
    assert not torch.equal(dense(layouts.bigbird(64 * 20, 64, heads=heads, seed=6)), visible)


def test_bigbird_draws_all_that_is_left_where_little_is_and_each_as_often() -> None:
    assert dense(layouts.bigbird(64 * 6, 64, random=9)).all()
    counts = sum(dense(layouts.bigbird(64 * 12, 64, window=0, global_blocks=1, random=3, seed=s)) for s in range(300))
    drawn = counts[0, 6, [*range(1, 6), *range(7, 12)]]  # 3 of 10 in 300 draws: 90, and 8 is one deviation
    assert drawn.sum() == 900 and drawn.min() > 58 and drawn.max() < 122, drawn


@pytest.mark.parametrize("density", [0.0, 0.03, 0.25, 0.5, 0.7, 1.0])
def test_random_blocks_have_the_density_asked_for_in_every_head(density: float) -> None:
    layout = layouts.random_blocks((64 * 40, 64 * 50), 64, density=density, heads=2, no_empty_rows=False)
    assert [int(head.sum()) for head in dense(layout)] == [round(density * 2000)] * 2
    filled = layouts.random_blocks((64 * 40, 64 * 50), 64, density=density, heads=2)
    assert (filled.blocks_per_row() >= 1).all()
    assert (dense(filled) & dense(layout)).eq(dense(layout)).all()
    if 0 < density < 1:
        assert not torch.equal(*dense(layout))


def test_a_random_layout_is_its_seed() -> None:
    first, again, other = (layouts.random_blocks(4096, 64, density=0.2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.blocks, again.blocks) and not torch.equal(first.blocks, other.blocks)


@pytest.mark.parametrize("order", ["row_major", "tile"])
@pytest.mark.parametrize(("height", "width", "reach"), [(20, 30, 1), (16, 32, 0), (9, 50, 2), (3, 3, 1)])
def test_a_block_of_an_image_sees_the_blocks_with_a_token_in_a_tile_near_by(
    order: str, height: int, width: int, reach: int
) -> None:
    tile = (4, 8)
    layout = layouts.tiles_2d(height, width, (128, 64), tile=tile, reach=reach, order=order)
    token = layouts.tile_order(height, width, tile) if order == "tile" else torch.arange(height * width)
    y, x = token // width // tile[0], token % width // tile[1]
    near = ((y[:, None] - y).abs() <= reach) & ((x[:, None] - x).abs() <= reach)
    for i in range(layout.num_q_blocks):
        for j in range(layout.num_k_blocks):
            wanted = near[i * 128 : (i + 1) * 128, j * 64 : (j + 1) * 64].any()
            assert dense(layout)[0, i, j] == wanted, (i, j)


def test_tile_order_takes_an_image_tile_by_tile() -> None:
    assert layouts.tile_order(2, 4, (2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layouts.tile_order(3, 3, (2, 2)).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("heads", [1, 3])
def test_a_mask_tensor_and_a_function_give_their_own_blocks(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    visible = torch.rand(heads, 5, 9) < 0.4
    layout = layouts.from_mask(visible if heads > 1 else visible[0], (600, 570), (128, 64))
    assert torch.equal(dense(layout), visible)
    monkeypatch.setattr(layouts, "_ASKED_AT_ONCE", 20)
    asked = layouts.from_function(lambda head, i, j: visible[head, i, j], (600, 570), (128, 64), heads=heads)
    assert torch.equal(dense(asked), visible)
    diagonal = layouts.from_function(lambda head, i, j: (i == j) & (head >= 0), 640)
    assert torch.equal(dense(diagonal)[0], torch.eye(5, dtype=torch.bool))


def test_heads_take_layouts_of_their_own() -> None:
    local = layouts.local_global(640, 64, window=1)
    random = layouts.random_blocks(640, 64, density=0.3, heads=2)
    joined = layouts.per_head([local, random, local])
    assert joined.heads == 4
    assert torch.equal(dense(joined), torch.cat([dense(local), dense(random), dense(local)]))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(options or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.untyped_storage().nbytes() // made.element_size())
        return result


AT_A_MILLION: dict[str, Callable[[], BlockLayout]] = {
    "butterfly": lambda: layouts.butterfly(2**20),
    "local_global": lambda: layouts.local_global(2**20),
    "dilated": lambda: layouts.dilated(2**20),
    "window_sinks": lambda: layouts.window_sinks(2**20),
    "strided": lambda: layouts.strided(2**20, stride=90),
    "fixed": lambda: layouts.fixed(2**20, stride=90),
    "bigbird": lambda: layouts.bigbird(2**20),
    "random_blocks": lambda: layouts.random_blocks(2**20, density=0.002),
    "from_function": lambda: layouts.from_function(lambda h, i, j: (i == j) & (h == 0), 2**20),
    "bigbird_of_each_head": lambda: layouts.bigbird(2**20, heads=12),
    "tiles_2d": lambda: layouts.tiles_2d(1024, 1024),
    "tiles_2d_in_their_order": lambda: layouts.tiles_2d(1024, 1024, order="tile"),
}


@pytest.mark.parametrize("name", AT_A_MILLION)
def test_a_layout_for_a_million_tokens_makes_no_dense_grid(name: str) -> None:
    with Largest() as made:
        layout = AT_A_MILLION[name]()
    assert layout.num_q_blocks == 8192 and (layout.blocks_per_row() > 0).all()
    allowed = max(4 * len(layout.blocks), 2**20 + 2**14)
    assert made.largest <= min(allowed, 8192**2 / 8), (made.largest, len(layout.blocks))


def test_a_layout_equals_only_itself_and_joins_other_masks() -> None:
    first, second = (layouts.local_global(640, 64) for _ in range(2))
    assert first == first and first != second and len({first, second, first}) == 2
    assert Causal() & first == first & Causal() != second & Causal()
    assert parts(first & SlidingWindow(3) & first) == {first, SlidingWindow(3)}


def test_a_layout_is_copied_to_a_device_once_and_not_looked_through_again() -> None:
    layout = layouts.bigbird(1000, 64, heads=2)
    assert layout.to("cpu") is layout
    there = layout.to("meta")  # where no number can be looked at
    assert there is layout.to(torch.device("meta")) and there.blocks.device.type == there.starts.device.type == "meta"
    assert (there.heads, there.num_q_blocks, there.density) == (2, 16, layout.density)


def test_a_layout_that_leaves_queries_blind_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_blind.cache_clear()
    visible = torch.eye(5, dtype=torch.bool)
    visible[3] = False
    with caplog.at_level(logging.WARNING, "flashtrain.attention"):
        for _ in range(3):
            layouts.from_mask(visible, 320, 64)
        layouts.local_global(320, 64)
    assert [record.message for record in caplog.records if "1 of 5 blocks of queries" in record.message]
    assert len(caplog.records) == 1


def _layout(starts: list[int], blocks: list[int], **changed: object) -> BlockLayout:
    fields = {"seq_q": 128, "seq_k": 192, "block_q": 64, "block_k": 64, "heads": 1} | changed
    return BlockLayout(
        **fields,  # type: ignore[arg-type]
        starts=torch.tensor(starts, dtype=torch.int64),
        blocks=torch.tensor(blocks, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layouts.local_global(640, 32), "block=32: the kernels take blocks of 64 x 64, 128 x 128, 128 x 64"),
        (lambda: layouts.butterfly(640, (64, 128)), r"block=\(64, 128\)"),
        (lambda: layouts.butterfly((640, 640, 640)), "seq_len=.* one for queries and one for keys"),
        (lambda: layouts.butterfly(-1), "seq_len=-1"),
        (lambda: layouts.butterfly(640.0), r"seq_len=640\.0: give one whole number"),  # type: ignore[arg-type]
        (lambda: layouts.butterfly("640"), "seq_len='640': give one whole number"),  # type: ignore[arg-type]
        (lambda: layouts.local_global(640, window=1.5), "window=1.5: give a whole number"),  # type: ignore[arg-type]
        (lambda: layouts.butterfly(640, max_stride=3), "max_stride=3: give a power of two"),
        (lambda: layouts.butterfly(640, global_blocks=-1), "global_blocks=-1"),
        (lambda: layouts.local_global(640, window=-1), "window=-1"),
        (lambda: layouts.dilated(640, dilation=0), "dilation=0"),
        (lambda: layouts.window_sinks(640, sinks=-2), "sinks=-2"),
        (lambda: layouts.strided(640, stride=0), "stride=0"),
        (lambda: layouts.fixed(640, stride=4, summary=5), "summary=5"),
        (lambda: layouts.bigbird(640, random=-1), "random=-1"),
        (lambda: layouts.bigbird(640, heads=0), "heads=0"),
        (lambda: layouts.random_blocks(640, density=1.5), "density=1.5"),
        (lambda: layouts.tiles_2d(8, 8, order="spiral"), "order='spiral'"),
        (lambda: layouts.tiles_2d(8, 8, tile=(0, 4)), "tile=0"),
        (lambda: layouts.from_mask(torch.ones(5, 5), 640), r"visible is torch.float32"),
        (lambda: layouts.from_mask(torch.ones(5, 5, dtype=torch.int32), 640), r"visible is torch.int32"),
        (lambda: layouts.from_mask(torch.ones(5, 6) > 0, 640), r"visible has shape \(5, 6\).*give \(5, 5\)"),
        (lambda: layouts.from_mask(torch.ones(1, 2, 5, 5) > 0, 640), "visible has shape"),
        (lambda: layouts.from_mask(torch.ones(0, 5, 5) > 0, 640), "visible has shape"),
        (lambda: layouts.from_function(lambda h, i, j: i - j, 640), "visible gave torch.int64"),
        (lambda: layouts.from_function(lambda h, i, j: torch.ones(7, 7) > 0, 640), "visible gave"),
        (lambda: layouts.per_head([]), r"layouts=\[\]"),
        (lambda: layouts.per_head([layouts.fixed(640), layouts.fixed(641)]), r"layouts\[1\] has seq_q=641"),
        (lambda: layouts.per_head([layouts.fixed(640), layouts.fixed(640, 64)]), r"layouts\[1\] has block_q=64"),
        (lambda: _layout([0, 1], [0], block_q=64, block_k=128), r"block=\(64, 128\): .* give 64, 128 or \(128, 64\)"),
        (lambda: _layout([0, 1], [0]), r"starts is torch.int64 \(2,\): give int64 \(3,\)"),
        (lambda: _layout([0, 1, 1], [0], heads=2), r"give int64 \(5,\)"),
        (lambda: _layout([0, 1, 3], [0, 1]), "starts must rise from 0 to the 2 entries"),
        (lambda: _layout([0, 2, 1], [0]), "starts must rise"),
        (lambda: _layout([0, 2, 3], [1, 0, 2]), r"ascend in each row and lie in 0\.\.2"),
        (lambda: _layout([0, 1, 2], [1, 3]), r"lie in 0\.\.2"),
        (lambda: _layout([0, 2, 2], [1, 1]), "ascend"),
        (lambda: _layout([0, 1, 1], [0], block_q=128, block_k=128, seq_k=100), "starts is"),
    ],
)
def test_what_makes_no_layout_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
