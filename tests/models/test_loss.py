import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.models import loss as loss_module
from flashtrain.models.loss import IGNORE, cross_entropy_sum

TOKENS, WIDTH, VOCAB = 33, 16, 51

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def case(dtype: torch.dtype = torch.float64, ignored: float = 0.2, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [3, 11, WIDTH] and weight [VOCAB, WIDTH], leaves that require grad, and targets with ignored ones."""
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(3, 11, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (3, 11), generator=generator)
    targets[torch.rand(3, 11, generator=generator) < ignored] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        (hidden @ weight.t()).flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 33, 1000])
def test_chunked_loss_and_gradients_equal_the_plain_loss(dtype, chunk_tokens):
    hidden, weight, targets = case(dtype)
    total, count = cross_entropy_sum(hidden, weight, targets, chunk_tokens=chunk_tokens)
    expected = plain(hidden, weight, targets)
    assert total.dtype == dtype
    assert count.item() == (targets != IGNORE).sum().item() < TOKENS
    torch.testing.assert_close(total, expected)
    # A factor on the loss, as the normalisation by the step's targets puts it there.
    actual = torch.autograd.grad(total / 7, (hidden, weight))
    for ours, reference in zip(actual, torch.autograd.grad(expected / 7, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, reference)


def test_bf16_errors_are_at_most_twice_those_of_the_plain_bf16_loss():
    exact_inputs = case(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in exact_inputs[:2]]
    expected = plain(*exact, exact_inputs[2])
    references = [expected, *torch.autograd.grad(expected, exact)]

    def errors(total: Tensor, leaves: list[Tensor]) -> list[float]:
        results = [total, *torch.autograd.grad(total, leaves)]
        return [(a.double() - e).abs().mean().item() for a, e in zip(results, references, strict=True)]

    hidden, weight, targets = case(torch.bfloat16)
    ours, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=8)
    assert ours.dtype == torch.float32
    logits = hidden @ weight.t()
    theirs = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    for our_error, plain_error in zip(errors(ours, [hidden, weight]), errors(theirs, [hidden, weight]), strict=True):
        assert our_error <= 2 * plain_error + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_targets_ignored_gives_zero_loss_and_zero_gradients(dtype):
    hidden, weight, targets = case(dtype)
    total, count = cross_entropy_sum(hidden, weight, targets.fill_(IGNORE), chunk_tokens=5)
    total.backward()
    assert total.item() == 0
    assert count.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_ignored_tokens_have_exactly_zero_gradient_whatever_their_logits():
    hidden, weight, targets = case(torch.float32)
    hidden.data[targets == IGNORE] *= 1e20
    total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=5)
    total.backward()
    assert total.isfinite()
    assert not hidden.grad[targets == IGNORE].any()
    assert hidden.grad[targets != IGNORE].any()


def test_huge_logits_do_not_overflow():
    hidden, weight, targets = case(torch.float32, scale=1e4)
    total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=5)
    torch.testing.assert_close(total, plain(hidden, weight, targets))
    total.backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_no_tokens_at_all_is_a_loss_of_zero():
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    total, count = cross_entropy_sum(torch.zeros(0, WIDTH), weight, torch.zeros(0, dtype=torch.long), chunk_tokens=4)
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert not weight.grad.any()


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_requires_a_gradient_gets_one(needs):
    hidden, weight, targets = case()
    expected = plain(hidden, weight, targets)
    references = torch.autograd.grad(expected, (hidden, weight))
    hidden.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=7)
    torch.testing.assert_close(total.detach(), expected.detach())
    assert total.requires_grad == any(needs)
    if any(needs):
        total.backward()
    for leaf, needed, reference in zip((hidden, weight), needs, references, strict=True):
        if needed:
            torch.testing.assert_close(leaf.grad, reference)
        else:
            assert leaf.grad is None


def test_validation_computes_no_gradients(monkeypatch):
    asked = []
    original = loss_module._softmax_gradient_
    monkeypatch.setattr(
        loss_module, "_softmax_gradient_", lambda x, t, with_grad: asked.append(with_grad) or original(x, t, with_grad)
    )
    hidden, weight, targets = case()
    with torch.no_grad():
        without, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=40)
    total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=40)
    assert asked == [False, True]
    assert without == total


def test_a_weight_used_as_embedding_too_gets_both_gradients():
    _, weight, targets = case()
    tokens = targets.clamp(min=0)
    total, _ = cross_entropy_sum(F.embedding(tokens, weight).tanh(), weight, targets, chunk_tokens=7)
    total.backward()
    mine, weight.grad = weight.grad, None
    plain(F.embedding(tokens, weight).tanh(), weight, targets).backward()
    torch.testing.assert_close(mine, weight.grad)


def test_a_kept_graph_gives_the_same_gradient_twice():
    hidden, weight, targets = case()
    total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=7)
    first = torch.autograd.grad(3 * total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(3 * total, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_micro_batches_of_unequal_target_counts_add_up_to_the_whole():
    hidden, weight, targets = case()
    whole, count = cross_entropy_sum(hidden, weight, targets, chunk_tokens=64)
    reference = torch.autograd.grad(whole / count, weight)[0]
    gradient = torch.zeros_like(weight)
    for rows in (slice(0, 1), slice(1, 3)):
        part, _ = cross_entropy_sum(hidden[rows], weight, targets[rows], chunk_tokens=4)
        gradient += torch.autograd.grad(part / count, weight)[0]
    torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [True, False])
def test_mixed_precision_multiplies_in_bf16_and_returns_gradients_in_the_parameters_dtype(
    monkeypatch, hidden_dtype, inside
):
    seen = []
    original = loss_module._softmax_gradient_
    monkeypatch.setattr(loss_module, "_softmax_gradient_", lambda x, *a: seen.append(x.dtype) or original(x, *a))
    hidden, weight, targets = case(torch.float32)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    expected = plain(hidden.float(), weight, targets)
    references = torch.autograd.grad(expected, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=64)
    total.backward()
    assert seen == [torch.bfloat16 if inside else hidden_dtype]
    assert total.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.dtype) == (hidden_dtype, torch.float32)
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=0)
    for leaf, reference in zip((hidden, weight), references, strict=True):
        assert (leaf.grad - reference).norm() < 0.02 * reference.norm()


def test_the_heads_gradient_is_summed_over_chunks_in_float32():
    """4,096 equal contributions: a bf16 accumulator stops growing at 256 of them."""
    hidden = torch.full((4096, 8), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(8, 8, dtype=torch.bfloat16, requires_grad=True)
    cross_entropy_sum(hidden, weight, torch.zeros(4096, dtype=torch.long), chunk_tokens=1)[0].backward()
    torch.testing.assert_close(weight.grad[1].float(), torch.full((8,), 4096 / 8))


class LiveLogits(TorchDispatchMode):
    """The most rows with a column for each token of the vocabulary that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and VOCAB <= result.shape[1] <= 64:
            self.seen.append(weakref.ref(result))
        alive = [tensor for reference in self.seen if (tensor := reference()) is not None]
        rows = {tensor.untyped_storage().data_ptr(): len(tensor) for tensor in alive if len(tensor) != WIDTH}
        self.most = max(self.most, sum(rows.values()))
        return result


@pytest.mark.parametrize(("fused", "copies"), [(True, 1), (False, 2)])
def test_logits_of_one_chunk_are_alive_at_a_time(monkeypatch, fused, copies):
    """PyTorch's softmax stands beside the logits; a fused kernel, here one that does nothing, works in their place."""
    if fused:
        monkeypatch.setattr(loss_module, "_softmax_gradient_", lambda logits, *rest: logits.new_zeros(len(logits)))
    hidden, weight, targets = case()
    with LiveLogits() as live:
        total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=4)
        total.backward()
    assert live.most == 4 * copies


@pytest.mark.parametrize("wrong", [VOCAB, VOCAB + 3, -1, -99])
def test_a_target_outside_the_vocabulary_is_named_with_its_place(wrong):
    hidden, weight, targets = case()
    targets[1, 4] = wrong
    with pytest.raises(ValueError, match=rf"target {wrong} at \(1, 4\) .*vocabulary of {VOCAB}"):
        cross_entropy_sum(hidden, weight, targets, chunk_tokens=8)


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, targets = case()
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        cross_entropy_sum(hidden, weight, targets, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"hidden \[3, 11, 16\].*targets \[3, 10\]"):
        cross_entropy_sum(hidden, weight, targets[:, 1:], chunk_tokens=8)


IN_THE_INTERPRETER = """
import torch
from flashtrain.models.loss import _liger_kernel, _liger_softmax_gradient_, _softmax_gradient_
kernel = _liger_kernel()
assert kernel is not None
torch.manual_seed(0)
targets = torch.tensor([3, -100, 50, 0, 17])
for with_grad in (True, False):
    logits = torch.randn(5, 64)
    logits[:, 51:] = -torch.inf
    copy = logits.clone()
    losses = _liger_softmax_gradient_(kernel, logits, targets, with_grad)
    torch.testing.assert_close(losses, _softmax_gradient_(copy, targets, with_grad))
    if with_grad:
        torch.testing.assert_close(logits, copy)
        assert not logits[:, 51:].any()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU the kernel itself is compared below")
def test_ligers_kernel_gives_the_loss_and_gradient_of_pytorch():
    """Runs in Triton's interpreter, so that a version of Liger with other parameters is noticed without a GPU."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_liger_with_unknown_parameters_is_left_alone_and_said(monkeypatch, caplog):
    module = type(sys)("liger_kernel.ops.cross_entropy")
    module.liger_cross_entropy_kernel = type("Kernel", (), {"arg_names": ["X_ptr", "NEW_FLAG"]})()
    monkeypatch.setitem(sys.modules, "liger_kernel", type(sys)("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", type(sys)("liger_kernel.ops"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", module)
    loss_module._liger_kernel.cache_clear()
    try:
        assert loss_module._liger_kernel() is None
        assert "NEW_FLAG" in caplog.text
    finally:
        loss_module._liger_kernel.cache_clear()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("liger", [True, False])
def test_gpu_loss_and_gradients_match_float64_without_synchronising(monkeypatch, dtype, liger):
    if liger:
        pytest.importorskip("liger_kernel")
    else:
        monkeypatch.setattr(loss_module, "_liger_kernel", lambda: None)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 128, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (0.1 * torch.randn(50_257, 128, generator=generator)).cuda().requires_grad_()
    targets = torch.randint(50_257, (700,), generator=generator).cuda()
    targets[::5] = IGNORE
    exact = [hidden.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()]
    expected = plain(*exact, targets)
    references = torch.autograd.grad(expected, exact)
    plain_logits = hidden @ weight.to(dtype).t()
    plain_loss = F.cross_entropy(plain_logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    plain_gradients = torch.autograd.grad(plain_loss, (hidden, weight))
    cross_entropy_sum(hidden, weight, targets, chunk_tokens=256)[0].backward()  # compiles the kernel
    hidden.grad = weight.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=256)
        total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert abs(total.item() / expected.item() - 1) < (1e-5 if dtype == torch.float32 else 1e-3)
    for leaf, theirs, reference in zip((hidden, weight), plain_gradients, references, strict=True):
        plain_error = (theirs.double() - reference).norm()
        assert (leaf.grad.double() - reference).norm() <= 2 * plain_error + 1e-6 * reference.norm()


def test_liger_where_it_cannot_run_is_refused_with_the_way_out():
    hidden, weight, targets = case()
    with pytest.raises(
        ValueError, match=r"memory.loss=liger: its kernel needs an NVIDIA GPU.* write memory.loss=chunked"
    ):
        cross_entropy_sum(hidden.cpu(), weight.cpu(), targets.cpu(), chunk_tokens=8, kernel="liger")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_liger_and_chunked_give_the_same_loss_and_gradients(monkeypatch, dtype):
    """Tied weights: the head is the embedding; two micro-batches add up, one of them with ignored targets alone."""
    pytest.importorskip("liger_kernel")
    generator = torch.Generator().manual_seed(0)
    table = (0.1 * torch.randn(5_001, 128, generator=generator)).cuda().requires_grad_()
    tokens = torch.randint(5_001, (2, 300), generator=generator).cuda()
    targets = torch.randint(5_001, (2, 300), generator=generator).cuda()
    targets[0, ::3], targets[1] = IGNORE, IGNORE
    results = []
    for kernel in ("chunked", "liger"):
        if kernel == "chunked":
            monkeypatch.setattr(loss_module, "_liger_softmax_gradient_", None)  # chunked never takes Liger's
        table.grad, total = None, 0.0
        for row in range(2):
            hidden = F.embedding(tokens[row], table).to(dtype)
            loss, _ = cross_entropy_sum(hidden, table, targets[row], chunk_tokens=128, kernel=kernel)
            loss.backward()
            total += loss.item()
        results.append((total, table.grad.clone()))
        monkeypatch.undo()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    torch.testing.assert_close(*(gradient for _, gradient in results), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
def test_gpu_target_outside_the_vocabulary_gives_nan_and_leaves_the_gpu_usable():
    hidden, weight, targets = (x.detach().float().cuda() if x.is_floating_point() else x.cuda() for x in case())
    targets[0, 0] = VOCAB + 1_000_000
    total, _ = cross_entropy_sum(hidden, weight, targets, chunk_tokens=8)
    assert total.isnan()
    targets[0, 0] = 1
    assert cross_entropy_sum(hidden, weight, targets, chunk_tokens=8)[0].isfinite()


@pytest.mark.gpu
@needs_gpu
def test_gpu_memory_holds_one_chunk_of_logits():
    pytest.importorskip("liger_kernel")
    hidden = torch.randn(16_384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50_257, 64, device="cuda", requires_grad=True)
    targets = torch.randint(50_257, (16_384,), device="cuda")
    cross_entropy_sum(hidden, weight, targets, chunk_tokens=1024)[0].backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy_sum(hidden, weight, targets, chunk_tokens=1024)[0].backward()
    chunk = 1024 * 50_304 * 2
    assert torch.cuda.max_memory_allocated() - before < 2 * chunk
