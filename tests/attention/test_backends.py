"""A call that cannot be done says what is wrong and what to do, before anything is launched."""

import logging

import pytest
import torch
from torch import Tensor

import flashtrain.attention as package
from flashtrain.attention import Causal, Documents, attention, choose_backend, lower
from flashtrain.attention.backends import portable_backward


def qkv(
    heads: tuple[int, int] = (2, 2), seq: int = 8, dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.zeros(1, h, seq, dim, dtype=dtype) for h in (heads[0], heads[1], heads[1])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_dtype_the_kernels_do_not_take_is_named(device: torch.device, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"float32, not {dtype}"):
        choose_backend("portable", qkv(dtype=dtype)[0].to(device))


@pytest.mark.parametrize("dim", [8, 15, 257])
def test_a_head_dim_the_kernels_do_not_take_is_named(device: torch.device, dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim 16 to 256, not {dim}"):
        choose_backend("portable", qkv(dim=dim)[0].to(device))


def test_without_a_gpu_the_kernels_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="need a CUDA GPU"):
        attention(*qkv(), backend="portable")


def test_auto_on_the_cpu_takes_sdpa_and_says_once_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(package, "_said", set())
    with caplog.at_level(logging.INFO, logger=package.__name__):
        attention(*qkv())
        attention(*qkv())
    assert len(caplog.messages) == 1
    assert "sdpa" in caplog.messages[0] and "cpu" in caplog.messages[0]


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"backend='flash'.*portable.*standard"):
        attention(*qkv(), backend="flash")


def test_sdpa_has_no_lse_and_says_so() -> None:
    with pytest.raises(ValueError, match="does not return the lse"):
        attention(*qkv(), backend="sdpa", return_lse=True)
    assert choose_backend("auto", qkv()[0], return_lse=True) == "standard"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(2, 8, 16)] * 3, r"takes \[batch, heads, seq, head_dim\]"),
        ([torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 32), torch.zeros(1, 2, 8, 32)], "agree in batch and head_dim"),
        ([torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 9, 16)], "k and v in shape"),
        (qkv(heads=(6, 4)), "num_heads=6 must be a multiple of num_kv_heads=4"),
        (qkv(heads=(6, 0)), "num_kv_heads=0"),
    ],
)
def test_shapes_that_do_not_fit_are_named(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*tensors)


def test_tensors_on_different_devices_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="q is on cpu, k on meta"):
        attention(q, k.to("meta"), v)


@pytest.mark.parametrize(
    ("head_dim", "blocks", "deterministic", "reason"),
    [
        (256, (), False, None),
        (136, (), False, None),
        (128, (), True, None),
        (128, (128, 128, 1, 1), False, None),
        (64, (128, 128, 1, 1), True, "block layout is not deterministic"),
        (136, (), True, "the deterministic Hopper backward pass takes head_dim up to 128, not 136"),
        (136, (128, 128, 1, 1), False, "over a block layout takes head_dim up to 128, not 136"),
    ],
)
def test_the_hopper_backward_goes_to_the_portable_kernels_only_where_it_has_to(
    head_dim: int, blocks: tuple[int, ...], deterministic: bool, reason: str | None
) -> None:
    said = portable_backward(head_dim, blocks, deterministic)
    assert said is None if reason is None else said is not None and reason in said


def test_a_plan_for_other_lengths_or_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="for 9 queries and 9 keys, q has 8 and k 8"):
        attention(*qkv(), lower(Causal(), 1, 9, 9, "cpu"))
    with pytest.raises(ValueError, match="for 2 rows and the batch has 1"):
        attention(*qkv(), lower(Documents(((8,), (8,))), 2, 8, 8, "cpu"))


@pytest.mark.gpu
def test_a_plan_on_another_device_is_refused() -> None:
    q, k, v = (tensor.cuda() for tensor in qkv())
    with pytest.raises(ValueError, match="the plan is on cpu and q on cuda"):
        attention(q, k, v, lower(Documents(((8,),)), 1, 8, 8, "cpu"))


@pytest.mark.gpu
def test_auto_on_the_gpu_takes_the_kernels() -> None:
    assert choose_backend("auto", torch.zeros(1, 2, 8, 64, device="cuda", dtype=torch.float32)) == "portable"
