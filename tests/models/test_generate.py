from functools import partial

import pytest
import torch

from flashtrain.attention import Causal, SlidingWindow, attention, lower
from flashtrain.models.cache import Cache
from flashtrain.models.decoding import decoding_attention, one_query
from flashtrain.models.generate import Sampling, sample
from tests.models.generating import PARTS, plan, run, sharp


@pytest.fixture
def make_gpt(make_gpt):
    return partial(make_gpt, attend=attention)


def test_sampling_is_a_function_of_the_generator(make_gpt):
    model = make_gpt()
    first = run(model, [1, 2, 3], 20)
    torch.rand(5)  # the global generator plays no part
    assert run(model, [1, 2, 3], 20) == first
    assert run(model, [1, 2, 3], 20, seed=1) != first
    assert first[:3] == [1, 2, 3]
    assert len(first) == 23
    assert all(0 <= token < 257 for token in first)


@pytest.mark.parametrize("modern", [False, True])
def test_filled_contexts_give_the_same_tokens_with_one_plan_for_many_steps(make_gpt, modern):
    model, lengths = make_gpt(modern=modern, seq_len=20), []

    def plan_for(queries, keys):
        lengths.append(keys)
        return plan(queries, keys)

    plain = run(model, [1, 2, 3], 30, cached=False)
    assert run(model, [1, 2, 3], 30, plan_for=plan_for, block=8, cached=False) == plain
    assert set(lengths) == {8, 16, 20}  # never beyond the model's context


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}])
def test_greedy_takes_the_most_likely_token(make_gpt, greedy):
    model = make_gpt().eval()
    ids = run(model, [5], 6, **greedy)
    for end in range(1, 7):
        with torch.no_grad():
            best = model.logits(model(torch.tensor([ids[:end]])))[0, -1].argmax()
        assert ids[end] == best


def test_top_k_keeps_to_the_likeliest_tokens(make_gpt):
    model = make_gpt()
    with torch.no_grad():
        allowed = model.logits(model(torch.tensor([[9]])))[0, -1].topk(3).indices.tolist()
    drawn = {run(model, [9], 1, seed=seed, top_k=3)[-1] for seed in range(40)}
    assert drawn == set(allowed)
    assert len({run(model, [9], 1, seed=seed, top_k=None)[-1] for seed in range(40)}) > 10


def test_context_is_cropped_to_seq_len_and_plans_follow_its_length(make_gpt):
    lengths = []

    def plan_for(queries, keys):
        lengths.append((queries, keys))
        return plan(queries, keys)

    model = make_gpt(seq_len=8)
    ids = run(model, list(range(6)), 5, plan_for=plan_for)
    assert len(ids) == 11
    assert lengths == [(6, 6), (1, 7), (1, 8), (8, 8), (8, 8)]
    assert run(model, ids[2:10], 1, seed=3)[-1] == run(model, ids[:10], 1, seed=3)[-1]


def test_dropout_is_off_while_sampling_and_back_afterwards(make_gpt):
    model = make_gpt(dropout=0.5).train()
    assert run(model, [1], 10) == run(model, [1], 10)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_empty_prompt_and_wrong_settings_are_named(make_gpt):
    model = make_gpt()
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        run(model, [], 1)
    with pytest.raises(ValueError, match="temperature=-1"):
        run(model, [1], 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k=0"):
        run(model, [1], 1, top_k=0)
    with pytest.raises(ValueError, match="top_p=0"):
        run(model, [1], 1, top_p=0)
    with pytest.raises(ValueError, match="prefill_tokens=0"):
        run(model, [1], 1, prefill_tokens=0)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.0, "top_k": None}, {"top_p": 0.9}])
@pytest.mark.parametrize("prefill_tokens", [None, 5])
def test_tokens_are_the_same_with_and_without_the_cache(make_gpt, parts, how, prefill_tokens):
    model = sharp(make_gpt(seq_len=40, **PARTS[parts]))
    prompt = torch.randint(257, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    # Beyond 40 tokens the context moves on.
    plain = run(model, prompt, 30, cached=False, **how)
    assert run(model, prompt, 30, prefill_tokens=prefill_tokens, **how) == plain
    assert len(set(plain)) > 10  # no model that says one thing only


def test_windows_hold_in_the_cache_too(make_gpt):
    model = sharp(make_gpt(modern=True, seq_len=48))

    def plan_for(queries, keys):
        return lower(Causal() & SlidingWindow(6, 0), 1, queries, keys, "cpu")

    plain = run(model, [1, 2, 3], 40, plan_for=plan_for, cached=False)
    assert run(model, [1, 2, 3], 40, plan_for=plan_for) == plain
    assert run(model, [1, 2, 3], 40) != plain


def test_hidden_states_read_in_pieces_are_those_of_one_pass(make_gpt):
    model = make_gpt(modern=True, seq_len=64).eval()
    tokens = torch.randint(257, (2, 50), generator=torch.Generator().manual_seed(2))
    cache, pieces = Cache(2, 50), []
    for piece in tokens.split([1, 30, 7, 12], dim=1):
        pieces.append(model.read(piece, cache, plan(piece.shape[1], cache.length + piece.shape[1])))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens, plan(50, 50)), atol=1e-5, rtol=1e-5)
    assert cache.num_bytes == 2 * 2 * 2 * 2 * 50 * 8 * 4  # layers, k and v, rows, kv heads, tokens, head_dim, bytes


def test_a_cached_token_costs_one_token(make_gpt):
    seen = []

    def attend(q, k, v, plan):
        seen.append((q.shape[2], k.shape[2]))
        return attention(q, k, v, plan)

    run(make_gpt(seq_len=64, attend=attend), list(range(20)), 4, prefill_tokens=8)
    assert seen[::2] == [(8, 8), (8, 16), (4, 20), (1, 21), (1, 22), (1, 23)]


@pytest.mark.parametrize("cached", [False, True])
def test_compiled_blocks_write_as_many_lengths_as_it_takes(make_gpt, cached):
    torch._dynamo.reset()
    model = make_gpt(modern=True)
    plain = run(model, [1, 2, 3], 12)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="eager")
    assert run(model, [1, 2, 3], 12, cached=cached) == plain


def test_a_token_that_ends_the_text_ends_the_stream(make_gpt):
    model = make_gpt()
    ids = run(model, [1, 2, 3], 20)
    assert run(model, [1, 2, 3], 20, stop=ids[7]) == ids[: ids.index(ids[7], 3) + 1]


def test_top_p_takes_the_fewest_tokens_that_have_its_probability():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    for top_p, allowed in ((0.01, {1}), (0.5, {1}), (0.51, {1, 3}), (0.76, {1, 3, 2}), (1.0, {0, 1, 2, 3})):
        how = Sampling(temperature=1.0, top_k=None, top_p=top_p)
        assert {sample(logits, how, generator) for _ in range(200)} == allowed


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}])
def test_sampling_that_means_nothing_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_what_does_not_fit_the_cache_or_the_positions_is_named_with_the_ways_out(make_gpt):
    tokens = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="cache of 8 tokens holds 0, and 9 more do not fit"):
        make_gpt().read(tokens, Cache(2, 8), None)
    with pytest.raises(ValueError, match=r"9 tokens .* table of 8.*position_extension=duplicate.*positions=rope"):
        make_gpt(seq_len=8).read(tokens, Cache(2, 9), plan(9, 9))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("keys", [16, 48, 61])
def test_one_query_over_keys_in_pieces_is_attention_to_all_of_them(heads, keys):
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(1, heads[0], 1, 16, generator=generator)
    k, v = (torch.randn(1, heads[1], 80, 16, generator=generator)[:, :, :keys] for _ in range(2))
    expected = attention(q, 3 * k, v, plan(1, keys))
    torch.testing.assert_close(one_query(q, 3 * k, v, piece=16), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(decoding_attention(q, k, v, plan(1, keys)), attention(q, k, v, plan(1, keys)))


@pytest.mark.gpu
@pytest.mark.parametrize("modern", [False, True])
def test_tokens_are_the_same_on_a_gpu_where_the_keys_go_in_pieces(make_gpt, modern, monkeypatch):
    monkeypatch.setattr("flashtrain.models.decoding.PIECE", 256)
    model = sharp(make_gpt(modern=modern, seq_len=2048, attend=decoding_attention, hidden_size=256)).cuda()

    def plan_for(queries, keys):
        return lower(Causal(), 1, queries, keys, "cuda")

    prompt = torch.randint(257, (1500,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = run(model, prompt, 60, plan_for=plan_for, cached=False, temperature=0)
    assert run(model, prompt, 60, plan_for=plan_for, prefill_tokens=512, temperature=0) == plain
