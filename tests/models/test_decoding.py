"""New tokens by steps of fixed shapes: the tokens of a model without a cache, on a GPU by a CUDA graph."""

import logging
from functools import partial

import pytest
import torch

from flashtrain.attention import Causal, Documents, SlidingWindow, attention, layouts, lower
from flashtrain.models.cache import Cache
from flashtrain.models.decoding import PieceBounds, decoding_attention, piece_of
from flashtrain.models.graphed import OneToken, why_not
from tests.models.generating import PARTS, plan, run, sharp


def window_for(queries, keys, device="cpu"):
    return lower(Causal() & SlidingWindow(9, 0), 1, queries, keys, device)


def in_turn_for(queries, keys, device="cpu"):
    return [window_for(queries, keys, device), plan(queries, keys, device)]


ANY = {"temperature": 1.0, "top_k": None}  # no token is so likely that a wrong model would draw it too
SEEN = {"causal": plan, "window": window_for, "in turn": in_turn_for}


@pytest.fixture
def make_gpt(make_gpt):
    return lambda **parts: sharp(make_gpt(attend=decoding_attention, **parts))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("flashtrain.models.decoding.PIECE", 8)
    monkeypatch.setattr("flashtrain.models.decoding.SHORTEST", 8)


@pytest.fixture
def shapes(monkeypatch, small_pieces):
    """The shapes of the keys that attention gets, with pieces of 8 keys."""
    found = []

    def watched(q, k, v, *rest, **options):
        found.append(tuple(k.shape[:3]))
        return attention(q, k, v, *rest, **options)

    monkeypatch.setattr("flashtrain.models.decoding.attention", watched)
    return found


def prompt_of(length, seed=1):
    return torch.randint(257, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 17])
def test_steps_of_fixed_shapes_write_the_same_tokens(make_gpt, shapes, parts, length):
    model = make_gpt(seq_len=36, **PARTS[parts])
    # Beyond 36 tokens the context moves on, and all of it is read again.
    plain = run(model, prompt_of(length), 40, cached=False, **ANY)
    shapes.clear()
    assert run(model, prompt_of(length), 40, prefill_tokens=5, graphed=True, **ANY) == plain
    assert len(set(plain)) > 10
    steps = [shape for shape in shapes if shape[0] > 1]
    assert len(steps) == 2 * (36 - length)  # two layers
    assert set(steps) == {(5, model.blocks[0].attention.heads[1], 8)}


@pytest.mark.parametrize("seen", ["window", "in turn"])
@pytest.mark.parametrize("modern", [False, True])
def test_windows_of_each_layer_hold_at_fixed_shapes(make_gpt, shapes, seen, modern):
    model = make_gpt(seq_len=48, modern=modern)
    plain = run(model, [1, 2, 3], 40, plan_for=SEEN[seen], cached=False, **ANY)
    shapes.clear()
    assert run(model, [1, 2, 3], 40, plan_for=SEEN[seen], graphed=True, **ANY) == plain
    assert shapes.count((6, 2 if modern else 4, 8)) == 2 * 39
    assert run(model, [1, 2, 3], 40, graphed=True, **ANY) != plain


@pytest.fixture
def compiled_graphs(monkeypatch):
    """What torch.compile makes of the steps, run as it is: fusing is the library's affair, and slow."""
    found = []

    def counted(graph, inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("parts", ["learned", "rope and grouped heads"])
def test_compiled_steps_write_the_same_tokens_and_are_compiled_once(make_gpt, small_pieces, compiled_graphs, parts):
    model = make_gpt(seq_len=36, **PARTS[parts])
    for length in (3, 9):
        plain = run(model, prompt_of(length), 40, cached=False, **ANY)
        assert run(model, prompt_of(length), 40, graphed=True, compiled=True, **ANY) == plain
    # One graph of the whole model, without a break; the second text has a cache as large as the first one's.
    assert len(compiled_graphs) == 1
    assert str(compiled_graphs[0].code).count("index_copy_") == 2 * 2  # keys and values of two layers


def test_caches_of_any_size_share_what_was_compiled(make_gpt, small_pieces, compiled_graphs):
    model = make_gpt(seq_len=200, modern=True)
    for length in (3, 20, 180):
        plain = run(model, prompt_of(length), 9)
        assert run(model, prompt_of(length), 9, graphed=True, compiled=True) == plain
    assert len(compiled_graphs) == 2  # for one size, and for any


KERNELS = [
    ("standard", torch.float32),
    ("portable", torch.float32),
    pytest.param("auto", torch.bfloat16, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("backend", "dtype"), KERNELS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("left", [0, 5, 8, 2**30])
def test_a_token_sees_its_keys_and_nothing_of_what_lies_behind_them(device, monkeypatch, backend, dtype, heads, left):
    monkeypatch.setattr("flashtrain.models.decoding.attention", partial(attention, backend=backend))
    generator = torch.Generator().manual_seed(left)
    q = torch.randn(1, heads[0], 1, 64, generator=generator).to(device, dtype)
    k, v = (torch.randn(1, heads[1], 40, 64, generator=generator).to(device, dtype) for _ in range(2))
    bounds = PieceBounds(left, 40, 8, heads[0] // heads[1], device)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    for position in (0, 1, 6, 7, 8, 9, 23, 24, 38, 39):
        end = position + 1
        keys, values = k.clone(), v.clone()
        keys[:, :, end:], values[:, :, end:] = float("nan"), 1e30
        found = decoding_attention(q, keys, values, bounds.at(torch.tensor([position], device=device)))
        mask = Causal() & SlidingWindow(left, 0)
        expected = attention(q.float(), k[:, :, :end].float(), v[:, :, :end].float(), mask, backend="standard")
        torch.testing.assert_close(found, expected.to(dtype), **near)


def test_memory_that_holds_anything_harms_no_token(make_gpt, shapes):
    model = make_gpt(seq_len=64, modern=True)
    plain = run(model, [1, 2, 3], 20, graphed=True)
    torch.use_deterministic_algorithms(True)  # memory that nothing is written to yet is NaN then
    try:
        assert torch.empty(2).isnan().all()
        assert run(model, [1, 2, 3], 20, graphed=True) == plain
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cache_goes_on_behind_steps_of_fixed_shapes_and_has_an_end(make_gpt, shapes):
    model, tokens = make_gpt(seq_len=64, modern=True).eval(), prompt_of(24)
    cache = Cache(2, 24)
    model.read(torch.tensor([tokens[:6]]), cache, plan(6, 6))
    step = OneToken(model, cache, 8, [plan(1, 7)] * 2)
    logits = [step(token).clone() for token in tokens[6:12]]
    assert cache.length == 12
    rest = model.read(torch.tensor([tokens[12:23]]), cache, plan(11, 23))[0]
    last = step(tokens[23])
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([tokens]), plan(24, 24)))[0]
        found = torch.cat((torch.stack(logits), model.logits(rest), last[None]))
    torch.testing.assert_close(found, expected[6:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="cache of 24 tokens holds 24, and 1 more do not fit"):
        step(0)


def documents_for(queries, keys):
    return lower(Causal() & Documents([[queries]], [[keys]]), 1, queries, keys, "cpu")


def test_where_there_is_no_graph_the_log_says_why_and_the_tokens_are_the_same(make_gpt, shapes, caplog):
    model = make_gpt(seq_len=64)
    plain = run(model, [1, 2, 3], 12)

    def told(count=12, plan_for=plan):
        caplog.clear()
        with caplog.at_level(logging.INFO, "flashtrain.models"):
            assert run(model, [1, 2, 3], count, plan_for=plan_for, graphed=True) == plain[: 3 + count]
        return [record.getMessage() for record in caplog.records]

    assert told() == []
    assert told(count=7) == ["no CUDA graph for fewer than 8 tokens"]
    (line,) = told(plan_for=documents_for)
    assert "not causal" in line
    model.attend_by(attention)
    (line,) = told()
    assert "another function" in line
    model.attend_by(decoding_attention)
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(model, [1, 2, 3], 12)
        (line,) = told()
    assert "autocast" in line
    with pytest.raises(ValueError, match="graphed=True with cached=False"):
        run(model, [1], 9, cached=False, graphed=True)
    with pytest.raises(ValueError, match="compiled=True with graphed=False"):
        run(model, [1], 9, compiled=True)


@pytest.mark.parametrize("mask", [None, SlidingWindow(4), Causal() & layouts.butterfly(4)])
def test_a_layer_that_is_not_causal_or_has_a_block_layout_keeps_its_own_way(make_gpt, mask):
    model = make_gpt()
    assert why_not(model, [plan(1, 4), window_for(1, 4)]) is None
    assert "not causal" in why_not(model, [plan(4, 4), lower(mask, 1, 4, 4, "cpu")])


def test_pieces_are_as_long_as_leaves_a_gpu_enough_of_them():
    assert [piece_of(1024 * k, 12) for k in (1, 4, 16, 32, 64, 1024)] == [256, 256, 512, 1024, 2048, 2048]
    assert piece_of(16 * 1024, 2) == 256


@pytest.fixture
def replays(monkeypatch, caplog):
    """Launches of CUDA graphs; nothing may have been logged in their place."""
    launched, replay = [], torch.cuda.CUDAGraph.replay

    def counted(graph):
        launched.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    yield launched
    assert not [record for record in caplog.get_records("call") if record.name.startswith("flashtrain.models")]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("modern", [False, True])
def test_a_graph_writes_the_same_tokens(make_gpt, replays, seen, modern, compiled):
    model = make_gpt(modern=modern, seq_len=2048, hidden_size=256).cuda()
    options = {"plan_for": partial(SEEN[seen], device="cuda"), **ANY}
    # Across the border of a piece, which is 256 keys long here; the second text needs a graph of its own.
    for number, length in enumerate((230, 505)):
        plain = run(model, prompt_of(length, seed=number), 60, cached=False, **options)
        assert len(set(plain[length:])) > 10
        replays.clear()
        assert run(model, prompt_of(length, seed=number), 60, graphed=True, compiled=compiled, **options) == plain
        assert len(replays) == 59
        assert run(model, prompt_of(length, seed=number), 60, **options) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("modern", [False, True])
def test_logits_of_a_graph_are_those_of_steps_one_by_one_in_bfloat16(make_gpt, replays, modern, compiled):
    model = make_gpt(modern=modern, seq_len=1024, hidden_size=256).cuda().bfloat16().eval()
    tokens, caches = prompt_of(540), [Cache(2, 768) for _ in range(2)]
    for cache in caches:
        model.read(torch.tensor([tokens[:500]], device="cuda"), cache, plan(500, 500, "cuda"))
    step = OneToken(model, caches[0], 256, [plan(1, 501, "cuda")] * 2, compiled)
    for length, token in enumerate(tokens[500:], 501):
        found = step(token)
        hidden = model.read(torch.tensor([[token]], device="cuda"), caches[1], plan(1, length, "cuda"))
        with torch.no_grad():
            expected = model.logits(hidden[0, 0]).float()
        assert (found - expected).norm() <= 0.02 * expected.norm()
    assert len(replays) == 40
