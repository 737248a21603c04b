"""Any strides, any neighbours in memory, any allocator contents: the numbers are the same."""

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, attention
from flashtrain.attention.portable import launch
from flashtrain.attention.portable.launch import fit_tile
from tests.attention.oracle import NAMES, Case, make_case, run


def assert_same(variant: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    """Bit for bit; float32 gradients on a GPU to a millionth, since there the layout of a product follows the strides
    and its sums change their order with it."""
    for name in NAMES:
        assert variant[name].shape == base[name].shape
        loose = base[name].is_cuda and base[name].dtype == torch.float32 and name.startswith("d")
        tolerance = 1e-6 * base[name].abs().amax().item() if loose and base[name].numel() else 0
        torch.testing.assert_close(variant[name], base[name], rtol=0, atol=tolerance, msg=name)


def with_layout(case: Case, layout: str) -> Case:
    """The same numbers, laid out otherwise."""

    def lay(tensor: Tensor) -> Tensor:
        batch, heads, seq, dim = tensor.shape
        if layout == "fused_qkv":
            big = tensor.new_empty(batch, seq, 3, heads, dim)
            view = big[:, :, 1].transpose(1, 2)
        elif layout == "heads_after_tokens":
            view = tensor.new_empty(batch, seq, heads, dim).transpose(1, 2)
        elif layout == "every_other_channel":
            view = tensor.new_empty(batch, heads, seq, 2 * dim)[..., ::2]
        elif layout == "channels_before_tokens":
            view = tensor.new_empty(batch, heads, dim, seq).transpose(2, 3)
        else:  # an origin that no vector load can use
            view = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        return view.copy_(tensor)

    return Case(lay(case.q), lay(case.k), lay(case.v), lay(case.dout), case.dlse, case.scale, case.plan)


LAYOUTS = ["fused_qkv", "heads_after_tokens", "every_other_channel", "channels_before_tokens", "unaligned"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_change_no_bit(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(device, dtype, Causal(), batch=2, heads=(2, 1), seq=(70, 50), head_dim=32)
    base = run(case)
    for layout in LAYOUTS:
        assert_same(run(with_layout(case, layout)), base)


def test_keys_expanded_over_heads_get_the_sum_of_their_gradients(device: torch.device) -> None:
    case = make_case(device, mask=Causal(), heads=(3, 1), seq=(40, 40), head_dim=32)
    case.dlse.zero_()
    grouped = run(case)
    k, v = case.k.requires_grad_(), case.v.requires_grad_()
    expanded = k.expand(1, 3, 40, 32), v.expand(1, 3, 40, 32)
    out = attention(case.q, *expanded, case.plan, scale=case.scale, backend="portable")
    dk, dv = torch.autograd.grad(out, [k, v], case.dout)
    assert torch.equal(out.detach(), grouped["out"])
    torch.testing.assert_close(dk, grouped["dk"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dv, grouped["dv"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["expanded", "strided", "transposed"])
def test_the_gradient_that_comes_back_may_have_any_strides(device: torch.device, which: str) -> None:
    case = make_case(device, mask=Causal(), batch=2, seq=(40, 40), head_dim=32)
    if which == "expanded":  # what out.sum().backward() sends
        case.dout = torch.ones((), device=device).expand_as(case.dout)
    elif which == "strided":  # what torch.cat of the output with something wider sends
        case.dout = torch.randn(2, 2, 40, 100, device=device)[..., 30:62]
    else:
        case.dout = torch.randn(2, 40, 2, 32, device=device).transpose(1, 2)
    contiguous = Case(**{**vars(case), "dout": case.dout.contiguous()})
    assert_same(run(case), run(contiguous))


@pytest.mark.parametrize(("seq", "head_dim"), [((70, 90), 32), ((65, 65), 24), ((129, 40), 59)], ids=str)
def test_poison_around_the_tensors_is_never_read(device: torch.device, seq: tuple[int, int], head_dim: int) -> None:
    case = make_case(device, mask=Causal(), heads=(2, 1), seq=seq, head_dim=head_dim)

    def poisoned(tensor: Tensor) -> Tensor:
        batch, heads, rows, dim = tensor.shape
        big = torch.full((batch + 1, heads + 1, rows + 150, dim + 13), float("nan"), device=device)
        view = big[:batch, :heads, :rows, :dim]
        return view.copy_(tensor)

    variant = Case(*(poisoned(t) for t in (*case.inputs(), case.dout)), case.dlse, case.scale, case.plan)
    assert_same(run(variant), run(case))


@pytest.mark.parametrize(("seq", "head_dim"), [((70, 30), 24), ((3, 150), 32), ((65, 0), 16)], ids=str)
def test_every_element_of_every_result_is_written(
    device: torch.device, seq: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uninitialised memory holds NaN here, and what is left unwritten would show it."""
    case = make_case(device, mask=Causal(), heads=(4, 2), seq=seq, head_dim=head_dim)
    base = run(case)
    empty_like, new_empty = torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    assert_same(run(case), base)


def test_a_tensor_whose_tile_passes_32_bits_is_copied_and_no_other() -> None:
    wide = torch.empty_strided((1, 1, 200, 64), (0, 0, 2**25, 1), device="meta")
    assert fit_tile(wide, 32) is wide
    assert fit_tile(wide, 128).stride() == (200 * 64, 200 * 64, 64, 1)


@pytest.mark.parametrize("far", ["rows", "heads", "batch"])
def test_offsets_beyond_32_bits_reach_the_right_element(device: torch.device, far: str) -> None:
    """Tensors spread over more than 2**31 elements. On the CPU only the pages that are touched take memory."""
    batch, heads, seq, dim = {"rows": (1, 1, 140, 16), "heads": (1, 3, 20, 16), "batch": (3, 1, 20, 16)}[far]
    case = make_case(device, torch.float16, Causal(), batch, (heads, heads), (seq, seq), dim)
    strides = {"rows": (0, 0, 2**24, 1), "heads": (0, 2**30 + 64, 64, 1), "batch": (2**30 + 64, 64, 64, 1)}[far]
    reach = sum((size - 1) * stride for size, stride in zip((batch, heads, seq, dim), strides, strict=True))
    assert reach > 2**31
    storage = torch.empty(reach + 1 + 4 * dim, dtype=torch.float16, device=device)

    def spread(tensor: Tensor, place: int) -> Tensor:
        return storage.as_strided(tensor.shape, strides, place * dim).copy_(tensor)

    tensors = [spread(tensor, place) for place, tensor in enumerate((*case.inputs(), case.dout))]
    assert_same(run(Case(*tensors, case.dlse, case.scale, case.plan)), run(case))


def test_heads_are_grouped_by_what_fits_the_cache_and_never_by_more_than_there_are() -> None:
    assert launch.heads_together((2, 4, 1, 16), 2, 8) == 8
    long = (1, 8, 2**17, 128)
    assert launch.heads_together(long, 2, 8) == 1
    assert launch.heads_together(long, 2, 64) == 2  # eight query heads share a key head of 64 MiB
    assert launch.heads_together(long, 2, 64, share=2) == 4
