"""Block-sparse attention and its gradients are those of dense attention under the same mask, for every layout."""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtrain.attention import BlockLayout, Causal, Documents, Full, Mask, SlidingWindow, attention, layouts, lower
from flashtrain.attention.portable.configs import Config, Configs, fit_blocks
from tests.attention.oracle import NAMES, Case, assert_accurate, make_case, run
from tests.attention.test_closed_form import assert_rows, uniform_case
from tests.attention.test_compile import compiled, train_step
from tests.attention.test_memory_layouts import assert_same

BACKENDS = ("portable", "sdpa", "standard")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Make = Callable[[int | tuple[int, int], int | tuple[int, int]], BlockLayout]

LAYOUTS: dict[str, Make] = {
    "butterfly": lambda seq, block: layouts.butterfly(seq, block, global_blocks=0),
    "local_global": lambda seq, block: layouts.local_global(seq, block, window=1),
    "bigbird": lambda seq, block: layouts.bigbird(seq, block, window=0, global_blocks=1, random=1),
    "strided": lambda seq, block: layouts.strided(seq, block, stride=2),
    "fixed": lambda seq, block: layouts.fixed(seq, block, stride=2),
    "dilated": lambda seq, block: layouts.dilated(seq, block, window=1, dilation=2),
    "window_sinks": lambda seq, block: layouts.window_sinks(seq, block, window=1),
    "random_blocks": lambda seq, block: layouts.random_blocks(seq, block, density=0.4, heads=2),
    "from_function": lambda seq, block: layouts.from_function(
        lambda h, i, j: (i + j + h) % 3 == 0, seq, block, heads=2
    ),
}


def sparse(seq: int | tuple[int, int] = 256, block: int | tuple[int, int] = 64, seed: int = 3) -> BlockLayout:
    """A layout without any symmetry, other in each of two heads, with empty rows and columns."""
    return layouts.random_blocks(seq, block, density=0.35, heads=2, seed=seed, no_empty_rows=False)


@pytest.mark.parametrize("rest", [Full(), Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_as_accurate_as_plain_pytorch(device: torch.device, name: str, rest: Mask) -> None:
    layout = LAYOUTS[name](267, 64)
    dtype = DTYPES[(list(LAYOUTS).index(name) + (rest == Causal())) % 3]
    assert_accurate(make_case(device, dtype, rest & layout, heads=(2, 1), seq=(267, 267), head_dim=32))


@pytest.mark.parametrize("rest", [Full(), Causal()], ids=["full", "causal"])
@pytest.mark.parametrize(("height", "width", "order"), [(13, 25, "row_major"), (13, 25, "tile")])
def test_images_are_right_in_either_order(
    device: torch.device, rest: Mask, height: int, width: int, order: str
) -> None:
    layout = layouts.tiles_2d(height, width, 64, tile=(4, 8), reach=0, order=order)
    assert_accurate(make_case(device, mask=rest & layout, heads=(1, 1), seq=(325, 325), head_dim=32))


TILES = {
    "of_the_table": None,
    "small": Config(32, 32, 4, 1),
    "wide": Config(32, 128, 4, 1),
    "tall": Config(128, 16, 4, 1),
}


@pytest.mark.parametrize("block", [128, (128, 64)], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_blocks_of_every_size_are_walked_in_tiles_of_any_size(
    device: torch.device, block: int | tuple[int, int], tile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TILES[tile]
    for kernel in ("forward", "dq", "dkdv") if config else ():
        module = importlib.import_module(f"flashtrain.attention.portable.{kernel}")
        monkeypatch.setattr(module, "choose_configs", lambda q: Configs(config, config, config))
    mask = Causal() & layouts.random_blocks((200, 270), block, density=0.7, heads=2)
    assert_accurate(make_case(device, mask=mask, heads=(2, 1), seq=(200, 270), head_dim=16))


def test_tiles_shrink_to_what_divides_a_block_and_warps_with_them() -> None:
    assert fit_blocks(Config(128, 64, 8, 3, 128), (64, 64, 1, 1)) == Config(64, 64, 4, 3, 128)
    assert fit_blocks(Config(64, 128, 8, 3), (128, 64, 1, 1)) == Config(64, 64, 4, 3)
    assert fit_blocks(Config(32, 32, 8, 2), (64, 64, 1, 1)) == Config(32, 32, 8, 2)
    assert fit_blocks(Config(128, 64, 8, 3), ()) == Config(128, 64, 8, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layout_with_an_empty_row_and_an_empty_column_gives_known_numbers(device: torch.device, backend: str) -> None:
    rows = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]]
    layout = layouts.from_mask(torch.tensor(rows, dtype=torch.bool), 256, 64)
    results = run(uniform_case(device, layout, (256, 256)), backend)
    assert_rows(results["out"], [32.5] * 64 + [0.0] * 64 + [96.5] * 64 + [96.5] * 64)
    assert_rows(results["dv"], [1.5] * 64 + [1.0] * 64 + [0.5] * 64 + [0.0] * 64)
    assert torch.equal(results["dq"][:, :, 64:128], torch.zeros_like(results["dq"][:, :, 64:128]))
    assert torch.equal(results["dk"][:, :, 192:], torch.zeros_like(results["dk"][:, :, 192:]))
    assert torch.equal(results["dv"][:, :, 192:], torch.zeros_like(results["dv"][:, :, 192:]))
    if "lse" in results:
        assert_rows(results["lse"], [4.158883] * 64 + [-torch.inf] * 64 + [4.852030] * 64 + [4.158883] * 64, 1e-6)


@pytest.mark.parametrize(
    "seq", [(1, 1), (64, 64), (65, 63), (250, 250), (129, 300), (300, 129), (1, 200), (200, 1)], ids=str
)
@pytest.mark.parametrize("rest", [Full(), Causal()], ids=["full", "causal"])
def test_any_lengths_are_right(device: torch.device, seq: tuple[int, int], rest: Mask) -> None:
    case = make_case(device, mask=rest & sparse(seq), heads=(2, 2), seq=seq, head_dim=16)
    assert_accurate(case)


RESTS: dict[str, tuple[Mask, tuple[int, int], int]] = {
    "window": (SlidingWindow(50, 20), (256, 256), 1),
    "causal_window": (Causal() & SlidingWindow(90), (200, 300), 1),
    "documents": (Documents(((70, 0, 100, 86),)), (256, 256), 2),
    "documents_of_each_row": (Causal() & Documents(((70, 186), (256, 0))), (256, 256), 2),
    "a_gap_between_documents": (Documents(((30, 0, 98),), ((10, 200, 46),)), (128, 256), 1),
}


@pytest.mark.parametrize("name", RESTS)
def test_layouts_join_windows_and_documents(device: torch.device, name: str) -> None:
    rest, seq, batch = RESTS[name]
    mask = rest & layouts.random_blocks(seq, 64, density=0.6, heads=2)
    assert_accurate(make_case(device, DTYPES[batch], mask, batch=batch, heads=(2, 1), seq=seq, head_dim=32))


@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per_head"])
def test_grouped_query_heads_each_walk_their_own_list(
    device: torch.device, heads: tuple[int, int], shared: bool
) -> None:
    layout = layouts.random_blocks(190, 64, density=0.5, heads=1 if shared else heads[0], no_empty_rows=False)
    assert_accurate(make_case(device, mask=Causal() & layout, heads=heads, seq=(190, 190), head_dim=16))


def test_heads_of_different_kinds_share_a_call(device: torch.device) -> None:
    kinds = [LAYOUTS["window_sinks"](190, 64), LAYOUTS["fixed"](190, 64), layouts.local_global(190, 64, window=9)]
    layout = layouts.per_head([*kinds, kinds[0]])
    case = make_case(device, mask=Causal() & layout, heads=(4, 2), seq=(190, 190), head_dim=16)
    assert_accurate(case)
    alone = run(make_case_like(case, Causal() & kinds[1], slice(1, 2), slice(0, 1)))
    assert torch.equal(alone["out"], run(case)["out"][:, 1:2])


def make_case_like(case: Case, mask: Mask, q_heads: slice = slice(None), k_heads: slice = slice(None)) -> Case:
    """The same inputs, or those of some heads, under another mask."""
    q, dout, dlse = (tensor[:, q_heads] for tensor in (case.q, case.dout, case.dlse))
    k, v = case.k[:, k_heads], case.v[:, k_heads]
    return Case(q, k, v, dout, dlse, case.scale, lower(mask, q.shape[0], q.shape[2], k.shape[2], q.device))


@pytest.mark.parametrize("block", [64, 128, (128, 64)], ids=str)
@pytest.mark.parametrize("rest", [Full(), Causal()], ids=["full", "causal"])
def test_all_blocks_are_dense_attention(device: torch.device, block: int | tuple[int, int], rest: Mask) -> None:
    everything = layouts.from_function(lambda h, i, j: (i >= 0) & (j >= 0), (190, 260), block)
    case = make_case(device, mask=rest & everything, heads=(2, 1), seq=(190, 260), head_dim=32)
    ours, dense = run(case), run(make_case_like(case, rest))
    for name in NAMES:
        torch.testing.assert_close(ours[name], dense[name], rtol=1e-5, atol=1e-5)
    assert lower(rest & everything, 1, 190, 260, device).visible_pairs == lower(rest, 1, 190, 260, device).visible_pairs


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_block_at_all_gives_zeros(device: torch.device, backend: str) -> None:
    nothing = layouts.from_mask(torch.zeros(3, 3, dtype=torch.bool), 150, 64)
    results = run(make_case(device, mask=nothing, heads=(2, 1), seq=(150, 150), head_dim=16), backend)
    for name, result in results.items():
        wanted = torch.full_like(result, -torch.inf) if name == "lse" else torch.zeros_like(result)
        assert torch.equal(result, wanted), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_in_invisible_blocks_changes_no_bit(device: torch.device, backend: str) -> None:
    visible = torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    mask = layouts.from_mask(visible, 250, 64)
    case = make_case(device, mask=mask, heads=(2, 1), seq=(250, 250), head_dim=16)
    before = run(case, backend)
    case.k[:, :, 64:128] = 1e4  # nobody sees them
    case.v[:, :, 64:128] = 1e4
    case.k[:, :, 128:192] += 1  # the first and the third block of queries do not
    case.v[:, :, 128:192] -= 1
    after = run(case, backend)
    for name in ("dk", "dv"):
        assert torch.equal(after[name][:, :, 64:128], torch.zeros_like(after[name][:, :, 64:128]))
    for name in ("out", "dq"):
        for rows in (slice(0, 64), slice(128, 192)):
            assert torch.equal(before[name][:, :, rows], after[name][:, :, rows]), name


@pytest.mark.parametrize("layout", ["transposed", "fused", "expanded"])
def test_strides_make_no_difference(device: torch.device, layout: str) -> None:
    case = make_case(device, mask=Causal() & sparse(200), heads=(2, 2), seq=(200, 200), head_dim=16)
    base = run(case)
    if layout == "transposed":
        case.q, case.k, case.v, case.dout = (
            tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (case.q, case.k, case.v, case.dout)
        )
    elif layout == "fused":
        case.q, case.k, case.v = torch.stack((case.q, case.k, case.v), dim=3).unbind(3)
    else:
        case.dout = torch.ones(1, 1, 1, 1, device=device).expand_as(case.dout)
        base = run(Case(**{**vars(case), "dout": case.dout.contiguous()}))
    assert_same(run(case), base)


def test_results_are_the_same_bit_for_bit_and_so_on_another_way_down_the_heads(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(device, torch.float16, Causal() & sparse(190), batch=2, heads=(2, 1), seq=(190, 190), head_dim=16)
    base, again = run(case), run(case)
    monkeypatch.setattr("flashtrain.attention.portable.launch.STREAMED_BYTES", 1)
    other = run(case)
    assert all(torch.equal(base[name], again[name]) and torch.equal(base[name], other[name]) for name in base)


@pytest.mark.parametrize("backend", ["sdpa", "standard"])
@pytest.mark.parametrize("name", ["documents_of_each_row", "causal_window", "a_gap_between_documents"])
def test_the_other_backends_keep_the_same_promises(device: torch.device, backend: str, name: str) -> None:
    rest, seq, batch = RESTS[name]
    case = make_case(device, torch.bfloat16, rest & sparse(seq), batch=batch, heads=(2, 1), seq=seq, head_dim=40)
    assert_accurate(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_takes_a_plan_with_lists(device: torch.device, backend: str) -> None:
    case = make_case(device, mask=Causal() & sparse(130), heads=(2, 1), seq=(130, 130), head_dim=16)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, case.plan, backend=backend).sin()

    for got, wanted in zip(train_step(compiled(model, device), case), train_step(model, case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_operators_with_lists_pass_pytorchs_own_check(device: torch.device) -> None:
    case = make_case(device, mask=Causal() & sparse(130), heads=(2, 1), seq=(130, 130), head_dim=16)
    arguments = (*(t.requires_grad_() for t in case.inputs()), *case.plan.limits, case.scale, "portable", False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flashtrain.attention_forward, arguments, test_utils=checks)


def _call(device: torch.device, backend: str, mask: object, batch: int = 1, heads: int = 2, seq: int = 200) -> Tensor:
    q = torch.zeros(batch, heads, seq, 16, device=device)
    return attention(q, q, q, mask, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused_by_name(device: torch.device, backend: str) -> None:
    layout = sparse(200)
    with pytest.raises(ValueError, match="heads=2 and q has num_heads=4"):
        _call(device, backend, Causal() & layout, heads=4)
    with pytest.raises(ValueError, match="is for 200 queries and 200 keys, and there are 256 and 256"):
        _call(device, backend, layout, seq=256)
    with pytest.raises(ValueError, match="the plan is for 200 queries and 200 keys, q has 192"):
        _call(device, backend, lower(layout, 1, 200, 200, device), seq=192)
    documents = Documents(((200,), (100, 100)))
    with pytest.raises(ValueError, match="the plan is for 2 rows and the batch has 3"):
        _call(device, backend, lower(layout & documents, 2, 200, 200, device), batch=3)


def test_a_layout_inside_a_compiled_model_says_where_to_lower_it(device: torch.device) -> None:
    layout = sparse(200)
    with pytest.raises(Exception, match="lower a block layout outside the compiled model"):
        compiled(lambda q, k, v: attention(q, k, v, layout, backend="portable"), device)(
            *make_case(device, heads=(2, 2), seq=(200, 200), head_dim=16).inputs()
        )
