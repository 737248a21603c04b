"""Whatever is kept, computed again, taken to the host or cut in pieces: loss and gradients are those of keeping all."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch

from flashtrain.attention import Causal, attention, lower, op
from flashtrain.models.gpt import GPT, MLP
from flashtrain.models.loss import cross_entropy_sum
from flashtrain.models.offload import Offload
from flashtrain.models.recompute import Recompute, compile_blocks

KEEP_LESS = [
    Recompute("selective"),
    Recompute("full"),
    Recompute("selective", offload=True),
    Recompute("full", offload=True),
]
IN_PIECES = [
    Recompute("none", mlp_chunk_tokens=10),
    Recompute("selective", mlp_chunk_tokens=10),
    Recompute("full", offload=True, mlp_chunk_tokens=10),
]
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def name_of(how: Recompute) -> str:
    return f"{how.blocks}{'-offload' if how.offload else ''}{'-pieces' if how.mlp_chunk_tokens else ''}"


@pytest.fixture
def make_model(make_gpt, device):
    def make(how: Recompute | bool, backend: str = "auto", **changes: Any) -> GPT:
        model = make_gpt(attend=functools.partial(attention, backend=backend), **changes).to(device)
        model.checkpoint_blocks = how
        return model

    return make


def loss_and_gradients(model: GPT, rows: int = 2, seq_len: int = 33) -> Result:
    """Of one batch, each time with the same tokens and dropout."""
    device = model.token_embedding.weight.device
    tokens = torch.randint(257, (rows, seq_len + 1), generator=torch.Generator().manual_seed(1)).to(device)
    model.zero_grad()
    torch.manual_seed(3)
    hidden = model(tokens[:, :-1], lower(Causal(), rows, seq_len, seq_len, device))
    loss, _ = cross_entropy_sum(hidden, model.head_weight, tokens[:, 1:], chunk_tokens=16)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", KEEP_LESS, ids=name_of)
@pytest.mark.parametrize("modern", [False, True], ids=["gpt2", "modern"])
def test_every_setting_gives_the_same_loss_and_gradients_bit_for_bit_with_dropout(make_model, modern, how):
    kept, again = (loss_and_gradients(make_model(way, modern=modern, dropout=0.2)) for way in (False, how))
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(kept[1][name], gradient) for name, gradient in again[1].items())


@pytest.mark.parametrize("how", IN_PIECES, ids=name_of)
@pytest.mark.parametrize("modern", [False, True], ids=["gpt2", "modern"])
def test_an_mlp_in_pieces_gives_the_same_loss_and_gradients(make_model, modern, how):
    """10 tokens do not divide the 66 of a batch: pieces cross rows, and the last one is shorter."""
    kept, again = (loss_and_gradients(make_model(way, modern=modern)) for way in (False, how))
    torch.testing.assert_close(again[0], kept[0])
    for name, gradient in again[1].items():
        torch.testing.assert_close(gradient, kept[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("blocks", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_never_computes_attention_again_and_full_does_once(make_model, monkeypatch, blocks, times):
    model, calls = make_model(Recompute(blocks), backend="portable", head_dim=16), []
    kernels = op.kernels_of("portable")
    forward = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *inputs: calls.append(1) or forward(*inputs))
    loss, gradients = loss_and_gradients(model, rows=1, seq_len=17)
    assert len(calls) == times * len(model.blocks)
    model.checkpoint_blocks = False
    kept = loss_and_gradients(model, rows=1, seq_len=17)
    assert torch.equal(loss, kept[0])
    assert all(torch.equal(gradient, kept[1][name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("train", [True, False], ids=["training", "validation"])
def test_no_mlp_sees_more_tokens_than_a_piece_has(make_model, train):
    model, seen = make_model(Recompute("full", mlp_chunk_tokens=10)), []
    for module in model.modules():
        if isinstance(module, MLP):
            module.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[:2].numel()))
    with torch.set_grad_enabled(train):
        hidden = model(torch.zeros(2, 33, dtype=torch.int64, device=model.head_weight.device))
    if train:
        hidden.sum().backward()
    assert seen
    assert max(seen) == 10


COMPILED = [
    Recompute("selective", offload=True),
    Recompute("full", offload=True),
    Recompute("none", mlp_chunk_tokens=10),
]


@pytest.mark.parametrize("how", COMPILED, ids=name_of)
def test_compiled_blocks_share_one_graph_whatever_their_number_and_give_the_same_gradients(make_model, how):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kept = loss_and_gradients(make_model(False, num_layers=10, positions="rope"))
    model = make_model(how, num_layers=10, positions="rope")
    model.checkpoint_blocks = compile_blocks(model.blocks, how)
    loss, gradients = loss_and_gradients(model)
    torch.testing.assert_close(loss, kept[0])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, kept[1][name], rtol=1e-3, atol=1e-4)
    pieces = 3 if how.mlp_chunk_tokens else 1  # attention, and an MLP for whole and for rest pieces
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == pieces


def test_what_is_offloaded_is_not_held_on_the_device_by_what_is_saved_beside_it():
    x = torch.randn(3)
    gone, weight = weakref.ref(x), torch.randn(3, requires_grad=True)
    with Offload(torch.device("cpu")).of(x):
        loss = weight.exp().sum()  # saves something else, with the same hooks
    del x
    assert gone() is None
    loss.backward()


@pytest.mark.gpu
def test_offloaded_inputs_leave_the_gpu_and_come_back_the_same(make_model):
    """With 16 blocks of 32 MiB inputs, full checkpointing keeps 0.5 GiB, and offload three of them at most."""
    sizes = {"num_layers": 16, "hidden_size": 256, "head_dim": 64, "positions": "rope", "seq_len": 32_768}
    peaks, results = [], []
    for how in (Recompute("full"), Recompute("full", offload=True)):
        model = make_model(how, **sizes)
        loss_and_gradients(model, rows=1, seq_len=1024)  # compiles the kernels
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.zeros(1, 32_768, dtype=torch.int64, device="cuda")
        model.zero_grad()
        model(tokens, lower(Causal(), 1, 32_768, 32_768, tokens.device)).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        results.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    assert peaks[0] - peaks[1] > 12 * 32 * 2**20
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-3, atol=1e-6)
