"""FlashAttention's signatures against the definition, written out."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashtrain.interchange import flash_attn
from flashtrain.interchange.flash_attn import flash_attn_func, flash_attn_varlen_func

WINDOWS = [(-1, -1), (3, 0), (2, 4), (-1, 2), (5, -1)]
LENGTHS = [(24, 24), (9, 24), (24, 9), (1, 24)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).requires_grad_()


def by_definition(q, k, v, scale=None, causal=False, window=(-1, -1)):
    """out [seq_q, heads, dim] and lse [heads, seq_q] of one sequence, one query at a time."""
    seq_q, heads, dim = q.shape
    group, shift = heads // k.shape[1], len(k) - len(q)
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    rows, sums = [], []
    for i in range(seq_q):
        at = i + shift
        keys = [j for j in range(len(k)) if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)]
        scores = torch.einsum("hd,khd->hk", q[i], k[keys].repeat_interleave(group, 1)) * (scale or dim**-0.5)
        sums.append(scores.logsumexp(-1))
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[keys].repeat_interleave(group, 1)))
    return torch.stack(rows), torch.stack(sums, -1)


def assert_same(got, wanted, inputs):
    """Values and gradients."""
    weight = draw(*wanted.shape, seed=9).detach()
    assert torch.allclose(got, wanted, atol=1e-5)
    gradients = torch.autograd.grad((got * weight).sum(), inputs, retain_graph=True)
    for one, other in zip(gradients, torch.autograd.grad((wanted * weight).sum(), inputs), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_batches_with_other_numbers_of_keys_than_queries_windows_and_grouped_heads(lengths, causal, window):
    seq_q, seq_k = lengths
    q, k, v = draw(2, seq_q, 4, 8), draw(2, seq_k, 2, 8, seed=1), draw(2, seq_k, 2, 8, seed=2)
    got = flash_attn_func(q, k, v, softmax_scale=0.4, causal=causal, window_size=window)
    wanted = torch.stack([by_definition(q[b], k[b], v[b], 0.4, causal, window)[0] for b in range(2)])
    assert got.shape == q.shape
    assert_same(got, wanted, (q, k, v))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_different_lengths(causal, window):
    q_lengths, k_lengths = (7, 1, 12, 5), (7, 9, 4, 11)
    q, k, v = draw(25, 4, 8), draw(31, 2, 8, seed=1), draw(31, 2, 8, seed=2)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (q_lengths, k_lengths))
    out, lse, nothing = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 12, 11, causal=causal, window_size=window, return_attn_probs=True
    )
    own = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    wanted = [by_definition(*each, None, causal, window) for each in own]
    assert nothing is None
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 25), torch.float32)
    assert_same(out, torch.cat([each[0] for each in wanted]), (q, k, v))
    assert torch.allclose(lse, torch.cat([each[1] for each in wanted], -1), atol=1e-5)
    plain = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 11, causal=causal, window_size=window)
    assert torch.allclose(plain, out, atol=1e-5)


def test_the_lse_comes_where_the_original_returns_it():
    q, k, v = draw(2, 6, 4, 8), draw(2, 9, 4, 8, seed=1), draw(2, 9, 4, 8, seed=2)
    out, lse, nothing = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert nothing is None
    assert torch.allclose(lse[1], by_definition(q[1], k[1], v[1], causal=True)[1], atol=1e-5)
    assert torch.allclose(out, flash_attn_func(q, k, v, causal=True), atol=1e-5)


def test_a_query_that_sees_nothing_gives_zero():
    out = flash_attn_func(draw(1, 5, 2, 8), draw(1, 3, 2, 8, seed=1), draw(1, 3, 2, 8, seed=2), causal=True)
    assert not out[:, :2].any()
    assert out[:, 2:].all()


def test_arguments_stand_in_the_order_of_the_original():
    names = ["q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"]
    names += ["deterministic", "return_attn_probs"]
    assert list(inspect.signature(flash_attn_func).parameters) == names
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert list(inspect.signature(flash_attn_varlen_func).parameters) == [
        *names[:3],
        *lengths,
        *names[3:],
        "block_table",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout_p", 0.1), ("softcap", 30.0), ("alibi_slopes", torch.zeros(4)), ("block_table", torch.zeros(1, 1))],
)
def test_an_argument_that_is_not_supported_is_named(name, value):
    q, lengths = draw(6, 4, 8), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name}=.*leave {name} at its default"):
        flash_attn_varlen_func(q, q, q, lengths, lengths, 6, 6, **{name: value})
    if name != "block_table":
        with pytest.raises(ValueError, match=name):
            flash_attn_func(q[None], q[None], q[None], **{name: value})


def test_other_layouts_and_lengths_are_refused():
    q = draw(6, 4, 8)
    with pytest.raises(ValueError, match=r"\[batch, seq, heads, head_dim\]; got \(6, 4, 8\)"):
        flash_attn_func(q, q, q)
    with pytest.raises(ValueError, match="adds up to 5 tokens and the sequence has 6"):
        wrong = torch.tensor([0, 5])
        flash_attn_varlen_func(q, q, q, wrong, wrong, 5, 5)


def test_lengths_are_read_once_for_all_layers_and_again_when_they_change(monkeypatch):
    calls = []
    lower = flash_attn.lower
    monkeypatch.setattr(flash_attn, "lower", lambda *arguments: calls.append(arguments) or lower(*arguments))
    q, lengths = draw(6, 4, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    first = [flash_attn_varlen_func(q, q, q, lengths, lengths, 4, 4, causal=True) for _ in range(3)]
    assert len(calls) == 1
    assert torch.equal(first[0], first[2])
    lengths[1] = 3
    assert not torch.equal(flash_attn_varlen_func(q, q, q, lengths, lengths, 4, 4, causal=True), first[0])
    flash_attn_varlen_func(q, q, q, lengths, lengths, 4, 4)
    assert len(calls) == 3
