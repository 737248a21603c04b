"""Work lists hold exactly the visible blocks, full ones first, and say how many pairs are visible: held against the
dense mask, element by element."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.attention import BlockLayout, Causal, Documents, Full, Mask, Plan, SlidingWindow, layouts, lower
from flashtrain.attention.block_layout import BLOCK_SIZES
from flashtrain.attention.lists import average_length, build_lists
from tests.attention.test_layouts import Largest, dense
from tests.attention.test_plan import random_documents

Parsed = list[tuple[list[int], list[int]]]


def parse(lists: Tensor, num_lists: int, num_blocks: int) -> tuple[Parsed, list[list[int]]]:
    """(full, partial) of every list, and the order of each head, read as a kernel reads them."""
    assert lists.dtype == torch.int32 and lists.dim() == 1
    values = lists.tolist()
    starts, full_ends = values[: num_lists + 1], values[num_lists + 1 : 2 * num_lists + 1]
    order = values[2 * num_lists + 1 : 3 * num_lists + 1]
    assert starts[0] == 3 * num_lists + 1 and starts[-1] <= len(values)
    parsed = []
    for begin, full_end, end in zip(starts, full_ends, starts[1:], strict=False):
        assert begin <= full_end <= end
        parsed.append((values[begin:full_end], values[full_end:end]))
    return parsed, [order[i : i + num_blocks] for i in range(0, num_lists, max(1, num_blocks))]


def by_definition(visible: Tensor, blocks: Sequence[int]) -> Parsed:
    """The same from a dense mask [seq_rows, seq_columns], block by block."""
    rows, columns = blocks
    lists = []
    for first in range(0, visible.shape[0], rows):
        full, partial = [], []
        for number, begin in enumerate(range(0, visible.shape[1], columns)):
            block = visible[first : first + rows, begin : begin + columns]
            if block.all() and block.shape == (rows, columns):
                full.append(number)
            elif block.any():
                partial.append(number)
        lists.append((full, partial))
    return lists


def elements(layout: BlockLayout) -> Tensor:
    """The layout as a mask of elements, [heads, seq_q, seq_k]."""
    blocks = dense(layout).repeat_interleave(layout.block_q, 1).repeat_interleave(layout.block_k, 2)
    return blocks[:, : layout.seq_q, : layout.seq_k]


def assert_lists(plan: Plan, rest: Plan, layout: BlockLayout) -> None:
    visible = rest.dense() & elements(layout)
    batches, heads = visible.shape[:2]
    assert plan.blocks == (layout.block_q, layout.block_k, batches, heads)
    assert plan.q_lists is not None and plan.k_lists is not None
    for lists, masks, sizes, num_blocks in (
        (plan.q_lists, visible, (layout.block_q, layout.block_k), layout.num_q_blocks),
        (plan.k_lists, visible.mT, (layout.block_k, layout.block_q), layout.num_k_blocks),
    ):
        wanted = [by_definition(masks[b, h], sizes) for b in range(batches) for h in range(heads)]
        parsed, order = parse(lists, batches * heads * num_blocks, num_blocks)
        assert parsed == [row for head in wanted for row in head]
        longest_first = [sorted(range(num_blocks), key=lambda i: -sum(map(len, head[i]))) for head in wanted]
        assert order == (longest_first if num_blocks else [])
    assert torch.equal(plan.dense().expand_as(visible), visible)
    assert plan.visible_pairs == pytest.approx(visible.sum().item() / (batches * heads), rel=1e-12)


def random_cases() -> list[tuple[Mask, int, tuple[int, int], tuple[int, int], int]]:
    """(rest of the mask, batch, lengths, blocks, heads): every kind and conjunction, empty documents, odd lengths."""
    generator = random.Random(1)
    cases: list[tuple[Mask, int, tuple[int, int], tuple[int, int], int]] = []
    for trial in range(48):
        seq_q, seq_k = generator.choice([(320, 320), (333, 333), (100, 451), (451, 100), (64, 64), (1, 500), (130, 1)])
        batch = generator.choice([1, 3])
        mask: Mask = Causal() if trial % 2 else Full()
        if trial % 3 == 0:
            mask &= SlidingWindow(generator.choice([None, 0, 90]), generator.choice([None, 0, 200]))
        if trial % 5 < 3:
            count, rows = generator.randint(1, 5), generator.choice([1, batch])
            q_rows = [random_documents(seq_q, count, generator) for _ in range(rows)]
            mask &= Documents(q_rows, [random_documents(seq_k, count, generator) for _ in range(rows)])
        cases.append((mask, batch, (seq_q, seq_k), BLOCK_SIZES[trial % 3], 1 + trial % 2 * generator.choice([0, 2])))
    return cases


@pytest.mark.parametrize(("rest", "batch", "lengths", "blocks", "heads"), random_cases())
def test_lists_hold_the_visible_blocks_full_ones_first_and_their_transpose(
    rest: Mask, batch: int, lengths: tuple[int, int], blocks: tuple[int, int], heads: int
) -> None:
    for density in (0.6, 1.0):
        layout = layouts.random_blocks(lengths, blocks, density=density, heads=heads, no_empty_rows=False)
        plan = lower(rest & layout, batch, *lengths, "cpu")
        assert_lists(plan, lower(rest, batch, *lengths, "cpu"), layout)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 100), (100, 0), (100, 100)], ids=str)
def test_no_queries_no_keys_and_no_blocks_are_lists_too(lengths: tuple[int, int]) -> None:
    layout = layouts.random_blocks(lengths, 64, density=0, no_empty_rows=False)
    assert_lists(lower(Causal() & layout, 1, *lengths, "cpu"), lower(Causal(), 1, *lengths, "cpu"), layout)


def test_a_gap_between_documents_is_visited_by_nobody() -> None:
    """Documents whose keys no query sees lie between others: they are in the run of a tile, and in no list."""
    rest = Documents(((30, 0, 34),), ((10, 500, 66),))
    layout = layouts.random_blocks((64, 576), 64, density=1.0)
    plan = lower(rest & layout, 1, 64, 576, "cpu")
    assert plan.q_lists is not None
    assert parse(plan.q_lists, 1, 1)[0] == [([], [0, 7, 8])]


def test_pairs_of_a_million_tokens_are_counted_exactly() -> None:
    seq, block, window = 2**20 + 37, 128, 4
    layout = layouts.window_sinks(seq, block, window=window, sinks=1)
    counted = 0
    for i in range(layout.num_q_blocks):
        own = min(block, seq - i * block)
        before = min(i, window) + (i > window)  # the sink is a block more once it has left the window
        counted += before * block * own + own * (own + 1) // 2
    assert lower(Causal() & layout, 1, seq, seq, "cpu").visible_pairs == counted


def test_lowering_a_million_tokens_takes_memory_for_the_visible_blocks_only() -> None:
    layout = layouts.window_sinks(2**20, window=8)
    with Largest() as made:
        plan = lower(Causal() & layout, 1, 2**20, 2**20, "cpu")
    assert made.largest <= 2 * (2**20 + 1), made.largest  # lo and hi of every query
    assert plan.q_lists is not None and len(plan.q_lists) == 3 * 8192 + 1 + len(layout.blocks)


def test_lists_are_built_without_waiting_for_the_device() -> None:
    """For documents that change every step lists are built every step. The meta device has no numbers to wait for."""
    layout = layouts.bigbird(1000, 64, heads=2)
    for mask in (Causal(), Causal() & Documents(((400, 600), (1000, 0)))):
        shapes = []
        for device in ("cpu", "meta"):
            plan = lower(mask & layout, 2, 1000, 1000, device)
            assert plan.q_lists is not None and plan.k_lists is not None
            shapes.append((plan.q_lists.shape, plan.k_lists.shape))
        assert shapes[0] == shapes[1]


class Launches(TorchDispatchMode):
    """How many operators do something on the device: all but views."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        self.count += not function.is_view
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("heads", [1, 3])
def test_lists_take_few_launches_whatever_they_hold(heads: int) -> None:
    """Lists are short, so that they cost what their launches cost: built once a step, that must not be felt."""
    layout = layouts.random_blocks((700, 900), 64, density=0.4, heads=heads)
    launches = []
    for documents in (((300, 400),), ((100, 600), (700, 0))):
        intervals = lower(
            Causal() & Documents(documents, ((300, 600),) * len(documents)), 2, 700, 900, "cpu"
        ).intervals()
        with Launches() as made:
            build_lists(layout, *intervals)
        launches.append(made.count)
    # The first time the layout says where its blocks lie.
    assert launches[0] <= 50 and launches[1] <= 45, launches


@pytest.mark.parametrize(("side", "length"), [(0, 8), (1, 4)])
def test_the_average_list_is_counted_from_shapes_alone(side: int, length: int) -> None:
    """4 blocks of queries see all 8 of keys; the meta device has no numbers to read."""
    layout = layouts.from_mask(torch.ones(4, 8, dtype=torch.bool), (256, 512), block=64)
    plan = lower(layout, 2, 256, 512, "meta")
    lists = (plan.q_lists, plan.k_lists)[side]
    assert lists is not None and average_length(lists.numel(), plan.blocks, (256, 512)[side], side) == length


def test_one_layout_and_mask_share_a_plan_and_no_others_do() -> None:
    layout, twin = (layouts.local_global(640, 64) for _ in range(2))
    plan = lower(Causal() & layout, 1, 640, 640, "cpu")
    assert lower(layout & Causal(), 3, 640, 640, "cpu") is plan
    others: list[Mask] = [layout, Causal() & twin, Causal() & layout & SlidingWindow(64)]
    others += [Causal() & layout & Documents((row,)) for row in ((320, 320), (300, 340))]
    plans = [plan, *(lower(other, 1, 640, 640, "cpu") for other in others)]
    assert len({id(one) for one in plans}) == 6
    assert not torch.equal(plans[-1].dense(), plans[-2].dense())


def test_plans_of_a_layout_live_no_longer_than_it_and_old_ones_give_way() -> None:
    layout = layouts.local_global(640, 64)
    first = weakref.ref(lower(layout, 1, 640, 640, "cpu"))
    kept = weakref.ref(lower(layout & Causal(), 1, 640, 640, "cpu"))
    for left in range(20):
        lower(layout & SlidingWindow(left), 1, 640, 640, "cpu")
        lower(layout & Causal(), 1, 640, 640, "cpu")
    gc.collect()
    assert first() is None and kept() is not None
    gone = weakref.ref(layout)
    del layout
    gc.collect()
    assert gone() is None and kept() is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda: layouts.local_global(320, 64), "the block layout is for 320 queries and 320 keys, and there are 256"),
        (lambda: layouts.local_global((256, 320), 64), "256 queries and 320 keys, and there are 256 and 256"),
        (lambda: Causal() & layouts.fixed(256) & layouts.butterfly(256), "two block layouts in one conjunction"),
        (lambda: layouts.fixed(256) & Documents(((100, 100),)), "adds up to 200"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(mask: Callable[[], Mask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lower(mask(), 1, 256, 256, "cpu")


def test_more_lists_than_32_bits_can_count_are_refused_before_they_are_made() -> None:
    layout = layouts.random_blocks(640, 64, density=1.0)
    lo = torch.zeros(1, 640, dtype=torch.int32).expand(2**25, -1)
    with pytest.raises(ValueError, match=r"mask: 3,355,443,200 visible blocks .* do not fit 32-bit work lists; give"):
        build_lists(layout, lo, lo)
