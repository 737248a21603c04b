import pytest
import torch

from flashtrain.models.generate import generate


def run(model, prompt, count, seed=0, plan_for=lambda length: None, **options):
    generator = torch.Generator().manual_seed(seed)
    return generate(model, prompt, count, generator=generator, plan_for=plan_for, **options)


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

    def plan_for(length):
        lengths.append(length)

    plain = run(model, [1, 2, 3], 30)
    assert run(model, [1, 2, 3], 30, plan_for=plan_for, round_to=8) == plain
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
    model = make_gpt(seq_len=8)
    ids = run(model, list(range(6)), 5, plan_for=lambda length: lengths.append(length))
    assert len(ids) == 11
    assert lengths == [6, 7, 8, 8, 8]


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
