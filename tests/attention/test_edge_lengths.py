"""Nothing to attend to, or nobody who attends: an answer of the right shape, zeros where zeros are due."""

import pytest
import torch

from flashtrain.attention import Causal, Documents, Mask
from tests.attention.oracle import assert_accurate, make_case, run

BACKENDS = ("portable", "sdpa", "standard")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
@pytest.mark.parametrize(("batch", "seq"), [(0, (4, 4)), (2, (0, 4)), (2, (4, 0)), (1, (0, 0))], ids=str)
def test_an_empty_batch_no_queries_and_no_keys_give_empty_or_zero_results(
    device: torch.device, backend: str, mask: Mask | None, batch: int, seq: tuple[int, int]
) -> None:
    case = make_case(device, mask=mask, batch=batch, heads=(4, 2), seq=seq, head_dim=16)
    results = run(case, backend)
    for name, like in (("out", case.q), ("dq", case.q), ("dk", case.k), ("dv", case.v)):
        assert torch.equal(results[name], torch.zeros_like(like)), name
    if "lse" in results:
        assert torch.isneginf(results["lse"]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_empty_documents(device: torch.device, backend: str) -> None:
    case = make_case(device, mask=Documents(((0, 0),)), seq=(0, 0), head_dim=16)
    assert run(case, backend)["out"].shape == (1, 2, 0, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_whose_keys_nobody_sees_get_zero_gradients(device: torch.device, backend: str) -> None:
    mask = Causal() & Documents(((0, 60, 42, 0),), ((127, 88, 36, 54),))
    case = make_case(device, torch.bfloat16, mask, heads=(4, 1), seq=(102, 305), head_dim=256)
    results = run(case, backend)
    for name in ("dk", "dv"):
        for unseen in (slice(0, 127), slice(251, 305)):
            assert torch.equal(results[name][:, :, unseen], torch.zeros_like(results[name][:, :, unseen]))
    assert_accurate(case, backend, results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_of_one_token_between_empty_ones(device: torch.device, backend: str) -> None:
    case = make_case(device, mask=Causal() & Documents(((0, 1, 0, 1),)), heads=(9, 3), seq=(2, 2), head_dim=16)
    results = run(case, backend)
    torch.testing.assert_close(results["out"], case.v.repeat_interleave(3, dim=1))


def test_more_queries_than_keys_at_scale(device: torch.device) -> None:
    assert_accurate(make_case(device, mask=Causal(), seq=(300, 130), head_dim=32))
