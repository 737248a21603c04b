"""With q = 0 every visible key weighs the same, so outputs and gradients are known numbers and a mask that is wrong by
one key shows as a plainly wrong one. v_j = j + 1, k_j = j, dout = 1, head_dim 64, scale 1/8."""

import math

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow, lower
from tests.attention.oracle import Case, run

BACKENDS = ("portable", "sdpa", "standard")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def uniform_case(
    device: torch.device,
    mask: Mask | None,
    seq: tuple[int, int],
    heads: tuple[int, int] = (2, 2),
    dtype: torch.dtype = torch.float32,
) -> Case:
    ramp = torch.arange(seq[1], dtype=torch.float32, device=device)[:, None].expand(1, heads[1], seq[1], 64)
    shape = (1, heads[0], seq[0], 64)
    return Case(
        q=torch.zeros(shape, device=device, dtype=dtype),
        k=ramp.to(dtype).clone(),
        v=(ramp + 1).to(dtype),
        dout=torch.ones(shape, device=device, dtype=dtype),
        dlse=torch.zeros(shape[:3], device=device),
        scale=1 / 8,
        plan=lower(mask, 1, *seq, device),
    )


def assert_rows(result: Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    """Every head and channel of `result` holds these numbers, one a row."""
    wanted = torch.tensor(expected, dtype=torch.float32, device=result.device)
    got = result.float()
    assert got.shape[2] == len(expected)
    wanted = wanted[:, None].expand_as(got) if got.dim() == 4 else wanted.expand_as(got)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_rows_average_the_keys_so_far(device: torch.device, backend: str) -> None:
    results = run(uniform_case(device, Causal(), (4, 4)), backend)
    assert_rows(results["out"], [1, 1.5, 2, 2.5])
    assert_rows(results["dv"], [2.083333, 1.083333, 0.583333, 0.25])
    assert_rows(results["dq"], [0, 2, 5.333333, 10])
    assert torch.equal(results["dk"], torch.zeros_like(results["dk"]))
    if "lse" in results:
        assert_rows(results["lse"], [math.log(i + 1) for i in range(4)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seq", [4, 200])
def test_full_rows_average_all_keys(device: torch.device, backend: str, seq: int) -> None:
    results = run(uniform_case(device, None, (seq, seq)), backend)
    assert_rows(results["out"], [(seq + 1) / 2] * seq)
    assert_rows(results["dv"], [1.0] * seq)
    assert_rows(results["dq"], [8 * (seq**2 - 1) / 12] * seq)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_more_keys_than_queries_causal_is_aligned_at_the_end(device: torch.device, backend: str) -> None:
    assert_rows(run(uniform_case(device, Causal(), (2, 5)), backend)["out"], [2.5, 3.0])
    assert_rows(run(uniform_case(device, Causal(), (1, 1000)), backend)["out"], [500.5])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_that_see_nothing_give_zero_and_no_gradient(
    device: torch.device, backend: str, dtype: torch.dtype
) -> None:
    results = run(uniform_case(device, Causal(), (5, 2), dtype=dtype), backend)
    assert_rows(results["out"], [0, 0, 0, 1, 1.5])
    assert all(torch.isfinite(results[name]).all() for name in ("out", "dq", "dk", "dv"))
    assert torch.equal(results["dq"][:, :, :3], torch.zeros_like(results["dq"][:, :, :3]))
    assert_rows(results["dv"], [1.5, 0.5])
    if "lse" in results:
        assert_rows(results["lse"], [-math.inf, -math.inf, -math.inf, 0.0, math.log(2)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_no_query_sees_get_zero_gradients(device: torch.device, backend: str) -> None:
    results = run(uniform_case(device, SlidingWindow(1, 0), (3, 300)), backend)
    assert_rows(results["out"], [297.5, 298.5, 299.5])
    for name in ("dk", "dv"):
        assert torch.equal(results[name][:, :, :296], torch.zeros_like(results[name][:, :, :296]))
    assert_rows(results["dv"][:, :, 296:], [0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_row_that_ends_inside_a_tile_is_exact(device: torch.device, backend: str) -> None:
    seq = 1025 if device.type == "cuda" else 515
    results = run(uniform_case(device, Causal(), (seq, seq), heads=(1, 1)), backend)
    assert_rows(results["out"], [(i + 2) / 2 for i in range(seq)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_document_between_two_changes_nothing(device: torch.device, backend: str) -> None:
    results = run(uniform_case(device, Causal() & Documents(((3, 0, 2),)), (5, 5)), backend)
    assert_rows(results["out"], [1, 1.5, 2, 4, 4.5])
    assert_rows(results["dv"], [1.833333, 0.833333, 0.333333, 1.5, 0.5])
    assert_rows(results["dq"], [0, 2, 5.333333, 0, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_head_h_reads_key_head_h_over_the_group(device: torch.device, backend: str) -> None:
    case = uniform_case(device, Causal(), (4, 4), heads=(6, 2))
    case.v[:, 1] += 10
    results = run(case, backend)
    assert_rows(results["out"][:, :3], [1, 1.5, 2, 2.5])
    assert_rows(results["out"][:, 3:], [11, 11.5, 12, 12.5])
    assert_rows(results["dv"], [6.25, 3.25, 1.75, 0.75])


def test_a_gradient_on_lse_alone_moves_q_and_k_but_not_v(device: torch.device) -> None:
    case = uniform_case(device, Causal(), (4, 4))
    case.dout.zero_()
    case.dlse.fill_(1.0)
    results = run(case)
    # d lse / d q is scale times the mean of the visible keys.
    assert_rows(results["dq"], [0, 1 / 16, 1 / 8, 3 / 16])
    assert torch.equal(results["dv"], torch.zeros_like(results["dv"]))
