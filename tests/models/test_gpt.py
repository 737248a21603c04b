import copy
import math
import time

import pytest
import torch
import torch.nn.functional as F

from flashtrain.models.gpt import GPT
from flashtrain.models.loss import cross_entropy_sum
from flashtrain.models.positions import rotary_frequencies, rotate, rotation

GPT2_SIZES = {  # (layers, heads, hidden size): parameters at 1,024 positions, as counted in GPT-2's released weights
    (12, 12, 768): 124_439_808,
    (24, 16, 1024): 354_823_168,
    (36, 20, 1280): 774_030_080,
    (48, 25, 1600): 1_557_611_200,
}


def random_tokens(batch: int, seq: int, vocab: int = 257) -> torch.Tensor:
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(7))


def mean_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model(tokens[:, :-1])
    loss, count = cross_entropy_sum(hidden, model.head_weight, tokens[:, 1:], chunk_tokens=100)
    return loss / count


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("size", "count"), GPT2_SIZES.items())
def test_gpt2_sizes_have_the_published_parameter_counts(make_config, size, count):
    layers, heads, hidden = size
    config = make_config(num_layers=layers, num_heads=heads, hidden_size=hidden)
    with torch.device("meta"):
        model = GPT(config, 50_257, 1024, attend=None)
    assert model.num_parameters == count
    assert model.parameter_counts() == {
        "total": count,
        "without_position_table": count - 1024 * hidden,
        "embedding": 50_257 * hidden,
    }


@pytest.mark.parametrize("hidden", [768, 1024, 1280, 1600])
@pytest.mark.parametrize("modern", [False, True])
def test_first_loss_is_ln_vocab_at_every_gpt2_width(make_gpt, hidden, modern):
    heads = {"num_heads": hidden // 64, "num_kv_heads": None}
    model = make_gpt(vocab_size=50_257, hidden_size=hidden, modern=modern, **heads)
    with torch.no_grad():
        loss = mean_loss(model, random_tokens(2, 65, 50_257))
    assert abs(loss.item() / math.log(50_257) - 1) < 0.02


@pytest.mark.parametrize("hidden", [64, 128, 384, 768])
@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_first_loss_is_ln_vocab_for_bytes(make_gpt, hidden, modern, tied):
    model = make_gpt(hidden_size=hidden, modern=modern, tie_embeddings=tied)
    with torch.no_grad():
        loss = mean_loss(model, random_tokens(16, 65))
    assert abs(loss.item() / math.log(257) - 1) < 0.02


@pytest.mark.parametrize("assign", [False, True])
def test_tied_head_is_the_embedding_after_loading_and_moving(make_gpt, assign):
    model, other = make_gpt(), make_gpt(seed=1)
    count = model.num_parameters
    model.load_state_dict(other.state_dict(), assign=assign)
    model = copy.deepcopy(model).to(torch.bfloat16)
    assert model.head_weight.data_ptr() == model.token_embedding.weight.data_ptr()
    assert model.num_parameters == count
    assert torch.equal(model.head_weight, other.token_embedding.weight.to(torch.bfloat16))


def test_untied_head_is_a_matrix_of_its_own(make_gpt):
    tied, untied = make_gpt(), make_gpt(tie_embeddings=False)
    assert untied.num_parameters == tied.num_parameters + 257 * 32
    assert untied.head_weight is untied.head.weight


def test_residual_projections_start_smaller_with_depth(make_gpt):
    model = make_gpt(hidden_size=256, num_layers=8)
    for block in model.blocks:
        assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not block.mlp.up.bias.any()


@pytest.mark.parametrize("modern", [False, True])
def test_later_tokens_never_change_earlier_hidden_states(make_gpt, modern):
    model = make_gpt(modern=modern).eval()
    tokens = random_tokens(1, 24)
    before = model(tokens)
    for changed in (1, 12, 23):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 257
        after = model(other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed:], after[:, changed:])


def test_rotary_scores_depend_on_distance_alone_far_out_too():
    frequencies = rotary_frequencies(64, 10_000.0, torch.device("cpu"))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64).unbind(0)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, rotation(torch.tensor([p]), frequencies)) for x, p in ((q, query_position), (k, key_position))
        ]
        return (turned[0] * turned[1]).sum().item()

    for distance in (0, 1, 77, 1000):
        for start in (1, 4096, 1_000_003):
            assert score(start + distance, start) == pytest.approx(score(distance, 0), abs=1e-4)
    assert abs(score(1, 0) - score(0, 0)) > 1e-2


def test_rotary_angles_come_from_the_given_positions(make_gpt):
    model, without = make_gpt(modern=True), make_gpt(modern=True, positions="none")
    tokens = random_tokens(2, 12)
    torch.testing.assert_close(model(tokens, None, torch.full((2, 12), 5)), without(tokens))
    counted = torch.arange(12).expand(2, -1)
    assert torch.equal(model(tokens, None, counted), model(tokens))
    spread = torch.stack([torch.arange(12), 3 * torch.arange(12)])
    out = model(tokens, None, spread)
    torch.testing.assert_close(out[0], model(tokens)[0])
    assert (out[1] - model(tokens)[1]).abs().max() > 1e-4


@pytest.mark.parametrize("modern", [False, True])
def test_a_packed_row_equals_its_documents_run_one_by_one(make_gpt, modern):
    model = make_gpt(modern=modern)
    documents = [random_tokens(1, 18)[:, a:b] for a, b in ((0, 7), (7, 8), (8, 18))]
    lengths = torch.tensor([d.shape[1] for d in documents])
    owner = torch.repeat_interleave(torch.arange(3), lengths)
    mask = (owner[:, None] == owner[None, :]) & torch.ones(18, 18, dtype=torch.bool).tril()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]

    packed = model(torch.cat(documents, dim=1), mask, positions)
    packed.square().sum().backward()
    from_packed = gradients(model)
    model.zero_grad()
    alone = torch.cat([model(d) for d in documents], dim=1)
    alone.square().sum().backward()

    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(from_packed[name], gradient, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_grouped_heads_equal_their_keys_and_values_repeated(make_gpt):
    grouped = make_gpt(modern=True)
    full = make_gpt(modern=True, num_kv_heads=4)
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith("qkv.weight")]:
        q, k, v = state[name].unflatten(0, (-1, 8)).split([4, 2, 2])
        state[name] = torch.cat([q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)]).flatten(0, 1)
    full.load_state_dict(state)
    tokens = random_tokens(2, 20)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_layers_may_have_plans_of_their_own(make_gpt):
    seen = []

    def attend(q, k, v, plan):
        seen.append(plan)
        return q

    model = make_gpt(attend=attend)
    model(random_tokens(1, 4), ["first", "second"])
    model(random_tokens(1, 4), "both")
    assert seen == ["first", "second", "both", "both"]
    with pytest.raises(ValueError, match=r"3 plans for model\.num_layers=2"):
        model(random_tokens(1, 4), [None, None, None])


def test_sequence_beyond_the_position_table_names_both_lengths_and_the_key(make_gpt):
    with pytest.raises(ValueError, match=r"65 tokens .* table of 64.*seq_len=65"):
        make_gpt()(random_tokens(1, 65))
    assert make_gpt(modern=True)(random_tokens(1, 65)).shape == (1, 65, 32)


def test_positions_can_be_left_out(make_gpt):
    model = make_gpt(positions="none")
    assert model.position_embedding is None
    tokens = random_tokens(1, 8).repeat(1, 9)
    assert model(tokens).shape == (1, 72, 32)


@pytest.mark.parametrize("modern", [False, True])
def test_autocast_hands_attention_one_low_precision_dtype(make_gpt, modern):
    seen = []

    def attend(q, k, v, plan):
        seen.append({q.dtype, k.dtype, v.dtype})
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model = make_gpt(modern=modern, attend=attend)
    tokens = random_tokens(4, 64)
    exact = mean_loss(model, tokens)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(model, tokens)
    loss.backward()
    assert seen == [{torch.bfloat16}] * 2
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.01
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@pytest.mark.parametrize("modern", [False, True])
def test_bf16_weights_run_without_autocast(make_gpt, modern):
    model = make_gpt(modern=modern)
    tokens = random_tokens(4, 64)
    exact = mean_loss(model, tokens)
    model.to(torch.bfloat16)
    loss = mean_loss(model, tokens)
    loss.backward()
    assert model(tokens).dtype == torch.bfloat16
    assert abs(loss - exact) < 0.02


def test_rotary_angles_stay_exact_in_a_bf16_model(make_gpt):
    angles = []

    def attend(q, k, v, plan):
        angles.append(torch.atan2(q[0, 0, :, 4], q[0, 0, :, 0]))
        return q

    model = make_gpt(positions="rope", bias=True, attend=attend).to(torch.bfloat16)
    qkv = model.blocks[0].attention.qkv
    qkv.weight.data.zero_()
    qkv.bias.data.zero_()
    qkv.bias.data[0] = 1.0  # the first pair points along its first axis, and the fastest frequency is 1 radian
    model(random_tokens(1, 4096))
    expected = torch.arange(4096).double().cos().bfloat16(), torch.arange(4096).double().sin().bfloat16()
    difference = angles[0].float() - torch.atan2(expected[1], expected[0]).float()
    assert torch.remainder(difference + math.pi, 2 * math.pi).sub(math.pi).abs().max() < 0.02


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_model_compiles_as_one_graph(make_gpt, modern, checkpoint_blocks):
    torch._dynamo.reset()
    model = make_gpt(modern=modern)
    model.checkpoint_blocks = checkpoint_blocks
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = random_tokens(2, 16)
    restarted = torch.arange(16).remainder(10).expand(2, -1)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    for arguments in ((tokens,), (tokens, mask, restarted)):
        expected = model(*arguments)
        expected.sum().backward()
        reference = gradients(model)
        model.zero_grad()
        out = compiled(*arguments)
        out.sum().backward()
        torch.testing.assert_close(out, expected)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, reference[name])
        model.zero_grad()


@pytest.mark.parametrize("modern", [False, True])
def test_checkpointed_blocks_give_the_same_loss_and_gradients_with_dropout(make_gpt, modern):
    model = make_gpt(modern=modern, dropout=0.2)
    tokens = random_tokens(2, 33)
    results = []
    for model.checkpoint_blocks in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        loss = mean_loss(model, tokens)
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def test_checkpointed_blocks_keep_less_for_the_backward_pass(make_gpt):
    model = make_gpt()
    tokens = random_tokens(2, 33)

    def kept() -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(tokens)
        return sum(sizes)

    plain = kept()
    model.checkpoint_blocks = True
    assert kept() < plain / 4


def test_dropout_acts_in_training_only(make_gpt):
    model = make_gpt(dropout=0.5)
    tokens = random_tokens(2, 16)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    without = make_gpt(dropout=0.0).eval()
    torch.testing.assert_close(model(tokens), without(tokens))


@pytest.mark.parametrize("modern", [False, True])
def test_a_tiny_model_memorises_one_batch(make_gpt, modern):
    model = make_gpt(modern=modern, hidden_size=64)
    tokens = random_tokens(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.monotonic()
    for _ in range(300):
        loss = mean_loss(model, tokens)
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    assert time.monotonic() - start < 60
