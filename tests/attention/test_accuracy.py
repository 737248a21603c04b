"""Attention and its gradients are as accurate as plain PyTorch, for every shape, mask, head dim and dtype promised."""

import pytest
import torch

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow
from flashtrain.attention.portable import launch
from tests.attention.oracle import Case, assert_accurate, make_case, run

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_every_dtype_is_within_twice_the_error_of_plain_pytorch(
    device: torch.device, dtype: torch.dtype, mask: Mask | None
) -> None:
    assert_accurate(make_case(device, dtype, mask, batch=2, heads=(2, 1), seq=(150, 150)))


LENGTHS = [1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255]


@pytest.mark.parametrize("seq", LENGTHS)
def test_any_length_is_right(device: torch.device, seq: int) -> None:
    assert_accurate(make_case(device, mask=Causal(), heads=(1, 1), seq=(seq, seq), head_dim=32))


PAIRS = [(1, 127), (127, 1), (1, 1), (128, 129), (129, 128), (7, 200), (200, 7), (100, 228)]


@pytest.mark.parametrize("seq", PAIRS, ids=str)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_different_query_and_key_lengths_are_right(
    device: torch.device, seq: tuple[int, int], mask: Mask | None
) -> None:
    assert_accurate(make_case(device, mask=mask, heads=(1, 1), seq=seq, head_dim=32))


@pytest.mark.parametrize("head_dim", [16, 17, 24, 59, 64, 80, 96, 111, 128, 192, 256])
def test_any_head_dim_from_16_to_256_is_right(device: torch.device, head_dim: int) -> None:
    dtype = DTYPES[head_dim % 3]
    case = make_case(device, dtype, Causal(), heads=(2, 1), seq=(70, 90), head_dim=head_dim)
    assert_accurate(case)
    # Every channel counts, the last one too.
    other = Case(**{**vars(case), "q": case.q.clone()})
    other.q[..., -1] += 4
    assert not torch.equal(run(other)["out"], run(case)["out"])


MASKS: dict[str, tuple[Mask, tuple[int, int]]] = {
    "window": (SlidingWindow(20, 3), (200, 200)),
    "window_left": (SlidingWindow(33), (130, 200)),
    "window_right": (SlidingWindow(None, 5), (200, 130)),
    "own_position_only": (SlidingWindow(0, 0), (140, 140)),
    "causal_window": (Causal() & SlidingWindow(31), (260, 260)),
    "more_queries_than_keys": (Causal() & SlidingWindow(40), (200, 90)),
    "more_keys_than_queries": (Causal() & SlidingWindow(40), (90, 200)),
    "documents": (Documents(((70, 1, 0, 58, 71),)), (200, 200)),
    "causal_documents": (Causal() & Documents(((3, 128, 69),)), (200, 200)),
    "causal_window_documents": (Causal() & SlidingWindow(24) & Documents(((100, 100),)), (200, 200)),
    "a_document_without_keys": (Documents(((30, 10),), ((150, 0),)), (40, 150)),
    "a_document_without_queries": (Documents(((150, 0),), ((30, 10),)), (150, 40)),
    "documents_with_fewer_queries": (Causal() & Documents(((20, 0, 44),), ((60, 30, 110),)), (64, 200)),
    "documents_with_fewer_keys": (Causal() & Documents(((60, 30, 110),), ((20, 0, 44),)), (200, 64)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_their_conjunctions_are_right(device: torch.device, name: str) -> None:
    mask, seq = MASKS[name]
    assert_accurate(make_case(device, mask=mask, heads=(1, 1), seq=seq, head_dim=32))


def test_each_row_of_a_batch_has_its_own_documents(device: torch.device) -> None:
    mask = Causal() & Documents(((40, 60), (0, 100), (99, 1)))
    assert_accurate(make_case(device, mask=mask, batch=3, heads=(2, 1), seq=(100, 100), head_dim=32))


@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (7, 7), (12, 4)], ids=str)
def test_grouped_query_heads_read_their_key_head_and_sum_its_gradients(
    device: torch.device, heads: tuple[int, int]
) -> None:
    assert_accurate(make_case(device, mask=Causal(), heads=heads, seq=(40, 70), head_dim=16))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0, -0.3])
def test_any_scale_is_right(device: torch.device, scale: float) -> None:
    assert_accurate(make_case(device, mask=Causal(), heads=(1, 1), seq=(80, 40), head_dim=32, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_neither_overflow_nor_lose_the_maximum(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(device, dtype, Causal(), heads=(1, 1), seq=(130, 130), head_dim=32)
    case.q.mul_(10)
    assert_accurate(case)


def test_float32_is_float32_and_not_tf32(device: torch.device) -> None:
    ours = run(case := make_case(device, heads=(1, 1), seq=(100, 100), head_dim=128))
    truth = (case.q.double() @ case.k.double().mT * case.scale).softmax(-1) @ case.v.double()
    assert ((ours["out"] - truth).norm() / truth.norm()).item() < 1e-6


def test_the_order_in_which_heads_are_visited_changes_no_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(device, mask=Causal(), batch=1, heads=(5, 5), seq=(140, 140), head_dim=16)
    base = run(case)
    monkeypatch.setattr(launch, "STREAMED_BYTES", 2 * 2 * 140 * 16 * 4)  # two heads at a time, and one is left over
    after = run(case)
    assert all(torch.equal(base[name], after[name]) for name in base)


def test_a_prefix_of_a_causal_run_equals_the_run_on_the_prefix(device: torch.device) -> None:
    case = make_case(device, mask=Causal(), heads=(1, 1), seq=(200, 200), head_dim=32)
    short = make_case(device, mask=Causal(), heads=(1, 1), seq=(77, 77), head_dim=32)
    short.q, short.k, short.v = (tensor[:, :, :77] for tensor in case.inputs())
    torch.testing.assert_close(run(short)["out"], run(case)["out"][:, :, :77], rtol=1e-6, atol=1e-6)


def test_a_token_of_another_document_changes_nothing(device: torch.device) -> None:
    case = make_case(device, mask=Documents(((60, 80),)), heads=(1, 1), seq=(140, 140), head_dim=32)
    before = run(case)
    case.k[:, :, :60] += 1
    case.v[:, :, :60] -= 1
    case.dout[:, :, :60] *= 3
    after = run(case)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(before[name][:, :, 60:], after[name][:, :, 60:]), name


@pytest.mark.parametrize("backend", ["sdpa", "standard"])
@pytest.mark.parametrize("name", ["window", "more_queries_than_keys", *list(MASKS)[-7:]])
def test_the_other_backends_keep_the_same_promises(device: torch.device, backend: str, name: str) -> None:
    mask, seq = MASKS[name]
    assert_accurate(make_case(device, torch.bfloat16, mask, heads=(4, 2), seq=seq, head_dim=40), backend)


@pytest.mark.parametrize("backend", ["sdpa", "standard"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("seq", [(70, 70), (30, 90), (90, 30)], ids=str)
def test_the_other_backends_align_at_the_end(
    device: torch.device, backend: str, mask: Mask | None, seq: tuple[int, int]
) -> None:
    assert_accurate(make_case(device, mask=mask, batch=2, heads=(4, 2), seq=seq, head_dim=32), backend)
