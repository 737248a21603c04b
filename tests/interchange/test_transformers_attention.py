"""attn_implementation="flashtrain" gives what transformers' own attention gives."""

from __future__ import annotations

import pytest
import torch

from flashtrain.interchange import transformers_attention
from flashtrain.interchange.transformers_masks import plan_of

from .conftest import VOCAB, transformers

KINDS = ["gpt2", "llama", "mistral", "gemma3"]
PACKED = torch.stack((torch.cat([torch.arange(n) for n in (13, 1, 17, 9)]), torch.arange(40)))


@pytest.fixture(autouse=True)
def registered():
    transformers_attention.register()


@pytest.fixture
def pair(make_theirs):
    """The same model with transformers' plain attention and with ours."""

    def make(kind, **changes):
        theirs, ours = make_theirs(kind, **changes), make_theirs(kind, "flashtrain", **changes)
        assert ours.config._attn_implementation == "flashtrain"
        return theirs, ours

    return make


def padding(*sides):
    """bool-like [rows, 40]; each side is (padding before, padding behind)."""
    mask = torch.ones(len(sides), 40, dtype=torch.int64)
    for row, (before, behind) in enumerate(sides):
        mask[row, :before] = 0
        mask[row, 40 - behind :] = 0
    return mask


def loss_and_gradients(model, tokens, **arguments):
    real = arguments.get("attention_mask", torch.ones_like(tokens)).bool()
    # Nor is the first token to be predicted, from padding: what that sees differs among transformers' own ways too.
    labels = tokens.masked_fill(~(real & real.roll(1, -1)), -100)
    out = model(tokens, labels=labels, use_cache=False, **arguments)
    out.loss.backward()
    return out.logits, {name: parameter.grad for name, parameter in model.named_parameters()}


CALLS = {
    "causal": {},
    "packed": {"position_ids": PACKED},
    "padding behind": {"attention_mask": padding((0, 12), (0, 0))},
    "padding before": {"attention_mask": padding((12, 0), (3, 0))},
    "padding on both sides": {"attention_mask": padding((5, 6), (0, 39))},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_those_of_eager_attention(pair, tokens, kind, call):
    theirs, ours = pair(kind)
    wanted, wanted_gradients = loss_and_gradients(theirs, tokens, **CALLS[call])
    got, gradients = loss_and_gradients(ours, tokens, **CALLS[call])
    real = CALLS[call].get("attention_mask", torch.ones_like(tokens)).bool()
    assert (got - wanted)[real].abs().max() < 1e-5
    for name, gradient in wanted_gradients.items():
        assert torch.allclose(gradients[name], gradient, atol=1e-5), name


def test_packed_sequences_do_not_see_each_other(pair, tokens):
    _, ours = pair("mistral")
    changed = tokens.clone()
    changed[0, 12] = (tokens[0, 12] + 1) % VOCAB
    with torch.no_grad():
        calls = [ours(t, position_ids=PACKED, use_cache=False).logits for t in (tokens, changed)]
    assert torch.equal(calls[0][0, 13:], calls[1][0, 13:])
    assert not torch.equal(calls[0][0, 12], calls[1][0, 12])


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_growing_cache_gives_the_same_tokens(pair, tokens, kind):
    outs = [
        model.generate(
            tokens, attention_mask=padding((12, 0), (0, 0)), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        for model in pair(kind)
    ]
    assert torch.equal(*outs)


def test_an_encoder_that_sees_both_ways_gives_the_same(tokens):
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48, vocab_size=VOCAB
    )
    torch.manual_seed(0)
    ours = transformers.BertModel(config, add_pooling_layer=False).eval()
    mask = padding((3, 4), (0, 0))
    with torch.no_grad():
        wanted = ours(tokens, attention_mask=mask).last_hidden_state
        transformers_attention.use(ours)
        assert ours.config._attn_implementation == "flashtrain"
        assert (ours(tokens, attention_mask=mask).last_hidden_state - wanted).abs().max() < 1e-5


def test_twenty_training_steps_have_the_losses_of_sdpa(make_theirs):
    batches = torch.randint(3, VOCAB, (4, 2, 40), generator=torch.Generator().manual_seed(3)).repeat(5, 1, 1)

    def losses(attention):
        model = make_theirs("llama", attention).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        told = []
        for tokens in batches:
            loss = model(tokens, labels=tokens, position_ids=PACKED, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        return torch.tensor(told)

    ours, theirs = losses("flashtrain"), losses("sdpa")
    assert theirs[-1] < theirs[0] - 0.1
    assert (ours - theirs).abs().max() < 1e-4


def test_gradient_checkpointing_gives_the_same_gradients(pair, tokens):
    _, plain = pair("llama")
    _, wanted = loss_and_gradients(plain, tokens)
    _, ours = pair("llama")
    ours.gradient_checkpointing_enable()
    _, got = loss_and_gradients(ours.train(), tokens)
    assert all(torch.allclose(got[name], gradient, atol=1e-6) for name, gradient in wanted.items())


def test_a_compiled_model_gives_the_same(pair, tokens):
    _, ours = pair("mistral", num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        for arguments in ({"position_ids": PACKED}, {"position_ids": PACKED.flip(0)}):
            wanted = ours(tokens, use_cache=False, **arguments).logits
            assert (compiled(tokens, use_cache=False, **arguments).logits - wanted).abs().max() < 1e-5


class TestRefused:
    """What our attention has not is an error, never a wrong result."""

    def test_padding_in_the_middle(self, pair, tokens):
        mask = padding((0, 0), (0, 0))
        mask[0, 20] = 0
        with pytest.raises(ValueError, match="hides tokens in the middle of a row"):
            pair("llama")[1](tokens, attention_mask=mask)

    def test_a_mask_as_a_tensor(self, pair, tokens):
        mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
        with pytest.raises(ValueError, match=r"a mask given as a tensor of shape \(2, 1, 40, 40\)"):
            pair("llama")[1](tokens, attention_mask=mask)

    def test_dropout(self, pair, tokens):
        with pytest.raises(ValueError, match=r"dropout=0\.1 .*attn_pdrop"):
            pair("gpt2", attn_pdrop=0.1)[1].train()(tokens)

    def test_capped_scores(self, tokens):
        from .conftest import LLAMA

        config = transformers.Gemma2Config(**LLAMA, head_dim=16)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashtrain")
        with pytest.raises(ValueError, match="softcap is not supported"):
            model(tokens)

    def test_a_cache_of_fixed_size(self, pair, tokens):
        with pytest.raises(ValueError, match="cache of fixed size"):
            pair("llama")[1].generate(tokens, max_new_tokens=2, cache_implementation="static", pad_token_id=0)

    def test_a_part_of_a_mask_that_is_not_known(self):
        from transformers.masking_utils import and_masks, causal_mask_function

        def own(batch, head, query, key):
            return key % 2 == 0

        for function in (own, and_masks(causal_mask_function, own)):
            with pytest.raises(ValueError, match=r"has a part .*own"):
                plan_of(1, 8, 8, 0, 0, function, None, torch.device("cpu"))

    def test_a_known_part_that_means_something_else(self, monkeypatch):
        from transformers import masking_utils

        def one_less(batch, head, query, key):
            return key < query

        one_less.__module__, one_less.__qualname__ = masking_utils.__name__, "causal_mask_function"
        with pytest.raises(ValueError, match="composes its masks in a way that is not understood"):
            plan_of(1, 8, 8, 0, 0, one_less, None, torch.device("cpu"))

    def test_lengths_of_packed_sequences_without_their_positions(self, pair, tokens):
        lengths = torch.tensor([0, 40, 80], dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seq_lens_q without packed position_ids"):
            pair("llama")[1](tokens, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
